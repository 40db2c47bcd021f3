"""Builds the native test programs with the plain compiler. The ring is free of Python, so its files and
``stub/Python.h`` are all that they need."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent
CXX = os.environ.get("CXX", "g++")
CORE = HERE.parent.parent / "flowchan" / "_core"
RING = (
    *sorted(CORE.glob("ring*.cpp")),
    *(CORE / f"{name}.cpp" for name in ("lock", "memory", "process", "windows")),
)
LINK = (
    *RING,
    *(CORE / f"link{part}.cpp" for part in ("", "_ports", "_receive", "_send")),
    *(CORE / f"{name}.cpp" for name in ("lookouts", "sleeping")),
)
GROUP = tuple(
    CORE / f"{name}.cpp" for name in ("group", "group_manners", "group_ops", "kernels", "memory", "process")
)
WARNINGS = ("-Wall", "-Wextra", "-Wno-missing-field-initializers")
FLAGS = ("-std=c++20", "-g1", "-DFLOWCHAN_FAULTS", *WARNINGS, f"-I{CORE}", f"-I{HERE / 'stub'}")
"""With fault points, also where nobody dies at them: so the core is compiled once for both."""
OPTIMISE = {CORE: "-O1", HERE: "-O0"}
"""By folder: the programs themselves are compiled more often than it would take to run them faster. Neither
does it pay under a sanitizer, where they do little."""


class Builder:
    """Compiles two files at a time, and none a second time: objects and programs stay in ``folder`` under a
    name that is derived from all that they are made of. Of several processes one compiles, and the others
    wait for what it makes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        headers = sorted([*CORE.glob("*.hpp"), *HERE.glob("**/*.h*")])
        version = subprocess.run([CXX, "--version"], capture_output=True, text=True, check=True).stdout
        self.common = digest(version, *FLAGS, *(header.read_text() for header in headers))

    def program(
        self, *sources: str, flags: Sequence[str] = (), planted: str = "", core: Sequence[Path] = RING
    ) -> Path:
        """The program made of these files of this folder and of the core. ``planted`` is defined for
        plants.cpp alone."""
        objects = {}
        for source in [*core, *(HERE / source for source in (*sources, "faults.cpp"))]:
            special = [f"-D{planted}"] if planted and source.name == "plants.cpp" else []
            how = ["-O0" if flags else OPTIMISE[source.parent], *flags, *special]
            name = f"{source.stem}-{digest(self.common, *how, source.read_text())}.o"
            objects[self.folder / name] = [*FLAGS, *how, "-c", source]
        program = self.folder / f"{Path(sources[0]).stem}-{digest(*flags, *map(str, objects))}"
        if not program.exists():
            with self._alone():
                self._compile(objects)
                Compiling(program, *flags, *objects, "-pthread").finish()
        return program

    def _compile(self, objects: Mapping[Path, Sequence[str | Path]]) -> None:
        running: list[Compiling] = []
        for target, arguments in objects.items():
            if not target.exists():
                if len(running) == 2:
                    running.pop(0).finish()
                running.append(Compiling(target, *arguments))
        for compiling in running:
            compiling.finish()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


class Compiling:
    """A call of the compiler. What it makes gets its name when it is whole, for others may be looking for
    it."""

    def __init__(self, target: Path, *arguments: str | Path) -> None:
        self.target = target
        self.unfinished = target.with_name(f"{target.name}.{os.getpid()}")
        command = [CXX, *map(str, arguments), "-o", str(self.unfinished)]
        self.process = subprocess.Popen(command, text=True, stderr=subprocess.PIPE)

    def finish(self) -> None:
        _, errors = self.process.communicate()
        assert self.process.returncode == 0, errors
        self.unfinished.rename(self.target)


def run(program: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end."""
    return subprocess.run(
        [str(program), *arguments],
        text=True,
        capture_output=True,
        env={**os.environ, **environment},
        check=False,
    )
