"""Define the box that carries a sampled item and its marks from stage to stage.

Native code (``ItemTracing`` in the core) takes the item out of the box before any other code sees it.
"""

from __future__ import annotations

from typing import Any

from flowchan import _core


class SampledItem:
    """Box with a sampled item and its marks, the numbers of the samples from which the item descends."""

    __slots__ = ("item", "marks")

    def __init__(self, item: Any, marks: tuple[int, ...]) -> None:
        self.item, self.marks = item, marks

    def __reduce__(self) -> tuple[Any, ...]:
        return SampledItem, (self.item, self.marks)


_core._set_traced(SampledItem)
