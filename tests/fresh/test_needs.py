"""Test that an installation lists all missing requirements at once, with their Debian packages.

The failed attempt must leave no partial installation behind. ``make fresh`` checks the same in a real, bare
Debian.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[2]
NEEDS = HERE / "tools" / "needs.sh"


def needs(python: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = None if path is None else {"PATH": str(path)}
    command = ["/bin/sh", str(NEEDS), python]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def program(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_machine_with_all_requirements_gets_no_message() -> None:
    checked = needs(sys.executable)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_all_missing_tools_are_named_with_their_packages(tmp_path: Path) -> None:
    checked = needs("python3", tmp_path)
    assert checked.returncode == 1
    assert "a C++20 compiler" in checked.stderr
    assert checked.stderr.endswith("On Debian and Ubuntu: apt install python3 python3-dev python3-venv g++\n")


def test_missing_python_modules_are_listed_as_debian_packages(tmp_path: Path) -> None:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    answer = f'case "$2" in *ensurepip*|*Python.h*) exit 1;; *) exec {sys.executable} "$@";; esac'
    checked = needs(program(tmp_path / "python", answer))
    assert "Python.h" in checked.stderr
    (line,) = (line for line in checked.stderr.splitlines() if "apt install" in line)
    assert line.replace(version, "python3").endswith("apt install python3-venv python3-dev")


def test_outdated_python_is_named_with_its_version(tmp_path: Path) -> None:
    old = program(tmp_path / "python", '[ "$1" = -V ] && echo Python 3.9.2 && exit; exit 1')
    checked = needs(old)
    assert checked.returncode == 1
    assert "Python 3.11 or later" in checked.stderr
    assert "3.9.2" in checked.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed: apt-get install make")
def test_failed_virtual_environment_is_removed(tmp_path: Path) -> None:
    shutil.copy(HERE / "Makefile", tmp_path)
    shutil.copytree(NEEDS.parent, tmp_path / "tools")
    fails = f'[ "$1" = -c ] && exec {sys.executable} "$@"; mkdir -p .venv/bin; touch .venv/bin/python; exit 1'
    python = program(tmp_path / "python", fails)
    made = subprocess.run(
        ["make", f"PYTHON={python}", ".venv/bin/python"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode != 0
    assert "venv .venv" in made.stdout
    assert not (tmp_path / ".venv").exists()
