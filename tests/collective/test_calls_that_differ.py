"""Test that calls with different operations or arguments raise ``Mismatch`` on all members.

The error shows both calls.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any

import numpy as np
import pytest
from support.group_members import OverHosts, refused

from flowchan.errors import Mismatch


@pytest.mark.parametrize(
    ("first", "second", "explanation"),
    [
        (lambda g: g.allreduce(3, op="min"), lambda g: g.allreduce(4, op="max"),
         ("allreduce(int, 'min')", "allreduce(int, 'max')")),
        (lambda g: g.allreduce(3, op=operator.add), lambda g: g.allreduce(4),
         ("allreduce(int, <built-in function add>)", "allreduce(int, 'sum')")),
        (lambda g: g.allreduce(3, op=max), lambda g: g.allreduce(4, op=min),
         ("allreduce(int, <built-in function max>)", "allreduce(int, <built-in function min>)")),
        (lambda g: g.reduce(3, op=max), lambda g: g.reduce(4, op=min),
         ("reduce(int, 0, <built-in function max>)", "reduce(int, 0, <built-in function min>)")),
        (lambda g: g.allreduce_with(3, operator.mul), lambda g: g.allreduce_with(4, operator.add),
         ("allreduce_with(int, <built-in function mul>)", "allreduce_with(int, <built-in function add>)")),
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
        (lambda g: g.broadcast(3, 1), lambda g: g.allgather(4), ("broadcast(int, 1)", "allgather(int)")),
        (lambda g: g.allreduce(3), lambda g: g.gather(np.ones(2), 0),
         ("allreduce(int, 'sum')", "gather(float64[2], 0)")),
        (lambda g: g.allreduce(3), lambda g: g.allgather(np.ones(2), out=np.ones((2, 2))),
         ("allreduce(int, 'sum')", "allgather(float64[2])")),
        (lambda g: g.allreduce(3), lambda g: g.allreduce_with(4, operator.mul),
         ("allreduce(int, 'sum')", "allreduce_with(int, <built-in function mul>)")),
        (lambda g: g.scatter([1, 2], 0), lambda g: g.allreduce_with(4, operator.add),
         ("scatter([bytes, bytes], 0)", "allreduce_with(int, <built-in function add>)")),
    ],
)  # fmt: skip
def test_different_operations_or_roots_raise_mismatch(
    run: Any, first: Any, second: Any, explanation: tuple[str, str]
) -> None:
    """The group stays usable after the error."""

    def body(g: Any) -> Any:
        with pytest.raises(Mismatch) as info:
            (first if g.rank == 0 else second)(g)
        return str(info.value), g.allreduce(1)

    for text, total in run(2, body):
        assert f"rank 0 called {explanation[0]}; rank 1 called {explanation[1]}" in text
        assert total == 2


def test_mismatch_between_members_on_one_host_names_both_roots() -> None:
    def body(g: Any) -> str:
        with pytest.raises(Mismatch) as info:
            g.reduce(np.ones(2), int(g.rank == 1))
        return str(info.value)

    explanation = "rank 0 called reduce(float64[2], 0, 'sum'); rank 1 called reduce(float64[2], 1, 'sum')"
    found = OverHosts("aab", body).results(3)
    assert explanation in found[0]
    assert found[0] == found[1]


def test_mismatch_between_members_on_one_host_names_array_and_root() -> None:
    def body(g: Any) -> str:
        with pytest.raises(Mismatch) as info:
            g.reduce(np.ones(2 + (g.rank == 1)), 1, "mean")
        return str(info.value)

    explanation = "rank 0 called reduce(float64[2], 1, 'mean'); rank 1 called reduce(float64[3], 1, 'mean')"
    assert explanation in OverHosts("aab", body).results(3)[0]


def test_different_copies_of_a_user_function_are_not_a_mismatch(run: Any) -> None:
    """User functions are not compared, because each process may have its own copy of the same function."""
    found = run(2, lambda g: g.allreduce(g.rank + 3, op=lambda a, b: a * b))
    assert found == [12, 12]


TYPES = ["?", "b", "B", "h", "H", "i", "I", "q", "Q", "e", "f", "d", "F", "D"]
MOVED = [*TYPES, "S4", "U1", "V4", ">f", ">i", "M8[s]", "m8[s]", "m8[ms]", [("x", "f4")], [("y", "f4")]]


@pytest.mark.parametrize("call", ["allreduce", "reduce", "reduce_scatter", "broadcast"])
def test_arrays_of_different_types_raise_mismatch(run_on_one_host: Any, call: str) -> None:
    """The two arrays have the same number of bytes."""
    pairs = list(itertools.combinations(map(np.dtype, MOVED if call == "broadcast" else TYPES), 2))

    def body(g: Any) -> Any:
        for both in pairs:
            with pytest.raises(Mismatch) as info:
                getattr(g, call)(np.zeros(4, both[g.rank]))
            of_rank_0, _, of_rank_1 = str(info.value).partition("; ")
            assert f"{call}({both[0]}[4]" in of_rank_0 or f"'{both[0]}'" in of_rank_0
            assert f"{call}({both[1]}[4]" in of_rank_1 or f"'{both[1]}'" in of_rank_1
        return g.allreduce(1)

    assert run_on_one_host(2, body) == [2, 2]


@pytest.mark.parametrize("algorithm", ["at once", "by a handle", "not in one piece"])
def test_out_must_have_the_element_type_of_the_sender(run: Any, algorithm: str) -> None:
    """Without this error, the receiver would interpret the bytes as a different type."""

    def numbers(count: int, dtype: str) -> Any:
        return np.zeros(2 * count, dtype)[::2] if algorithm == "not in one piece" else np.zeros(count, dtype)

    def done(call: Any, *given: Any, **named: Any) -> Any:
        return (
            call(*given, **named, wait=False).wait() if algorithm == "by a handle" else call(*given, **named)
        )

    def body(g: Any) -> Any:
        dtype, explanation = ("i4", "f4")[g.rank], []
        one, both = numbers(2, dtype), [numbers(2, dtype) for _ in range(2)]
        for call in (
            lambda: done(g.allgather, one, out=both),
            lambda: done(g.allgather, one, out=numbers(4, dtype)),
            lambda: done(g.alltoall, both, out=[numbers(2, dtype) for _ in range(2)]),
        ):
            with pytest.raises(Mismatch) as info:
                call()
            explanation.append(str(info.value).partition(": ")[2])
        return explanation, g.allreduce(1)

    first, second = run(2, body)
    assert first == second
    assert first[0] == [
        "rank 0 called allgather(int32[2]); rank 1 called allgather(float32[2])",
        "rank 0 called allgather(int32[2]); rank 1 called allgather(float32[2])",
        "rank 0 called alltoall([int32[2], int32[2]]); rank 1 called alltoall([float32[2], float32[2]])",
    ]


@pytest.mark.parametrize(
    ("call", "explanation"),
    [
        (
            lambda g, x, y: g.allgather(x, out=[y, y]),
            "allgather: inputs and outputs must have the same element type",
        ),
        (
            lambda g, x, y: g.allgather(x, out=np.zeros(4, "i4")),
            "element type, got float32 and int32; convert",
        ),
        (lambda g, x, y: g.alltoall([x, y], out=[x.copy(), x.copy()]), "element type, got float32 and int32"),
        (lambda g, x, y: g.alltoall([x, x], out=[x.copy(), y]), "element type, got float32 and int32"),
    ],
)
def test_out_with_a_different_type_than_the_input_raises(run: Any, call: Any, explanation: str) -> None:
    refused(run, lambda g: call(g, np.zeros(2, "f4"), np.zeros(2, "i4")), explanation)
