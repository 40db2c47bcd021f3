"""Build minimal Debian systems with CPython and no compiler, for headers and tests."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path

from tools.release.targets import Target

SUITES = {"3.11": "bookworm", "3.13": "trixie", "3.14": "sid"}
"""Debian release that ships each version of CPython."""
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "zig")


class NotHere(Exception):
    """This machine lacks a requirement of a step; the message names it."""


def command(*words: str | Path, env: Mapping[str, str] | None = None) -> str:
    """Run a command, and return its standard output.

    Raises:
        CalledProcessError: The command failed. The ``stderr`` of the exception contains all output of the
            command.
    """
    done = subprocess.run(words, text=True, capture_output=True, env=env)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, words, stderr=done.stdout + done.stderr)
    return done.stdout


class Root:
    """Minimal Debian system in ``folder``, created by debootstrap and kept for the next run."""

    def __init__(self, work: Path, python: str, mirror: str) -> None:
        if python not in SUITES:
            raise NotHere(f"Debian has no CPython {python}")
        self.suite = SUITES[python]
        self.folder = work / "roots" / self.suite
        if (self.folder / "complete").exists():
            return
        if not shutil.which("debootstrap"):
            raise NotHere("debootstrap is missing: apt install debootstrap")
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True)
        command("debootstrap", "--variant=minbase", self.suite, self.folder, mirror)
        for name in ("resolv.conf", "hosts"):
            shutil.copy(f"/etc/{name}", self.folder / "etc" / name)
        self.run("apt-get", "update")
        self.run("apt-get", "install", "-y", "--no-install-recommends", f"python{python}-venv")
        (self.folder / "complete").touch()

    def run(self, *words: str | Path) -> str:
        """Run a command in this Debian system. When the command exits, its other processes are also ended."""
        # /proc and /dev/shm are mounted in a new namespace, so they disappear when the namespace ends.
        script = (
            f"mount -t proc proc {shlex.quote(str(self.folder))}/proc && "
            f"mount -t tmpfs tmpfs {shlex.quote(str(self.folder))}/dev/shm && "
            'exec chroot "$0" /usr/bin/env -i HOME=/root PATH=/usr/bin:/usr/sbin:/bin:/sbin LC_ALL=C.UTF-8 '
            'DEBIAN_FRONTEND=noninteractive "$@"'
        )
        return command("unshare", "--mount", "--pid", "--fork", "sh", "-c", script, self.folder, *words)

    def has_compiler(self) -> bool:
        """Return whether a C or C++ compiler is installed."""
        return any((self.folder / "usr/bin" / name).exists() for name in COMPILERS)


def headers(target: Target, work: Path, root_for: Callable[[str], Root]) -> Path:
    """Return a folder with the headers of this CPython version, for all processors and C libraries.

    Debian's ``pyconfig.h`` only includes the file for the processor and does not work with musl. This folder
    therefore contains the processor's own file. The file is valid for both processors, because their C types
    have the same sizes.

    Raises:
        NotHere: Neither Debian nor this machine has the headers.
    """
    folder = work / "headers" / target.python
    if folder.exists():
        return folder
    fresh = folder.with_suffix(".new")
    shutil.rmtree(fresh, ignore_errors=True)
    if target.python in SUITES:
        root = root_for(target.python)
        root.run(
            "sh",
            "-c",
            f"cd /tmp && apt-get download libpython{target.python}-dev && dpkg-deb -x *.deb dev && rm *.deb",
        )
        include = root.folder / "tmp/dev/usr/include"
        shutil.copytree(include / f"python{target.python}", fresh)
        (name,) = include.glob(f"*/python{target.python}/pyconfig.h")
        shutil.copy(name, fresh / "pyconfig.h")
        shutil.rmtree(root.folder / "tmp/dev")
    else:
        shutil.copytree(_local_include(target.python), fresh)
    fresh.rename(folder)
    return folder


def _local_include(python: str) -> str:
    if sysconfig.get_python_version() == python:
        return sysconfig.get_path("include")
    executable = f"python{python}"
    asks = "import sysconfig; print(sysconfig.get_path('include'))"
    try:
        folder = command(executable, "-c", asks).strip()
    except (OSError, subprocess.CalledProcessError):
        raise NotHere(f"Debian has no CPython {python}, and {executable} is not on this machine") from None
    if not (Path(folder) / "Python.h").exists():
        raise NotHere(f"{executable} is on this machine, but not its headers")
    return folder
