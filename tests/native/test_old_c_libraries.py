"""Check that glibc 2.28, the version for manylinux_2_28 wheels, has every symbol that the core needs."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowchan import _core

MANYLINUX = (2, 28)
NOT_OURS = {"fstat", "stat", "stat64", "pthread_cond_clockwait", "__libc_single_threaded"}
"""Symbols that builds with older headers (__fxstat, __xstat64) or an older libstdc++ do not need."""


def symbols(library: Path, *which: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield each glibc symbol with its version."""
    table = subprocess.run(["nm", "-D", *which, library], capture_output=True, text=True, check=True).stdout
    for name, version in re.findall(r" (\w+)@+GLIBC_([\d.]+)$", table, re.MULTILINE):
        yield name, tuple(map(int, version.split(".")))


def test_core_needs_no_symbol_newer_than_manylinux_2_28() -> None:
    """Only a symbol's first version counts, because a symbol that moved to another library also has a
    second version."""
    maps = Path("/proc/self/maps").read_text()
    libraries = set(re.findall(r"/\S+/lib(?:c|m)\.so\.6", maps))
    if not libraries:
        pytest.skip("this C library is not glibc: run the test on a Python built with glibc")
    first: dict[str, tuple[int, ...]] = {}
    for library in libraries:
        for name, version in symbols(Path(library), "--defined-only"):
            first[name] = min(first.get(name, version), version)
    asked = {re.sub("^__isoc23_", "", name) for name, _ in symbols(Path(_core.__file__), "--undefined-only")}
    assert "pthread_mutexattr_setrobust" in asked
    assert {name for name in asked - NOT_OURS if first.get(name, MANYLINUX) > MANYLINUX} == set()
