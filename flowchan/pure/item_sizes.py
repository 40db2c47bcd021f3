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
    """Estimate how many bytes an item keeps alive, apart from classes, modules and functions."""
    return _Estimate().of(item, 0)


class _Estimate:
    """Estimates the size of one item, visiting at most ``TRIALS`` objects."""

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
        """Estimate the total size of ``among`` parts from the sizes of the parts in ``samples``."""
        total = seen = 0
        for part in samples:
            if self._left <= 0:
                break
            total += self.of(part, depth + 1)
            seen += 1
        return total * among // max(seen, 1)


def _buffer_size(item: Any) -> int | None:
    """Return the size of a buffer, or the ``nbytes`` of a tensor or array that is not a buffer."""
    try:
        return memoryview(item).nbytes
    except (TypeError, BufferError, ValueError):
        pass
    if not hasattr(type(item), "nbytes"):
        return None
    try:
        size = item.nbytes
    except Exception:  # the property may run arbitrary code
        return None
    return size if isinstance(size, int) and 0 <= size < _MOST_NBYTES else None
