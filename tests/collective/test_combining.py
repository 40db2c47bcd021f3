"""Members combine nested values by any function, also when some have run out of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from collective_members import in_threads


def add(a: Any, b: Any) -> Any:
    a += b
    return a


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13])
def test_all_have_the_same_after_every_round_until_all_have_run_out(size: int) -> None:
    """As many steps as the longest has; who has run out follows."""

    def body(g: Any) -> Any:
        weights, counts = np.zeros(3), []
        for step in range(g.rank % 4):
            total, n = g.combine({"g": [np.full(3, g.rank + step / 7)], "loss": float(g.rank)}, add)
            weights += total["g"][0] / n
            counts.append(n)
        for total, n in g.rest(add):
            weights += total["g"][0] / n
            counts.append(n)
        return weights.tobytes(), counts, g.allreduce(1)

    found = in_threads(size, body)
    assert all(one == found[0] for one in found)
    assert found[0][1] == [sum(rank % 4 > step for rank in range(size)) for step in range(min(size - 1, 3))]


def test_a_function_that_raises_raises_on_all_and_the_group_goes_on(run: Any) -> None:
    def body(g: Any) -> Any:
        with pytest.raises(ZeroDivisionError):
            g.combine(g.rank, lambda a, b: a // 0)
        return g.combine(str(g.rank), lambda a, b: a + b)

    assert run(3, body) == [("012", 3)] * 3


def test_values_of_another_shape_raise_on_all_and_are_named() -> None:
    def body(g: Any) -> list[str]:
        said = []
        for value in ({"a": {"b": 1, f"c{g.rank}": 2}}, {"a": [1] * (1 + g.rank)}):
            with pytest.raises(ValueError, match=r"in \['a'\]") as info:
                g.combine(value, add)
            said.append(str(info.value))
        return said

    first, second = in_threads(2, body)
    assert first == second
    assert "'c0'" in first[0]
    assert "'c1'" in first[0]
    assert "of 1 and 2" in first[1]
