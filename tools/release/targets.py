"""List the wheels of a release: one for each CPython, C library and processor."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

PYTHONS = ("cp311", "cp312", "cp313", "cp314", "cp314t")
LIBCS = {"manylinux_2_28": "gnu", "musllinux_1_2": "musl"}
"""Wheel platforms, including the oldest C library, mapped to the library's name in a compiler target."""
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
"""Processors, mapped to Debian's names."""
NATIVE = "x86_64"
"""Processor of the machine that builds the wheels. Wheels for the other processor run in an emulator."""


@dataclass(frozen=True)
class Target:
    """Target of one wheel: CPython's ABI tag, the platform and the processor, in the notation of wheel file
    names."""

    abi: str
    libc: str
    machine: str

    def __str__(self) -> str:
        return f"{self.abi}-{self.platform}"

    @property
    def platform(self) -> str:
        """Platform tag of the finished wheel."""
        return f"{self.libc}_{self.machine}"

    @property
    def tag(self) -> str:
        """Tag of the wheel before auditwheel replaces its platform."""
        return f"{self.abi.rstrip('t')}-{self.abi}-linux_{self.machine}"

    @property
    def python(self) -> str:
        """CPython version, such as 3.14."""
        return f"{self.abi[2]}.{self.abi[3:].rstrip('t')}"

    @property
    def free_threaded(self) -> bool:
        return self.abi.endswith("t")

    @property
    def zig(self) -> str:
        """Compiler target, with the oldest glibc that the wheel supports."""
        oldest = ".2.28" if self.libc == "manylinux_2_28" else ""
        return f"{self.machine}-linux-{LIBCS[self.libc]}{oldest}"

    @property
    def suffix(self) -> str:
        """File name suffix of extension modules."""
        return f".cpython-{self.abi[2:]}-{self.machine}-linux-{LIBCS[self.libc]}.so"


def selected(patterns: Sequence[str]) -> list[Target]:
    """Return the targets that match a pattern, such as ``cp311-manylinux*``, or all targets without patterns.

    Raises:
        ValueError: A pattern matches no wheel.
    """
    every = [Target(*parts) for parts in itertools.product(PYTHONS, LIBCS, MACHINES)]
    for pattern in patterns:
        if not any(fnmatch(str(target), pattern) for target in every):
            names = ", ".join(map(str, every))
            raise ValueError(
                f"make release: WHEELS must match a wheel, got {pattern}; the wheels are {names}"
            )
    return [target for target in every if not patterns or any(fnmatch(str(target), one) for one in patterns)]
