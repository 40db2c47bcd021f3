"""Test that every operation returns the defined result, in threads and in processes.

The sizes include every size at which the algorithm changes. All members must get the same bits.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from flowchan.errors import GroupError

pytestmark = pytest.mark.filterwarnings("ignore:invalid value")

LENGTHS = [0, 1, 2, 5, 11, 1000, 4096, 9000, 70_000, 300_001]
SIZES = [1, 2, 3, 4]


# otherwise, all results would stay in memory, and every later fork would copy their page tables
@functools.lru_cache(16)
def numbers(rank: int, length: int) -> Any:
    return np.random.default_rng((rank, length)).integers(0, 100, length)


def given(rank: int, length: int, dtype: Any = np.float32) -> Any:
    return numbers(rank, length).astype(dtype)


@pytest.mark.parametrize("size", SIZES)
def test_allreduce_returns_equal_sums_on_all_members(run: Any, size: int) -> None:
    def body(g: Any) -> list[bytes]:
        found = []
        for length in LENGTHS:
            x = given(g.rank, length) / np.float32(7)
            assert g.allreduce(x) is x
            found.append(x.tobytes())
        return found

    answers = run(size, body)
    assert all(answer == answers[0] for answer in answers)
    for length, found in zip(LENGTHS, answers[0], strict=True):
        right = sum(
            (given(rank, length) / np.float32(7) for rank in range(size)), np.zeros(length, np.float32)
        )
        np.testing.assert_allclose(np.frombuffer(found, np.float32), right, rtol=1e-5)


@pytest.mark.each_value
@pytest.mark.parametrize("length", [3, 200_000])
@pytest.mark.parametrize("dtype", ["?", "b", "B", "h", "H", "i", "I", "q", "Q", "e", "f", "d", "F", "D"])
def test_allreduce_supports_each_type_and_op(run: Any, dtype: str, length: int) -> None:
    by_name = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
    if np.dtype(dtype).kind in "biu":
        by_name |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    if np.dtype(dtype).kind == "c":
        del by_name["min"], by_name["max"]

    def body(g: Any) -> dict[str, Any]:
        return {
            op: g.allreduce(given(g.rank, length).astype(dtype), op=op, out=np.empty(length, dtype))
            for op in by_name
        }

    for found in run(3, body):
        for op, function in by_name.items():
            wide = np.float32 if dtype == "e" else np.dtype(dtype)
            parts = [given(rank, length).astype(dtype).astype(wide) for rank in range(3)]
            with np.errstate(over="ignore"):
                right = function(function(parts[0], parts[1]), parts[2]).astype(dtype)
            np.testing.assert_array_equal(found[op], right, err_msg=op)


def test_float16_values_are_converted_as_in_numpy(run: Any) -> None:
    """All values are tested, including infinities and subnormals. NaN stays NaN."""
    every = np.arange(65536, dtype=np.uint16).view(np.float16)

    def body(g: Any) -> Any:
        return g.allreduce(every.copy() if g.rank == 0 else np.zeros(65536, np.float16))

    for found in run(2, body):
        np.testing.assert_array_equal(found, every)


def test_mean_of_floats_divides_by_the_number_of_members(run: Any) -> None:
    for size, right in ((2, 0.5), (4, 1.5)):
        found = run(size, lambda g: g.allreduce(np.full(5, float(g.rank)), op="mean")[0])
        assert found == [right] * size


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_complex_mean_has_equal_bits_on_one_and_several_hosts(run: Any, dtype: Any) -> None:
    """Every ``run`` must divide both parts, because multiplying by a rounded reciprocal gives other bits."""
    parts = [
        np.random.default_rng(rank).standard_normal(2000).astype(dtype(0).real.dtype) for rank in range(3)
    ]

    def body(g: Any) -> Any:
        return g.allreduce(parts[g.rank].view(dtype), op="mean").tobytes()

    mean = (parts[0] + parts[1] + parts[2]) / parts[0].dtype.type(3)
    assert run(3, body) == [mean.tobytes()] * 3


def test_float16_products_are_rounded_once(run: Any) -> None:
    parts = [1 + np.random.default_rng(rank).random(2000).astype(np.float16) for rank in range(3)]

    def body(g: Any) -> Any:
        return g.allreduce(parts[g.rank].copy(), op="prod").tobytes()

    wide = [part.astype(np.float32) for part in parts]
    product = (wide[0] * wide[1] * wide[2]).astype(np.float16)
    assert (product != parts[0] * parts[1] * parts[2]).any()  # the result would differ if each step rounded
    assert run(3, body) == [product.tobytes()] * 3


def test_allreduce_with_out_keeps_the_input(run: Any) -> None:
    def body(g: Any, length: int) -> Any:
        x, out = given(g.rank, length), np.empty(length, np.float32)
        assert g.allreduce(x, out=out) is out
        return (x == given(g.rank, length)).all() and (out == given(0, length) + given(1, length)).all()

    for length in LENGTHS:
        assert all(run(2, body, length))


def test_values_are_combined_in_rank_order(run: Any) -> None:
    def body(g: Any) -> Any:
        return (
            g.allreduce(g.rank + 1),
            g.allreduce(Fraction(1, g.rank + 1)),
            g.allreduce(str(g.rank), op=lambda a, b: f"({a}{b})"),
            g.allreduce({g.rank}, op="or"),
            g.allreduce(float(g.rank), op="mean"),
            g.reduce(g.rank, root=1, op="max"),
        )

    for rank, found in enumerate(run(3, body)):
        assert found == (6, Fraction(11, 6), "((01)2)", {0, 1, 2}, 1.0, 2 if rank == 1 else None)


@pytest.mark.each_value
@pytest.mark.parametrize("size", SIZES)
def test_reduce_returns_the_result_on_root_only(run: Any, size: int) -> None:
    def body(g: Any) -> bool:
        for length in LENGTHS:
            for root in range(size):
                x = given(g.rank, length)
                total = g.reduce(x, root=root)
                right = sum((given(rank, length) for rank in range(size)), np.zeros(length, np.float32))
                expected = right if g.rank == root else given(g.rank, length)
                assert (total is x) == (g.rank == root)
                assert (x == expected).all()
        return True

    assert all(run(size, body))


@pytest.mark.each_value
@pytest.mark.parametrize("size", SIZES)
def test_broadcast_sends_the_value_of_root(run: Any, size: int) -> None:
    def body(g: Any) -> bool:
        for length in LENGTHS:
            for root in range(size):
                assert (g.broadcast(given(g.rank, length), root=root) == given(root, length)).all()
        assert g.broadcast({"n": [1, 2]} if g.rank == 0 else None) == {"n": [1, 2]}
        return True

    assert all(run(size, body))


@pytest.mark.each_value
@pytest.mark.parametrize("size", SIZES)
def test_allgather_returns_arrays_of_any_shape_and_values(run: Any, size: int) -> None:
    def body(g: Any) -> bool:
        for length in LENGTHS:
            found = g.allgather(given(g.rank, length + g.rank).reshape(-1, 1))
            assert [f.shape for f in found] == [(length + rank, 1) for rank in range(size)]
            assert all((f[:, 0] == given(rank, length + rank)).all() for rank, f in enumerate(found))
            table = np.empty((size, length), np.float32)
            assert g.allgather(given(g.rank, length), out=table) is table
            assert all((table[rank] == given(rank, length)).all() for rank in range(size))
        values = g.allgather({"rank": g.rank, "much": "x" * 10_000 * g.rank})
        assert values == [{"rank": rank, "much": "x" * 10_000 * rank} for rank in range(size)]
        return True

    assert all(run(size, body))


def test_allgather_with_wrong_out_raises_and_writes_nothing(run: Any) -> None:
    """Only the member whose ``out`` is too small raises, and the others complete the operation."""

    def body(g: Any) -> str:
        room = [np.zeros(3 if g.rank else 2, np.float32), np.zeros(4, np.float32)]
        before = np.copy(room[0])
        try:
            g.allgather(np.ones(3 + g.rank, np.float32), out=room)
        except ValueError as error:
            assert (room[0] == before).all()
            return str(error)
        assert g.rank == 1
        return f"{g.allreduce(1)}"

    def both(g: Any) -> str:
        found = body(g)
        return found if g.rank else f"{found} {g.allreduce(1)}"

    assert run(2, both) == [
        "allgather: out must have room for exactly the 12 bytes from rank 0, got room for 8 2",
        "2",
    ]


@pytest.mark.each_value
@pytest.mark.parametrize("size", SIZES)
def test_gather_scatter_and_alltoall_accept_any_size(run: Any, size: int) -> None:
    def body(g: Any) -> bool:
        for length in (0, 3, 70_000):
            for root in range(size):
                found = g.gather(given(g.rank, length + g.rank), root=root)
                if g.rank == root:
                    assert all((f == given(r, length + r)).all() for r, f in enumerate(found))
                else:
                    assert found is None
                parts = [given(r, length + r) for r in range(size)] if g.rank == root else None
                assert (g.scatter(parts, root=root) == given(g.rank, length + g.rank)).all()
            found = g.alltoall([given(10 * g.rank + r, length + g.rank + r) for r in range(size)])
            assert all((f == given(10 * r + g.rank, length + g.rank + r)).all() for r, f in enumerate(found))
            out = [np.empty(length + r, np.float32) for r in range(size)]
            g.alltoall([given(10 * g.rank + r, length + g.rank) for r in range(size)], out=out)
            assert all((f == given(10 * r + g.rank, length + r)).all() for r, f in enumerate(out))
        assert g.gather(g.rank) == (list(range(size)) if g.rank == 0 else None)
        assert g.alltoall([(g.rank, r) for r in range(size)]) == [(r, g.rank) for r in range(size)]
        return True

    assert all(run(size, body))


@pytest.mark.each_value
@pytest.mark.parametrize("size", SIZES)
def test_reduce_scatter_returns_one_part_per_member(run: Any, size: int) -> None:
    def body(g: Any) -> bool:
        for length in LENGTHS:
            part = g.reduce_scatter(given(g.rank, size * length).reshape(size * length))
            right = sum((given(r, size * length) for r in range(size)), np.zeros(size * length, np.float32))
            assert (part == right[g.rank * length : (g.rank + 1) * length]).all()
        return True

    assert all(run(size, body))


def test_started_operations_keep_order_and_errors(run: Any) -> None:
    def body(g: Any) -> Any:
        many = [np.full(50_000, float(i)) for i in range(10)]
        handles = [g.allreduce(x, wait=False) for x in many]
        total = g.allreduce(np.ones(3))  # this runs after all started operations
        assert all(handle.done() for handle in handles)
        found = [handle.wait()[0] for handle in handles]
        wrong = g.allreduce("no number", op="min", wait=False), g.allreduce(1, op="and", wait=False)
        with pytest.raises(TypeError):
            g.allreduce(object(), wait=False).wait()
        return found, total[0], [handle.wait() for handle in wrong]

    for found, total, more in run(2, body):
        assert found == [2.0 * i for i in range(10)]
        assert (total, more) == (2.0, ["no number", 1])


def test_every_operation_supports_wait_false(run: Any) -> None:
    def body(g: Any) -> Any:
        x = np.arange(4.0) + g.rank
        room = [np.empty(2) for _ in range(g.size)]
        calls: dict[str, Callable[..., Any]] = {
            "reduce": lambda **now: g.reduce(x.copy(), 1, **now),
            "reduce_scatter": lambda **now: g.reduce_scatter(x.copy(), **now),
            "reduce_scatter into": lambda **now: g.reduce_scatter(x.copy(), out=np.empty(2), **now),
            "scatter": lambda **now: g.scatter(["a", x] if g.rank == 1 else None, 1, **now),
            "alltoall": lambda **now: g.alltoall(["b", g.rank], **now),
            "alltoall into": lambda **now: g.alltoall(list(x.reshape(2, 2)), out=room, **now),
            "allreduce_with": lambda **now: g.allreduce_with({"c": g.rank}, operator.add, **now),
            "allreduce_with by a function": lambda **now: g.allreduce_with(x, lambda a, b: a + b, **now),
        }
        right = {name: str(call()) for name, call in calls.items()}
        handles = {name: call(wait=False) for name, call in calls.items()}
        assert {name: str(handle.wait()) for name, handle in handles.items()} == right
        wrong = [
            g.reduce(x, 0, ["sum", "max"][g.rank], wait=False),
            g.reduce_scatter(x, ["sum", "max"][g.rank], wait=False),
            g.scatter(["a", "b"], g.rank, wait=False),
            g.alltoall([np.ones(2 + g.rank)] * 2, out=[np.ones(2)] * 2, wait=False),
            g.allreduce_with(1, lambda a, b: a / 0, wait=False),
        ]
        raised = [type(handle._future.exception()).__name__ for handle in wrong]
        return raised, g.allreduce(1)

    mismatches = ["Mismatch"] * 4
    assert run(2, body) == [([*mismatches, "ZeroDivisionError"], 2)] * 2


def test_split_creates_one_group_per_key(run: Any) -> None:
    """A group may have any size and any key, and can be split again."""

    def body(g: Any) -> Any:
        third = g.split(g.rank % 3)
        pair = third.split("pair" if third.rank < 2 else None)
        sums = third.allreduce(g.rank), None if pair is None else pair.allgather(g.rank)
        if pair is not None:
            pair.close()
        third.close()
        return sums

    assert run(5, body) == [(3, [0, 3]), (5, [1, 4]), (2, [2]), (3, [0, 3]), (5, [1, 4])]


def test_split_creates_a_group_of_leaders(run: Any) -> None:
    """Closing a subgroup also closes its member of ``leaders``."""

    def body(g: Any) -> Any:
        part = g.split(g.rank % 2 if g.rank else None)
        if part is None or part.leaders is None:
            return None
        found = part.leaders.allgather((g.rank, part.leaders.rank))
        part.close()
        with pytest.raises(GroupError, match="closed"):
            part.leaders.barrier()
        return found

    first = [(1, 0), (2, 1)]
    assert run(5, body) == [None, first, first, None, None]
