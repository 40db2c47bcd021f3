"""Functions that ``map`` benchmarks apply to each item.

The functions have a module of their own, so that the peers' workers import nothing else.
"""

from __future__ import annotations

from itertools import repeat
from typing import Any

import numpy as np


def identity(item: int) -> int:
    return item


def spin(turns: int) -> int:
    """Do CPU-bound work."""
    total = 0
    for number in repeat(1, turns):
        total += number
    return total


def megabyte(_: int) -> Any:
    return np.ones(1 << 20, np.uint8)
