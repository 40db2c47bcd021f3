"""Test that dates and time spans are combined as in NumPy: NaT stays NaT, and invalid operations raise."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from support.group_members import in_threads, raised

from flowchan import Mismatch

MEANT = {"M8[D]": ["min", "max"], "m8[ms]": ["sum", "mean", "min", "max"]}
BY_NUMPY = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum}


def given(rank: int, dtype: str, length: int) -> Any:
    """Return dates, some of them before 1970. At every index except one, one member has NaT."""
    found = np.random.default_rng((rank, length)).integers(-(10**6), 10**6, length).astype(dtype)
    found[rank::4] = "NaT"
    return found


def by_numpy(op: str, parts: list[Any]) -> Any:
    total = functools.reduce(BY_NUMPY[op], parts)
    return total / len(parts) if op == "mean" else total


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", MEANT)
@pytest.mark.parametrize("length", [8, 120_000])
def test_dates_are_combined_like_numpy_dates(run: Any, dtype: str, length: int) -> None:
    def body(g: Any) -> Any:
        found = {}
        for op in MEANT[dtype]:
            whole, other = given(g.rank, dtype, length), given(g.rank, dtype, length)
            assert g.allreduce(whole, op) is whole
            strided = g.allreduce(np.repeat(other, 2)[::2], op, out=np.zeros(2 * length, dtype)[::2])
            part = g.reduce_scatter(np.tile(other, g.size), op)
            found[op] = whole, strided, part, g.reduce(other, 0, op)
        return found

    for rank, found in enumerate(run(3, body)):
        for op, (whole, strided, part, at_0) in found.items():
            right = by_numpy(op, [given(other, dtype, length) for other in range(3)])
            for one in (whole, strided, part, *([at_0] if rank == 0 else [])):
                assert one.dtype == right.dtype
                np.testing.assert_array_equal(one, right, err_msg=op)


@pytest.mark.parametrize("dtype", ["M8[D]", "m8[ms]", ">M8[s]"])
def test_dates_can_be_gathered_and_broadcast(run: Any, dtype: str) -> None:
    def body(g: Any) -> Any:
        x = given(g.rank, dtype, 8)
        out = [np.zeros(8, dtype) for _ in range(2)]
        return g.allgather(x), g.gather(x), g.alltoall([x, x], out=out), [g.broadcast(x.copy(), 0)]

    right = [given(rank, dtype, 8) for rank in range(2)]
    for rank, found in enumerate(run(2, body)):
        for name, parts, wanted in zip(
            ("allgather", "gather", "alltoall", "broadcast"),
            found,
            (right, right if rank == 0 else None, right, right[:1]),
            strict=True,
        ):
            assert (parts is None) == (wanted is None), name
            for part, want in zip(parts or (), wanted or (), strict=True):
                assert part.dtype == np.dtype(dtype), name
                np.testing.assert_array_equal(part, want, err_msg=name)


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("dtype", "op", "message"),
    [
        ("M8[D]", "sum", r"elements of type datetime64\[D\] cannot be combined by sum; use min, max"),
        ("M8[D]", "mean", r"elements of type datetime64\[D\] cannot be combined by mean; use min, max"),
        ("M8[D]", "and", r"elements of type datetime64\[D\] cannot be combined by and"),
        (
            "m8[s]",
            "prod",
            r"elements of type timedelta64\[s\] cannot be combined by prod; use sum, mean, min, max",
        ),
        ("m8[s]", "xor", r"elements of type timedelta64\[s\] cannot be combined by xor"),
        (
            ">m8[s]",
            "sum",
            r"elements of type >m8\[s\] cannot be combined by sum; convert them first, for "
            r"example with .astype\(",
        ),
    ],
)
@pytest.mark.parametrize("call", ["allreduce", "reduce", "reduce_scatter"])
def test_meaningless_operation_on_dates_raises(
    run: Any, call: str, dtype: str, op: str, message: str
) -> None:
    def body(g: Any) -> Any:
        with pytest.raises(TypeError, match=message):
            getattr(g, call)(np.ones(4, dtype), op=op)
        return g.allreduce(1)

    assert run(2, body) == [2, 2]


def test_dates_with_different_units_raise_mismatch(run: Any) -> None:
    """Without this error, one second and one millisecond would add up to two."""

    def body(g: Any) -> Any:
        with pytest.raises(Mismatch, match=r"timedelta64\[s\]\[2\].*timedelta64\[ms\]\[2\]"):
            g.allreduce(np.ones(2, ("m8[s]", "m8[ms]")[g.rank]))
        return g.allreduce(1)

    assert run(2, body) == [2, 2]


def test_torch_backend_rejects_dates() -> None:
    pytest.importorskip("torch")

    def body(g: Any) -> Any:
        g.set_algorithm("allreduce", "gloo")
        with pytest.raises(TypeError, match=r"gloo cannot combine elements of type timedelta64\[s\]; set"):
            g.allreduce(np.ones(2, "m8[s]"))
        return g.allreduce(1)

    assert raised(in_threads(2, body)) == [2, 2]
