"""What an ``errors`` stream carries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Failed(Generic[T_co]):
    """An item for which a stage's function raised. ``error`` is the last exception, after ``attempts`` calls;
    0 calls if the item could not be received at all, and then ``item`` is an :class:`flowchan.Unreadable`."""

    item: T_co
    error: BaseException
    attempts: int
