"""Test how a long graph is arranged into rows."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowchan.viz.wrapping import FEWEST_COLUMNS, MOST_COLUMNS, columns_that_fit, wrapped

CHAIN = [(number, number + 1) for number in range(1000)]


def test_graph_that_fits_the_width_has_one_row() -> None:
    assert wrapped(6, CHAIN[:5], 6) == tuple((0, column) for column in range(6))
    assert wrapped(0, [], 6) == ()


def test_rows_alternate_between_right_and_left() -> None:
    assert wrapped(7, CHAIN[:6], 4) == ((0, 0), (0, 1), (0, 2), (0, 3), (1, 3), (1, 2), (1, 1))


@pytest.mark.parametrize("length", [7, 35, 150, 1000])
def test_chain_takes_as_few_rows_as_possible(length: int) -> None:
    places = wrapped(length, CHAIN[: length - 1], 6)
    assert max(row for row, _ in places) + 1 == math.ceil(length / 6)


def test_row_ends_where_few_arrows_cross() -> None:
    """Two stages lead to a fan of 8 stages, and three more stages follow. The whole fan fits into one row."""
    fan = range(2, 10)
    arrows = [(0, 1), *((1, one) for one in fan), *((one, 10) for one in fan), (10, 11), (11, 12)]
    rows = [row for row, _ in wrapped(13, arrows, 4)]
    assert {rows[one] for one in (1, *fan, 10)} == {rows[1]}
    assert rows[12] > rows[1]


@given(
    st.integers(1, 40).flatmap(
        lambda count: st.tuples(
            st.just(count), st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)))
        )
    ),
    st.integers(2, 6),
)
def test_every_graph_is_placed_within_the_width(graph: tuple[int, list[tuple[int, int]]], width: int) -> None:
    count, arrows = graph
    places = wrapped(count, arrows, width)
    assert len(places) == count
    assert all(0 <= column < width for _, column in places)
    for writer, reader in arrows:
        if reader > writer:  # the arrow leads right in an even row, left in an odd row, or to a later row
            (row, column), (row_to, column_to) = places[writer], places[reader]
            assert row_to > row or (row_to == row and (column_to < column if row % 2 else column_to > column))


def test_each_row_starts_below_the_end_of_the_row_above() -> None:
    for (row, column), (row_to, column_to) in itertools.pairwise(wrapped(100, CHAIN[:99], 6)):
        assert column_to == column if row_to > row else abs(column_to - column) == 1


def test_long_stage_names_reduce_number_of_columns() -> None:
    assert columns_that_fit(100) == MOST_COLUMNS
    assert columns_that_fit(400) == 3
    assert columns_that_fit(10_000) == FEWEST_COLUMNS
