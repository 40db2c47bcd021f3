"""Estimate how many bytes an item keeps alive, from a sample of its parts (see ``_core/sizes.cpp``)."""

from __future__ import annotations

import gc
import itertools
import sys
import types
from typing import Any

SAMPLES, TRIALS, DEPTH = 8, 64, 8
_SHARED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType)
_MOST_NBYTES = 1 << 60


def estimate_size(item: Any) -> int:
    """Return roughly how many bytes the item keeps alive; classes, modules and functions count as 0."""
    return _Estimate().of(item, 0)


class _Estimate:
    """Estimate for one item, which visits at most ``TRIALS`` objects."""

    def __init__(self) -> None:
        self._left = TRIALS

    def of(self, item: Any, depth: int) -> int:
        self._left -= 1
        if isinstance(item, _SHARED):
            return 0
        if isinstance(item, int | float | str | bytes) or item is None:
            return sys.getsizeof(item)
        if (size := _buffer_size(item)) is not None:
            return size
        own = sys.getsizeof(item, 64)
        if (
            self._left <= 0
            or depth >= DEPTH
            or (not gc.is_tracked(item) and not isinstance(item, tuple | dict))
        ):
            return own
        if isinstance(item, dict):
            return own + self._sampled(
                [*itertools.chain.from_iterable(itertools.islice(item.items(), SAMPLES))],
                2 * len(item),
                depth,
            )
        parts = list(item) if type(item) in (list, tuple) else gc.get_referents(item)
        step = max(len(parts) // SAMPLES, 1)
        return own + self._sampled(
            [part for part in parts[step // 2 :: step] if part is not item], len(parts), depth
        )

    def _sampled(self, samples: list[Any], among: int, depth: int) -> int:
        """Return the estimated total size of ``among`` parts, from these samples of them."""
        total = seen = 0
        for part in samples:
            if self._left <= 0:
                break
            total += self.of(part, depth + 1)
            seen += 1
        return total * among // max(seen, 1)


def _buffer_size(item: Any) -> int | None:
    """Return the size of a buffer, or ``nbytes`` of a tensor or of an array without a buffer."""
    try:
        return memoryview(item).nbytes
    except (TypeError, BufferError, ValueError):
        pass
    if not hasattr(type(item), "nbytes"):
        return None
    try:
        size = item.nbytes
    except Exception:  # a property may run arbitrary code
        return None
    return size if isinstance(size, int) and 0 <= size < _MOST_NBYTES else None
