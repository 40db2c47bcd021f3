"""Declare stages whose number of workers adapts to the load: ``workers="auto"`` or ``auto(most=8)``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from flowchan.items.arguments import whole
from flowchan.items.text import shown
from flowchan.public import public


@public
@dataclass(frozen=True, slots=True, eq=False)
class AutoWorkers:
    """Upper limit on the number of workers that a run may choose; :func:`~flowchan.auto` creates it.

    Stages that share one object also share its limit.

    Attributes:
        most: Maximum total number of workers of these stages. ``None`` selects the default of each stage.

    Example:
        >>> from flowchan import auto
        >>> auto(most=8).most
        8
    """

    most: int | None = None

    def __repr__(self) -> str:
        return "'auto'" if self.most is None else f"auto(most={self.most})"


@public
def auto(most: int | None = None) -> AutoWorkers:
    """Let the run choose how many workers a stage has, up to a maximum.

    The stage starts with one worker. While the graph runs, the stage gains workers when it is the bottleneck,
    and loses workers that have little to do. If several stages share one object, ``most`` limits their total
    number of workers.

    Args:
        most: Maximum number of workers, at least 1. The default, which ``workers="auto"`` also uses, is 32
            for threads. For processes, it is the number of cores that the program may use.

    Returns:
        A value for the option ``workers`` of ``map``, ``filter``, ``flat_map``, ``partition`` and ``sink``.

    Raises:
        TypeError: ``most`` is not an int or ``None``.
        ValueError: ``most`` is less than 1.

    Example:
        >>> from flowchan import Graph, auto
        >>> graph = Graph()
        >>> words = graph.source(["a", "b"]).map(str.upper, workers=auto(most=8)).collect()
        >>> graph.run()[words]
        ['A', 'B']
    """
    return AutoWorkers(None if most is None else whole("auto", "most", most, 1))


WorkersOption = int | Literal["auto"] | AutoWorkers
"""A fixed number of workers, or a limit up to which the run chooses the number."""


def workers_argument(kind: str, value: Any) -> tuple[int, AutoWorkers | None]:
    """Check the option ``workers``.

    Return the initial number of workers, and the limit if the run may change the number.
    """
    if isinstance(value, AutoWorkers):
        return 1, value
    if isinstance(value, str):
        if value == "auto":
            return 1, AutoWorkers()
        raise ValueError(f"{kind}: workers must be an int, 'auto' or auto(most=…), got {shown(value)}")
    return whole(kind, "workers", value, 1), None
