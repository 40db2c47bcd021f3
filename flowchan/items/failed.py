"""Items of an ``errors`` stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Failed(Generic[T_co]):
    """Item for which a stage's function raised an exception.

    Attributes:
        item: The item, or an :class:`flowchan.Unreadable` if the item could not be received.
        error: The exception that the last call raised.
        attempts: Number of calls; 0 if the item could not be received.

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
