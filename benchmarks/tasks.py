"""What the maps do to an item. A module of its own, so that a peer's workers import nothing else."""

from __future__ import annotations

from itertools import repeat
from typing import Any

import numpy as np


def identity(item: int) -> int:
    return item


def spin(turns: int) -> int:
    """Work that nothing but the processor limits."""
    total = 0
    for number in repeat(1, turns):
        total += number
    return total


def megabyte(_: int) -> Any:
    return np.ones(1 << 20, np.uint8)
