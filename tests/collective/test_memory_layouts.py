"""Test that calls accept arguments with any memory layout.

A call with an unsupported layout raises before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.group_members import in_threads, raised, refused

LENGTHS = [4, 300_000]


@pytest.mark.parametrize("length", LENGTHS)
def test_result_fills_noncontiguous_out(run: Any, length: int) -> None:
    def body(g: Any) -> Any:
        whole = np.zeros((g.size, 2 * length), np.float32)
        for out in (whole[:, :length], whole[:, ::2]):
            whole[:] = 0
            assert g.allgather(np.full(length, g.rank + 1, np.float32), out=out) is out
            assert (out == [[1], [2]]).all()
            assert whole.sum() == 3 * length
        return True

    assert run(2, body) == [True, True]


@pytest.mark.each_value
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("listed", [True, False])
def test_input_that_is_part_of_out_is_sent_unchanged(run: Any, length: int, listed: bool) -> None:
    """Each member's input may be its own part of ``out``."""

    def body(g: Any, own: int) -> Any:
        room = np.zeros((g.size, length), np.float32)
        x = room[(g.rank + own) % g.size]
        for _ in range(5):
            room[:] = 0
            x[:] = g.rank + 1
            g.allgather(x, out=list(room) if listed else room)
            assert (room == [[1], [2]]).all()
        return True

    assert run(2, body, 0) == run(2, body, 1) == [True, True]


@pytest.mark.parametrize("length", [9, 1_001, 300_001])
def test_out_that_overlaps_the_input_raises(run: Any, length: int) -> None:
    def body(g: Any) -> Any:
        memory = np.arange(length, dtype=np.float64)
        for x, out in ((memory[:-1], memory[1:]), (memory[1:], memory[:-1])):
            for call in (g.allreduce, lambda x, out: g.reduce(x, g.rank, out=out)):
                with pytest.raises(
                    ValueError,
                    match="x and out must not overlap unless out is x or a part of x; pass a copy",
                ):
                    call(x, out=out)
        with pytest.raises(ValueError, match="x and out must not overlap"):
            g.reduce_scatter(memory[:-1], out=memory[1 : length // 2 + 1])
        assert (memory == np.arange(length)).all()
        return g.allreduce(memory, out=memory)[-1]

    assert run(2, body) == [2 * (length - 1)] * 2


@pytest.mark.parametrize("length", LENGTHS)
def test_reduce_scatter_can_write_into_its_input(run: Any, length: int) -> None:
    def body(g: Any, own: int) -> Any:
        x = np.arange(2 * length, dtype=np.float64).reshape(2, length)
        want = 2 * x[g.rank]
        return (g.reduce_scatter(x, out=x[(g.rank + own) % 2]) == want).all()

    assert run(2, body, 0) == run(2, body, 1) == [True, True]


def read_only(length: int) -> Any:
    made = np.zeros(length)
    made.flags.writeable = False
    return made


def shared(length: int) -> Any:
    return np.lib.stride_tricks.as_strided(np.zeros(1), (length,), (0,))


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: g.allreduce(np.ones(4, np.float32), out=np.ones(4)),
         r"out must have 4 elements of the input's type, got float64\[4\]"),
        (lambda g: g.allreduce(read_only(4)), "got a read-only float"),
        (lambda g: g.allreduce(np.ones(4), out=shared(4)), "must not have elements that share memory"),
        (lambda g: g.allgather(np.ones(2), out=read_only(4)), "got a read-only float"),
        (lambda g: g.allgather(np.ones(2), out=[read_only(2), np.ones(2)]), "got a read-only float"),
        (lambda g: g.alltoall([np.ones(2)] * 2, out=[read_only(2), np.ones(2)]), "got a read-only float"),
        (lambda g: g.reduce_scatter(np.ones(3), out=np.ones(1)),
         r"number of elements of x must be divisible by 2, .* got float64\[3\]; pad x"),
    ],
    ids=range(7),
)  # fmt: skip
def test_out_that_cannot_hold_the_result_raises(run: Any, call: Callable[..., Any], message: str) -> None:
    refused(run, call, message)


@pytest.mark.parametrize("out", [read_only(4), shared(4)], ids=["read-only", "shared"])
def test_receive_into_readonly_out_keeps_the_message(out: Any) -> None:
    def body(g: Any) -> Any:
        if g.rank == 0:
            g.send(np.arange(4.0), 1)
            return None
        with pytest.raises(ValueError, match=r"out must (be writable|not have elements that share memory)"):
            g.receive(0, out=out)
        return g.receive(0).tolist()

    assert raised(in_threads(2, body)) == [None, [0, 1, 2, 3]]
