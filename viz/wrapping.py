"""Arrange a long graph in rows that run alternately to the right and to the left.

Each row starts in the column where the row above ends, so that a short arrow connects the two rows.

Algorithm. The depth of a stage is the length of the longest path to it from a source. Each row holds a range
of depths, with one depth in each column. Dynamic programming finds the ranges with the lowest cost. A row
costs ``ROW_COST``, plus the number of arrows that cross its lower edge, plus a little for unused columns. The
state consists of a row's first depth, first column and direction.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

MOST_COLUMNS, FEWEST_COLUMNS = 6, 2
"""Maximum and minimum number of columns."""
PAGE = 1300.0
"""Target width of the picture, in points; it determines the number of columns."""
ROW_COST, GAP_COST = 2.0, 0.02
"""Cost of a row, and factor for the square of its number of unused columns; a crossing arrow costs 1."""


def columns_that_fit(widest: float) -> int:
    """Return the number of columns on a page, given the ``widest`` stage with its arrow, in points."""
    return max(FEWEST_COLUMNS, min(MOST_COLUMNS, int(PAGE / widest)))


def wrapped(count: int, arrows: Sequence[tuple[int, int]], width: int) -> tuple[tuple[int, int], ...]:
    """Return the row and the column of each stage, in at most ``width`` columns.

    Args:
        count: Number of stages.
        arrows: Pairs (writer, reader) of stage numbers. Only arrows to a later stage affect the layout.
        width: Maximum number of columns.

    Returns:
        Pairs (row, column), counted from the top left.
    """
    forward = sorted((writer, reader) for writer, reader in arrows if reader > writer)
    depth = [0] * count
    for writer, reader in forward:
        depth[reader] = max(depth[reader], depth[writer] + 1)
    length = max(depth, default=0) + 1
    crossing = [0] * (length + 1)  # number of arrows that start before each depth and end there or beyond
    for writer, reader in forward:
        crossing[depth[writer] + 1] += 1
        crossing[depth[reader] + 1] -= 1
    place = _places(length, tuple(itertools.accumulate(crossing)), width)
    return tuple(place[one] for one in depth)


def _places(length: int, crossing: Sequence[int], width: int) -> list[tuple[int, int]]:
    """Return the row and the column for each depth."""
    if length <= width:
        return [(0, depth) for depth in range(length)]
    # The keys describe the start of a row: depth, column, and whether the row runs to the right. The values
    # are the lowest cost of this row and all rows below it, and the number of depths in this row.
    best = {(length, column, right): (0.0, 0) for column in range(width) for right in (True, False)}
    for first in reversed(range(length)):
        for column, right in itertools.product(range(width), (True, False)):
            room = min(width - column if right else column + 1, length - first)
            best[first, column, right] = min(
                (
                    ROW_COST
                    + GAP_COST * (width - held) ** 2
                    + crossing[first + held]
                    + best[first + held, _end(column, held, right), not right][0],
                    held,
                )
                for held in range(1, room + 1)
            )
    places: list[tuple[int, int]] = []
    column, right = 0, True
    row = 0
    while len(places) < length:
        held = best[len(places), column, right][1]
        step = 1 if right else -1
        places += [(row, column + step * number) for number in range(held)]
        row, column, right = row + 1, _end(column, held, right), not right
    return places


def _end(column: int, held: int, right: bool) -> int:
    return column + held - 1 if right else column - held + 1
