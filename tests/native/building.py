"""Builds the native test programs with the plain compiler. The ring is free of Python, so its files and
``stub/Python.h`` are all that they need."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
CORE = HERE.parent.parent / "flowchan" / "_core"
RING = (
    *sorted(CORE.glob("ring*.cpp")),
    *(CORE / f"{name}.cpp" for name in ("lock", "memory", "process", "windows")),
)
WARNINGS = ("-Wall", "-Wextra", "-Wno-missing-field-initializers")
FLAGS = ("-std=c++20", "-O1", "-g", *WARNINGS, f"-I{CORE}", f"-I{HERE / 'stub'}")


class Builder:
    """Compiles each file once per set of flags, two at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs: dict[tuple[str, ...], Path] = {}

    def program(self, *sources: str, flags: Sequence[str] = (), planted: str = "") -> Path:
        """The program made of these files of this folder and the ring. ``planted`` is defined for plants.cpp
        alone."""
        key = (*sources, *flags, planted)
        if key not in self.programs:
            self.programs[key] = self.link(
                key, [*RING, *(HERE / source for source in sources)], flags, planted
            )
        return self.programs[key]

    def link(self, key: tuple[str, ...], sources: Sequence[Path], flags: Sequence[str], planted: str) -> Path:
        objects = []
        running: list[subprocess.Popen[str]] = []
        for source in sources:
            special = [f"-D{planted}"] if planted and source.name == "plants.cpp" else []
            name = "".join(
                c if c.isalnum() else "_"
                for c in "".join([source.parent.name, source.stem, *flags, *special])
            )
            objects.append(self.folder / f"{name}.o")
            if objects[-1].exists():
                continue
            if len(running) == 2:
                finish(running.pop(0))
            running.append(compiler(*FLAGS, *flags, *special, "-c", source, "-o", objects[-1]))
        for process in running:
            finish(process)
        program = self.folder / f"program{len(self.programs)}"
        finish(compiler(*flags, "-o", program, *objects, "-pthread"))
        return program


def compiler(*arguments: str | Path) -> subprocess.Popen[str]:
    command = [os.environ.get("CXX", "g++"), *map(str, arguments)]
    return subprocess.Popen(command, text=True, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate()
    assert process.returncode == 0, errors


def run(program: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end."""
    return subprocess.run(
        [str(program), *arguments],
        text=True,
        capture_output=True,
        env={**os.environ, **environment},
        check=False,
    )
