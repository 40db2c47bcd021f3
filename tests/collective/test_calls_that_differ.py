"""Calls that have the same name and the same arrays, and differ in what else they were given, give no wrong
result: they raise on all sides, and both are named."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest
from collective_members import OverHosts

from flowchan.collective import Mismatch


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (lambda g: g.allreduce(3, op="min"), lambda g: g.allreduce(4, op="max"),
         ("allreduce(int, 'min')", "allreduce(int, 'max')")),
        (lambda g: g.allreduce(3, op=operator.add), lambda g: g.allreduce(4),
         ("allreduce(int, <built-in function add>)", "allreduce(int, 'sum')")),
        (lambda g: g.allreduce(3, op=max), lambda g: g.allreduce(4, op=min),
         ("allreduce(int, <built-in function max>)", "allreduce(int, <built-in function min>)")),
        (lambda g: g.reduce(3, op=max), lambda g: g.reduce(4, op=min),
         ("reduce(int, 0, <built-in function max>)", "reduce(int, 0, <built-in function min>)")),
        (lambda g: g.combine(3, operator.mul), lambda g: g.combine(4, operator.add),
         ("combine(int, <built-in function mul>)", "combine(int, <built-in function add>)")),
        (lambda g: g.reduce(3, op="min"), lambda g: g.reduce(4, op="max"),
         ("reduce(int, 0, 'min')", "reduce(int, 0, 'max')")),
        (lambda g: g.reduce(3, 0), lambda g: g.reduce(4, 1),
         ("reduce(int, 0, 'sum')", "reduce(int, 1, 'sum')")),
        (lambda g: g.reduce(np.ones(2), 0), lambda g: g.reduce(np.ones(2), 1),
         ("reduce(float64[2], 0, 'sum')", "reduce(float64[2], 1, 'sum')")),
        (lambda g: g.broadcast(np.ones(2), 0), lambda g: g.broadcast(np.ones(2), 1),
         ("broadcast(float64[2], 0)", "broadcast(float64[2], 1)")),
        (lambda g: g.broadcast(3, 0), lambda g: g.broadcast(4, 1),
         ("broadcast(int, 0)", "broadcast(int, 1)")),
        (lambda g: g.gather(3, 0), lambda g: g.gather(4, 1), ("gather(int, 0)", "gather(int, 1)")),
    ],
)  # fmt: skip
def test_other_operations_and_other_roots_raise_and_name_both_sides(
    run: Any, first: Any, second: Any, said: tuple[str, str]
) -> None:
    """And the group goes on."""

    def body(g: Any) -> Any:
        with pytest.raises(Mismatch) as info:
            (first if g.rank == 0 else second)(g)
        return str(info.value), g.allreduce(1)

    for text, total in run(2, body):
        assert f"rank 0 called {said[0]}; rank 1 called {said[1]}" in text
        assert total == 2


def test_members_of_one_of_two_hosts_whose_roots_differ_name_both() -> None:
    def body(g: Any) -> str:
        with pytest.raises(Mismatch) as info:
            g.reduce(np.ones(2), int(g.rank == 1))
        return str(info.value)

    said = "rank 0 called reduce(float64[2], 0, 'sum'); rank 1 called reduce(float64[2], 1, 'sum')"
    found = OverHosts("aab", body).results(3)
    assert said in found[0]
    assert found[0] == found[1]


def test_a_member_of_one_of_two_hosts_that_has_another_array_is_named_with_its_root() -> None:
    def body(g: Any) -> str:
        with pytest.raises(Mismatch) as info:
            g.reduce(np.ones(2 + (g.rank == 1)), 1, "mean")
        return str(info.value)

    said = "rank 0 called reduce(float64[2], 1, 'mean'); rank 1 called reduce(float64[3], 1, 'mean')"
    assert said in OverHosts("aab", body).results(3)[0]


def test_functions_are_not_told_apart(run: Any) -> None:
    """They may be made anew in each process."""
    found = run(2, lambda g: g.allreduce(g.rank + 3, op=lambda a, b: a * b))
    assert found == [12, 12]
