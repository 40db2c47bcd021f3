"""Build, compare, check and test the files of a release, in ``dist``.

usage: python -m tools.release [WHEEL]...

A WHEEL is a pattern, such as ``cp311-manylinux*``; without one, all wheels are built. The last lines are a
table with the result of each file. The exit status is 1 if a file could not be built or a check failed.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from tools.release import checks, roots, wheels
from tools.release.roots import SUITES, NotHere, Root, System, command, headers
from tools.release.targets import NATIVE, Target, selected

PROJECT = Path(__file__).parents[2]
WORK = PROJECT / "build" / "release"
DIST = PROJECT / "dist"


class Release:
    """The source distribution and its wheels, built in ``WORK`` and put into ``DIST``."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, str]] = []
        self.failed = False
        self.root_for = functools.cache(self._root)

    def _root(self, python: str, machine: str = NATIVE) -> Root:
        read = command(
            "apt-get",
            "indextargets",
            "--format",
            "$(REPO_URI)",
            "Created-By: Packages",
            "Origin: Debian",
            "Label: Debian",
        )
        return Root(WORK, python, machine, read.split()[0])

    def row(self, name: str, built: str, tested: str, good: bool = True) -> None:
        """Add a line to the table, and print the line at once."""
        self.rows.append((name, built, tested))
        self.failed |= not good
        print(f"{name}: {built}; {tested}", flush=True)

    def source(self) -> Path:
        """Build the source distribution twice, check it, and return its unpacked files."""
        first, second = (wheels.sdist(PROJECT, _fresh(WORK / name)) for name in ("sdist", "sdist-again"))
        checks.same(first, second)
        checks.check_sdist(first, PROJECT)
        checks.check_by_tools(first)
        shutil.copy(first, DIST)
        self.row("sdist", "built twice, same bytes", "metadata and files checked")
        unpacked = _fresh(WORK / "source")
        with tarfile.open(first) as archive:
            archive.extractall(unpacked, filter="data")
        (tree,) = unpacked.iterdir()
        return tree

    def wheel(self, target: Target, source: Path) -> None:
        """Build one wheel twice, compare the two builds, check the wheel, and run it if this machine can."""
        try:
            found = headers(target, WORK, self.root_for)
            first, second = (
                wheels.wheel(
                    target, source, found, WORK / name / str(target), WORK / "zig", cache=name == "wheels"
                )
                for name in ("wheels", "wheels-again")
            )
            checks.same(first, second)
            checks.check_wheel(first, target, PROJECT, [WORK, PROJECT, wheels.BIN.parent])
            checks.check_by_tools(first)
        except NotHere as missing:
            return self.row(str(target), f"NOT BUILT: {missing}", "not tested", good=False)
        except (checks.Wrong, subprocess.CalledProcessError) as error:
            return self.row(str(target), f"FAILED: {checks.reason(error)}", "not tested", good=False)
        shutil.copy(first, DIST)
        built = "built twice, same bytes, metadata checked"
        try:
            self.row(str(target), built, self.run(first, target))
        except NotHere as missing:
            self.row(str(target), built, f"NOT TESTED: {missing}")
        except (checks.Wrong, subprocess.CalledProcessError) as error:
            self.row(str(target), built, f"FAILED: {checks.reason(error)}", good=False)

    def run(self, path: Path, target: Target) -> str:
        """Install and run a wheel on a system without a compiler, and return a summary of the checks.

        Raises:
            NotHere: This machine cannot run the wheel.
        """
        if target.python in SUITES and not target.free_threaded and target.libc.startswith("manylinux"):
            system: System = self.root_for(target.python, target.machine)
            python = f"/usr/bin/python{target.python}"
        else:
            system, python = roots.with_local(target, self.root_for)
        checks.check_runs(path, target, system, python, PROJECT)
        ran = "README's graph ran in processes and on threads"
        if target.machine == NATIVE:
            return f"installed without a compiler; {ran}"
        return f"installed by this machine's pip; {ran} in an emulator without a compiler"


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def main(patterns: list[str]) -> int:
    try:
        targets = selected(patterns)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    os.environ["SOURCE_DATE_EPOCH"] = command("git", "-C", PROJECT, "log", "-1", "--format=%ct").strip()
    _fresh(DIST)
    release = Release()
    try:
        source = release.source()
    except (checks.Wrong, subprocess.CalledProcessError) as error:
        print(f"sdist FAILED: {checks.reason(error)}", file=sys.stderr)
        return 1
    for target in targets:
        release.wheel(target, source)
    print("\n| file | built | tested |\n|---|---|---|")
    for row in release.rows:
        print("|", " | ".join(cell.splitlines()[0] for cell in row), "|")
    return int(release.failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
