"""Declare stages whose number of workers follows the load, with ``workers="auto"`` or ``auto(most=8)``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from flowchan.items.arguments import whole
from flowchan.items.text import shown


@dataclass(frozen=True, slots=True, eq=False)
class AutoWorkers:
    """Limit for the number of workers that a run chooses, created by :func:`~flowchan.auto`.

    All stages that get the same object share its limit.

    Attributes:
        most: Maximum number of workers of these stages together; ``None`` for the default of each stage.

    Example:
        >>> from flowchan import auto
        >>> auto(most=8).most
        8
    """

    most: int | None = None

    def __repr__(self) -> str:
        return "'auto'" if self.most is None else f"auto(most={self.most})"


def auto(most: int | None = None) -> AutoWorkers:
    """Let the run choose the number of workers of a stage, up to a maximum.

    The stage starts with one worker. While the graph runs, it gets more workers if it limits the run, and
    fewer if they have little work. If several stages get the same object, ``most`` limits the sum of their
    workers.

    Args:
        most: Maximum number of workers, at least 1 (default, also of ``workers="auto"``: for processes, the
            number of cores that the program may use; for threads, 32).

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
"""Number of workers, or a limit up to which the run chooses the number."""


def workers_argument(kind: str, value: Any) -> tuple[int, AutoWorkers | None]:
    """Check the option ``workers``. Return the number at the start, and the limit if the run chooses."""
    if isinstance(value, AutoWorkers):
        return 1, value
    if isinstance(value, str):
        if value == "auto":
            return 1, AutoWorkers()
        raise ValueError(f"{kind}: workers must be an int, 'auto' or auto(most=…), got {shown(value)}")
    return whole(kind, "workers", value, 1), None
