"""Build minimal Debian systems with CPython but without a compiler, for headers and tests."""

from __future__ import annotations

import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.release.targets import MACHINES, NATIVE, Target

SUITES = {"3.11": "bookworm", "3.13": "trixie", "3.14": "sid"}
"""Debian release that ships each version of CPython."""
PROVIDERS = {"3.11": ["python3-distutils"]}
"""Packages that debootstrap does not find itself, because another package needs them under a virtual name."""
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "zig")


class NotHere(Exception):
    """Raised if this machine lacks a requirement of a step; the message names the requirement."""


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


class System:
    """System whose files are in ``folder`` and whose programs run in separate namespaces.

    ``mounts`` are folders of this machine, which the programs see under the same names but cannot change.
    """

    def __init__(self, folder: Path, mounts: Sequence[Path] = ()) -> None:
        self.folder = folder
        self.mounts = mounts

    def run(self, *words: str | Path) -> str:
        """Run a command in this system. When it exits, all processes that it started are also ended."""
        # The mounts are made in a new namespace, so they disappear when the namespace ends.
        root = shlex.quote(str(self.folder))
        mounts = [f"mount -t proc proc {root}/proc", f"mount -t tmpfs tmpfs {root}/dev/shm"]
        for mount in self.mounts:
            here, there = shlex.quote(str(mount)), shlex.quote(f"{self.folder}{mount}")
            mounts += [f"mkdir -p {there}", f"mount --bind {here} {there}"]
            mounts.append(f"mount -o remount,bind,ro {there}")
        chroot = (
            'exec chroot "$0" /usr/bin/env -i HOME=/root PATH=/usr/bin:/usr/sbin:/bin:/sbin LC_ALL=C.UTF-8 '
            'DEBIAN_FRONTEND=noninteractive "$@"'
        )
        script = " && ".join([*mounts, chroot])
        return command("unshare", "--mount", "--pid", "--fork", "sh", "-c", script, self.folder, *words)

    def has_compiler(self) -> bool:
        """Return whether a C or C++ compiler is installed."""
        return any((self.folder / "usr/bin" / name).exists() for name in COMPILERS)


class Root(System):
    """Minimal Debian system, created by debootstrap and kept for the next run."""

    def __init__(self, work: Path, python: str, machine: str, mirror: str) -> None:
        if python not in SUITES:
            raise NotHere(f"Debian has no CPython {python}")
        if machine != NATIVE and not Path(f"/proc/sys/fs/binfmt_misc/qemu-{machine}").exists():
            raise NotHere("an emulator is missing: apt install qemu-user-static binfmt-support")
        suite, processor = SUITES[python], MACHINES[machine]
        super().__init__(work / "roots" / f"{suite}-{processor}")
        if (self.folder / "complete").exists():
            return
        if not shutil.which("debootstrap"):
            raise NotHere("debootstrap is missing: apt install debootstrap")
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True)
        packages = [f"python{python}-venv", f"libpython{python}-dev", *PROVIDERS.get(python, [])]
        copied = ["resolv.conf", "hosts"]
        options = [f"--arch={processor}", "--variant=minbase", f"--include={','.join(packages)}"]
        if machine == NATIVE:
            command("debootstrap", *options, suite, self.folder, mirror)
        else:  # CPython also runs without the packages' scripts, which are slow in an emulator
            command("debootstrap", "--foreign", *options, suite, self.folder, mirror)
            for package in (self.folder / "var/cache/apt/archives").glob("*.deb"):
                command("dpkg-deb", "--extract", package, self.folder)
            copied.append("ssl/certs/ca-certificates.crt")  # a script makes this file, and pip reads it
        for name in copied:
            shutil.copy(f"/etc/{name}", self.folder / "etc" / name)
        (self.folder / "complete").touch()


def headers(target: Target, work: Path, root_for: Callable[[str], Root]) -> Path:
    """Return a folder with the headers of this CPython version, for all processors and C libraries.

    Debian's ``pyconfig.h`` only includes the file for the processor and does not work with musl. The returned
    folder therefore contains the processor's own file. The file is valid for both processors, because their C
    types have the same sizes.

    Raises:
        NotHere: Neither Debian nor this machine has the headers.
    """
    folder = work / "headers" / target.python
    if folder.exists():
        return folder
    fresh = folder.with_suffix(".new")
    shutil.rmtree(fresh, ignore_errors=True)
    if target.python in SUITES:
        include = root_for(target.python).folder / "usr/include"
        shutil.copytree(include / f"python{target.python}", fresh)
        (name,) = include.glob(f"*/python{target.python}/pyconfig.h")
        shutil.copy(name, fresh / "pyconfig.h")
    else:
        shutil.copytree(local(target.python).include, fresh)
    fresh.rename(folder)
    return folder


@dataclass(frozen=True)
class Local:
    """A CPython on this machine: its folder and its headers."""

    prefix: Path
    include: Path


def local(version: str) -> Local:
    """Return the CPython on this machine's ``PATH``; the version is ``3.12``, ``3.14t`` or ``3.13-musl``.

    Raises:
        NotHere: The CPython or its headers are not installed here.
    """
    ours = sysconfig.get_python_version() + sys.abiflags
    executable = sys.executable if ours == version else f"python{version}"
    asks = "import sys, sysconfig; print(sys.base_prefix, sysconfig.get_path('include'), sep='\\n')"
    try:
        prefix, include = command(executable, "-c", asks).splitlines()
    except (OSError, subprocess.CalledProcessError):
        raise NotHere(f"Debian has no CPython {version}, and {executable} is not on this machine") from None
    if not (Path(include) / "Python.h").exists():
        raise NotHere(f"{executable} is on this machine, but not its headers")
    return Local(Path(prefix), Path(include))


def with_local(target: Target, root_for: Callable[[str], Root]) -> tuple[System, str]:
    """Return a Debian system that sees a CPython of this machine, and the path of this CPython.

    Raises:
        NotHere: That CPython is not installed here, or this machine runs another system.
    """
    musl = target.libc.startswith("musl")
    version = target.python + ("t" if target.free_threaded else "") + ("-musl" if musl else "")
    if target.machine != NATIVE:
        raise NotHere(f"Debian has no CPython {version} for {target.machine}")
    found = local(version)
    if musl:  # it needs no library of the system except musl
        system = System(root_for("3.13").folder, [found.prefix])
        shutil.copy(f"/lib/ld-musl-{target.machine}.so.1", system.folder / "lib")
        return system, f"{found.prefix}/bin/python{version.removesuffix('-musl')}"
    suite = platform.freedesktop_os_release().get("VERSION_CODENAME")
    pythons = [python for python, name in SUITES.items() if name == suite]
    if not pythons or found.prefix == Path("/usr"):
        suites = ", ".join(SUITES.values())
        raise NotHere(
            f"python{version} must be outside /usr, and the system must be Debian {suites}; got "
            f"{found.prefix} on {suite}"
        )
    system = System(root_for(pythons[0]).folder, [found.prefix])
    return system, f"{found.prefix}/bin/python{version}"
