"""Test that members combine nested values with any function, even when some members have no values left."""

from __future__ import annotations

import operator
import random
import threading
from typing import Any

import numpy as np
import pytest
from support.group_members import in_threads

from flowchan import Mismatch
from flowchan.errors import MemberDied


def add(a: Any, b: Any) -> Any:
    a += b
    return a


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13])
def test_members_combine_values_until_the_last_member_has_none(size: int) -> None:
    """The member with the most values determines the number of rounds.

    Members without values take part through ``join``.
    """

    def body(g: Any) -> Any:
        weights, counts = np.zeros(3), []
        for step in range(g.rank % 4):
            total, n = g.allreduce_with({"g": [np.full(3, g.rank + step / 7)], "loss": float(g.rank)}, add)
            weights += total["g"][0] / n
            counts.append(n)
        for total, n in g.join(add):
            weights += total["g"][0] / n
            counts.append(n)
        return weights.tobytes(), counts, g.allreduce(1)

    found = in_threads(size, body)
    assert all(one == found[0] for one in found)
    assert found[0][1] == [sum(rank % 4 > step for rank in range(size)) for step in range(min(size - 1, 3))]


def test_random_function_gives_all_members_the_same_result(run: Any) -> None:
    """The function runs only on rank 0."""

    def body(g: Any) -> Any:
        def draw(a: Any, b: Any) -> Any:
            return g.rank, random.SystemRandom().random()

        return g.allreduce_with(1, draw), g.allreduce(1, draw), g.allreduce(np.zeros(2), draw).tolist()

    first, *others = run(3, body)
    assert others == [first] * 2
    assert first[0][0][0] == first[1][0] == first[2][0] == 0


def test_error_in_the_users_function_is_raised_on_all_members(run: Any) -> None:
    """Even members on which the function would have succeeded get the error."""

    def body(g: Any) -> Any:
        def broken(a: int, b: int) -> int:
            return a // g.rank

        for call in (g.allreduce_with, g.allreduce):
            with pytest.raises(ZeroDivisionError) as info:
                call(g.rank, broken)
            assert info.value.__notes__[0].startswith("raised on rank 0, which runs the function of ")
        with pytest.raises(TypeError, match="lock"):
            g.allreduce_with(g.rank, lambda a, b: threading.Lock())
        return g.allreduce_with(str(g.rank), lambda a, b: a + b)

    assert run(3, body) == [("012", 3)] * 3


def test_ctrl_c_in_the_users_function_ends_the_group(run: Any) -> None:
    def body(g: Any) -> Any:
        def interrupted(a: int, b: int) -> int:
            raise KeyboardInterrupt

        with pytest.raises(MemberDied if g.rank else KeyboardInterrupt) as info:
            g.allreduce_with(1, interrupted)
        return getattr(info.value, "ranks", None)

    assert run(2, body) == [None, (0,)]


def test_operator_and_user_function_raise_mismatch() -> None:
    """Every member applies an operator itself, in one step, but only rank 0 runs a user's function."""

    def body(g: Any) -> str:
        with pytest.raises(Mismatch) as info:
            g.allreduce_with(1, add if g.rank else operator.add)
        assert g.allreduce_with(1, operator.add) == (2, 2)
        return str(info.value)

    first, second = in_threads(2, body)
    assert first == second
    assert "rank 0 called allreduce_with(int, <built-in function add>); rank 1" in first
    assert "rank 1 called allreduce_with(int, <funct" in first


def test_values_of_different_shapes_raise_on_all_members() -> None:
    def body(g: Any) -> list[str]:
        message = []
        for value in ({"a": {"b": 1, f"c{g.rank}": 2}}, {"a": [1] * (1 + g.rank)}):
            with pytest.raises(ValueError, match=r"in \['a'\]") as info:
                g.allreduce_with(value, add)
            message.append(str(info.value))
        return message

    first, second = in_threads(2, body)
    assert first == second
    assert "'c0'" in first[0]
    assert "'c1'" in first[0]
    assert "got 1 and 2" in first[1]
