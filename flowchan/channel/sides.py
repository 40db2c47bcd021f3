"""What channels and ports have in common, for type checkers: items can be got from them, or put into them."""

from __future__ import annotations

from typing import Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


class Readable(Protocol[T_co]):
    """A channel or a reading port."""

    def get_nowait(self) -> T_co: ...


class Writable(Protocol[T_contra]):
    """A channel or a writing port."""

    def put_nowait(self, item: T_contra, /) -> None: ...
