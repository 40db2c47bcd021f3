"""Define the items of an ``errors`` stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from flowchan.public import public

T_co = TypeVar("T_co", covariant=True)


@public
@dataclass(frozen=True, slots=True)
class Failed(Generic[T_co]):
    """Item for which the function of a stage raised an exception, as ``errors`` streams contain it.

    Attributes:
        item: The item, or a :class:`flowchan.Unreadable` if it could not be unpickled.
        error: Exception that the last call raised.
        attempts: Number of calls, or 0 if the item could not be unpickled.

    Example:
        >>> from flowchan import Graph
        >>> graph = Graph()
        >>> numbers = graph.source(["1", "x"]).map(int, retries=1)
        >>> good, failed = numbers.collect(), numbers.errors.collect()
        >>> (one,) = graph.run()[failed]
        >>> one.item, type(one.error).__name__, one.attempts
        ('x', 'ValueError', 2)
    """

    item: T_co
    error: BaseException
    attempts: int
