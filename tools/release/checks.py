"""Check the files of a release: their metadata, their contents, and that a wheel runs."""

from __future__ import annotations

import email
import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from tools.release.roots import System, command
from tools.release.targets import NATIVE, Target

BIN = Path(sys.executable).parent
IGNORED = "W004,W009"
"""Findings of check-wheel-contents that are accepted: modules that only run as files, and two top-level
packages."""

OLDER_LIBCS = {
    "manylinux_2_28": ("manylinux_2_17", "manylinux2014", "manylinux2010"),
    "musllinux_1_2": ("musllinux_1_1",),
}
"""Platforms whose wheels also run on the platform of a wheel."""


class Wrong(Exception):
    """Raised if a file of the release is wrong; the message says why."""


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def same(first: Path, second: Path) -> None:
    """Check that two builds are identical, byte for byte.

    Raises:
        Wrong: The builds differ.
    """
    if digest(first) != digest(second):
        raise Wrong(f"{first.name} must have the same bytes in both builds: compare {first} with {second}")


def version_in(project: Path) -> str:
    """Return the version in the code."""
    text = (project / "flowchan/transport/versions.py").read_text()
    (version,) = re.findall(r'^VERSION = "(.+)"$', text, re.MULTILINE)
    return str(version)


def tracked(project: Path) -> set[str]:
    """Return the files of the project that git tracks or would track."""
    listed = command("git", "-C", project, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    return {name for name in listed.split("\0") if name and (project / name).exists()}


def check_sdist(archive: Path, project: Path) -> None:
    """Check that the source distribution has the project's version and all of its files.

    Raises:
        Wrong: A file or the version differs.
    """
    with tarfile.open(archive) as opened:
        inside = {name.split("/", 1)[1] for name in opened.getnames() if "/" in name}
    missing = tracked(project) - inside
    if missing:
        raise Wrong(f"{archive.name} lacks {', '.join(sorted(missing))}")
    if archive.name != f"flowchan-{version_in(project)}.tar.gz":
        raise Wrong(f"{archive.name}: version must be {version_in(project)}, as in the code")


def check_wheel(path: Path, target: Target, project: Path, build_paths: Iterable[Path]) -> None:
    """Check the name, metadata, licences and contents of a wheel.

    Args:
        path: The wheel.
        target: Python, C library and processor of the wheel.
        project: Folder of the project.
        build_paths: Folders whose names must not appear in the wheel.

    Raises:
        Wrong: The wheel is wrong in one of these respects.
    """
    version = version_in(project)
    with zipfile.ZipFile(path) as opened:
        info = f"flowchan-{version}.dist-info"
        metadata = email.message_from_bytes(opened.read(f"{info}/METADATA"))
        names = set(opened.namelist())
        (core,) = (name for name in names if name.startswith("flowchan/_core.") and name.endswith(".so"))
        binary = opened.read(core)
    tags = path.stem.split("-", 2)[2]
    if not tags.startswith(f"{target.abi.rstrip('t')}-{target.abi}-") or target.platform not in tags:
        raise Wrong(f"{path.name} must have the tags of {target}")
    if core != f"flowchan/_core{target.suffix}":
        raise Wrong(f"{path.name}: its core must end with {target.suffix}, got {core}")
    if metadata["Version"] != version:
        raise Wrong(f"{path.name}: version must be {version}, as in the code, got {metadata['Version']}")
    licences = {
        f"{info}/licenses/{file.relative_to(project)}"
        for file in [project / "LICENSE", *project.glob("licenses/*.txt")]
    }
    if not licences <= names:
        raise Wrong(f"{path.name} lacks {', '.join(sorted(licences - names))}")
    for folder in build_paths:
        if bytes(folder) in binary:
            raise Wrong(f"{path.name}: its compiled core must not contain the path {folder}")


def check_by_tools(path: Path) -> None:
    """Check a file of the release with twine and, if it is a wheel, with check-wheel-contents.

    Raises:
        CalledProcessError: A tool has reported a problem.
    """
    command(BIN / "twine", "check", "--strict", path)
    if path.suffix == ".whl":
        command(BIN / "check-wheel-contents", "--ignore", IGNORED, path)


def first_program(readme: str) -> str:
    """Return the first program of the README."""
    (program,) = re.findall(r"<!-- file: wordcount\.py -->\n```python\n(.*?)```", readme, re.DOTALL)
    return str(program)


def check_runs(path: Path, target: Target, system: System, python: str | Path, project: Path) -> None:
    """Install a wheel on a system without a compiler, and run the README's graph in processes and on threads.

    Args:
        path: The wheel.
        target: Python, C library and processor of the wheel.
        system: System without a compiler.
        python: Path of the CPython in this system.
        project: Folder of the project.

    Raises:
        Wrong: The system has a compiler, or the two runs print different words.
    """
    if system.has_compiler():
        raise Wrong(f"{system.folder} must have no compiler: remove the folder, and run make release again")
    place = system.folder / "release"
    shutil.rmtree(place, ignore_errors=True)
    try:
        place.mkdir()
        program = first_program((project / "README.md").read_text())
        (place / "processes.py").write_text(program)
        (place / "threads.py").write_text(program.replace('on="process"', 'on="thread"'))
        install = _install_inside if target.machine == NATIVE else _install_into_emulated
        install(path, target, system, python)
        words = [
            system.run("/release/venv/bin/python", f"/release/{name}.py") for name in ("processes", "threads")
        ]
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if words[0] != words[1] or not words[0].startswith("[('"):
        raise Wrong(
            f"{path.name}: README's graph must print the same on threads and in processes, got {words}"
        )


def download_options(target: Target) -> list[str]:
    """Return the options that let pip download requirements for the CPython of a wheel."""
    platforms = (target.libc, *OLDER_LIBCS[target.libc])
    abis = (target.abi,) if target.free_threaded else (target.abi, "abi3")
    return [
        f"--python-version={target.python}",
        *(f"--abi={abi}" for abi in abis),
        *(f"--platform={platform}_{target.machine}" for platform in platforms),
    ]


def _install_inside(path: Path, target: Target, system: System, python: str | Path) -> None:
    """Install a wheel with the system's own pip, which needs neither network nor certificates."""
    wheels = system.folder / "release/wheels"
    pip = (BIN / "python", "-m", "pip", "download", "--quiet", "--only-binary=:all:")
    command(*pip, *download_options(target), "-d", wheels, path)
    shutil.copy(path, wheels)
    system.run(python, "-m", "venv", "/release/venv")
    system.run(
        "/release/venv/bin/pip", "install", "--no-index", "--find-links", "/release/wheels", "flowchan"
    )


def _install_into_emulated(path: Path, target: Target, system: System, python: str | Path) -> None:
    """Install a wheel with this machine's pip, because pip is very slow in an emulator."""
    system.run(python, "-m", "venv", "--without-pip", "/release/venv")
    install_from_outside(
        path, target, system.folder / f"release/venv/lib/python{target.python}/site-packages"
    )


def install_from_outside(path: Path, target: Target, packages: Path) -> None:
    """Install a wheel and its requirements for another system into a folder of packages.

    Raises:
        CalledProcessError: A requirement has no wheel for the target, or the wheel is for another target.
    """
    pip = (BIN / "python", "-m", "pip", "install", "--quiet", "--only-binary=:all:", "--no-compile")
    command(*pip, *download_options(target), "--target", packages, path)


def reason(error: Exception) -> str:
    """Return the last lines that explain a failure."""
    if isinstance(error, subprocess.CalledProcessError):
        name = Path(str(error.cmd[0])).name
        return f"{name} failed: {str(error.stderr)[-1500:].strip()}"
    return str(error)
