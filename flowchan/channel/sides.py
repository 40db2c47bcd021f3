"""Protocols that describe channels and ports to type checkers."""

from __future__ import annotations

from typing import Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


class Readable(Protocol[T_co]):
    """Channel or reading port."""

    def get_nowait(self) -> T_co:
        """Return the next item, or raise ``Empty``."""


class Writable(Protocol[T_contra]):
    """Channel or writing port."""

    def put_nowait(self, item: T_contra, /) -> None:
        """Put an item, or raise ``Full``."""
