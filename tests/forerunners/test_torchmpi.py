"""Test groups with the cases from TorchMPI's scripts.

The scripts are ``startstop``, ``hierarchical_communicators``, ``collectives_all`` and
``mnist_modelparallel``. The members are threads, except in one case for each operation. Each test has the
name of the original test but none of its code. The following original tests have no counterpart here, or a
different result:

``customBarrier``
    It was disabled because it hung. Here ``mpiBarrier`` replaces both barriers.
``selector``, ``allselector``, and each case repeated with ``p2p``, ``nccl``, ``gloo``
    The algorithm depends on the size, the type and the placement. ``explain`` reports it, and the sizes here
    are on both sides of its limits. ``set_algorithm`` selects a different one:
    tests/collective/test_torch_algorithms.py.
async ``reduce``, ``sendreceivenext`` and ``allgather``
    In TorchMPI they were synchronous under another name. Here ``wait=False`` is an argument of ``allreduce``,
    ``broadcast``, ``barrier``, ``allgather`` and ``gather``.
``parameterserver``
    flowchan has no parameter server.
``async``, ``blockSequential``
    ``async`` only prints times. ``blockSequential`` divides a module's parameters into blocks, to overlap
    their allreduce with the backward pass. On a group, torch's DistributedDataParallel does this with its
    buckets: tests/collective/test_torch_backend.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.group_members import Body, in_processes, in_threads, over_hosts, raised

TYPES = ["int8", "int32", "int64", "float32", "float64"]
LENGTHS = [1, 100, 2**13, 2**17]
MEMBERS = 4
TOTAL = sum(range(MEMBERS))

Run = Callable[[int, Body], list[Any]]


@pytest.fixture(params=[in_threads, in_processes], ids=["threads", "processes"])
def run(request: pytest.FixtureRequest) -> Run:
    return lambda size, body: raised(request.param(size, body))


# --- startstop ---


def test_startstop() -> None:
    """32 members form a group twice. In TorchMPI, no second group could follow the first."""
    for _ in range(2):
        found = raised(in_threads(32, lambda g: (g.barrier(), g.rank, g.size)[1:]))
        assert found == [(rank, 32) for rank in range(32)]


# --- hierarchical_communicators ---


def by_levels(x: Any, *groups: Any) -> Any:
    """Return the sum over all members, reduced level by level from the innermost group and then broadcast.

    A group that does not contain this member is passed as None.
    """
    if groups and groups[0] is not None:
        groups[0].reduce(x)
        by_levels(x, *groups[1:])
        groups[0].broadcast(x)
    return x


@pytest.mark.parametrize("size", range(1, 38))
def test_hierarchical_communicators(size: int) -> None:
    """Groups are split off by rank modulo 3, and each is split into two groups of different sizes.

    The groups have the expected members and leaders, and a sum that is computed level by level equals the
    flat sum.
    """

    def body(g: Any) -> None:
        of_third = range(g.rank % 3, g.size, 3)
        of_half = of_third[g.rank // 3 % 2 :: 2]
        of_across = range(g.size)[3 * (g.rank // 3) :][:3]

        def mine() -> Any:
            return np.full(50, float(g.rank))

        with (
            g.split(f"key {g.rank % 3}") as third,
            third.split(third.rank % 2) as half,
            g.split(third.rank) as across,
        ):
            assert (third.rank, third.size) == (g.rank // 3, len(of_third))
            assert half.allgather(g.rank) == list(of_half)
            assert across.allgather(g.rank) == list(of_across)
            assert (third.leaders is None, half.leaders is None) == (third.rank > 0, half.rank > 0)
            if third.leaders is not None:
                assert third.leaders.allgather(g.rank) == list(range(g.size)[:3])
            if half.leaders is not None:
                assert half.leaders.allgather(g.rank) == list(of_third[:2])
            flat = g.allreduce(mine())
            assert (flat == sum(range(g.size))).all()
            assert (by_levels(mine(), third, third.leaders) == flat).all()
            assert (by_levels(mine(), half, half.leaders, third.leaders) == flat).all()
            assert (by_levels(mine(), half, half.leaders) == sum(of_third)).all()

    raised(in_threads(size, body))


def test_hierarchical_communicators_over_hosts() -> None:
    """Each group has members on several hosts."""

    def body(g: Any) -> Any:
        with g.split(g.rank // 3) as third:
            x = by_levels(np.full(50, float(g.rank)), third, third.leaders)
            leaders = third.leaders and third.leaders.allgather(g.rank)
            return x.tolist(), leaders

    assert raised(over_hosts(5, body)) == [
        ([10.0] * 50, [0, 3] if rank in (0, 3) else None) for rank in range(5)
    ]


# --- collectives_all ---


def cases() -> list[tuple[str, int]]:
    return [(dtype, length) for dtype in TYPES for length in LENGTHS]


@pytest.mark.parametrize("starts", [False, True], ids=["sync", "async"])
def test_broadcast(run: Run, starts: bool) -> None:
    """The last rank is the root."""

    def body(g: Any) -> None:
        root = g.size - 1
        for dtype, length in cases():
            x = np.full(length, g.rank, dtype)
            found = g.broadcast(x, root=root, wait=False).wait() if starts else g.broadcast(x, root=root)
            assert found is x
            assert (x == root).all()

    run(MEMBERS, body)


def test_reduce(run: Run) -> None:
    def body(g: Any) -> None:
        for dtype, length in cases():
            x, out = np.full(length, g.rank, dtype), np.zeros(length, dtype)
            assert g.reduce(x, out=out) is (out if g.rank == 0 else None)
            assert (x == g.rank).all()
            g.reduce(x)
            assert g.rank or ((x == TOTAL).all() and (out == TOTAL).all())

    run(MEMBERS, body)


@pytest.mark.parametrize("starts", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("apart", [False, True], ids=["inplace", "copy"])
def test_allreduce(run: Run, starts: bool, apart: bool) -> None:
    def body(g: Any) -> None:
        for dtype, length in cases():
            x = np.full(length, g.rank, dtype)
            out = np.zeros(length, dtype) if apart else x
            given = {"out": out} if apart else {}
            found = g.allreduce(x, wait=False, **given).wait() if starts else g.allreduce(x, **given)
            assert found is out
            assert (out == TOTAL).all()
            assert not apart or (x == g.rank).all()

    run(MEMBERS, body)


def test_allreduce_of_scalars(run: Run) -> None:
    """The test covers ``allreduce_double``, ``broadcast_long`` and similar calls.

    It also covers ``reduce`` and ``sendreceive``, which did not work in TorchMPI.
    """

    def body(g: Any) -> Any:
        around = {"to": (g.rank + 1) % g.size, "source": (g.rank - 1) % g.size}
        return (
            g.allreduce(g.rank / 2),
            g.broadcast(g.rank, root=2),
            g.reduce(g.rank),
            g.sendreceive(g.rank, **around),
        )

    assert run(MEMBERS, body) == [
        (TOTAL / 2, 2, TOTAL if rank == 0 else None, (rank - 1) % MEMBERS) for rank in range(MEMBERS)
    ]


def test_sendreceivenext(run: Run) -> None:
    """The values are shifted along a ring of ranks."""

    def body(g: Any) -> None:
        for dtype, length in cases():
            x = np.full(length, g.rank, dtype)
            x[:] = g.sendreceive(x, to=(g.rank + 1) % g.size, source=(g.rank - 1) % g.size)
            assert (x == (g.rank - 1) % g.size).all()

    run(MEMBERS, body)


def test_allgather(run: Run) -> None:
    """The inputs grow with the rank. All inputs are gathered into one table and into a new result."""

    def body(g: Any) -> None:
        for dtype, length in cases():
            x = np.full(length + g.rank, g.rank, dtype)
            ends = np.cumsum([length + rank for rank in range(g.size)])
            table = np.zeros(ends[-1], dtype)
            parts = np.split(table, ends[:-1])
            g.allgather(x, out=parts)
            right = np.concatenate([np.full(length + rank, rank, dtype) for rank in range(g.size)])
            assert (table == right).all()
            assert (np.concatenate(g.allgather(x)) == right).all()

    run(MEMBERS, body)


def test_mpi_barrier(run: Run) -> None:
    """In each of many rounds, no member passes before all have arrived."""

    def body(g: Any) -> None:
        for number in range(50):
            if g.rank == number % g.size:
                for other in range(g.size):
                    if other != g.rank:
                        g.send(number, other)
            g.barrier()
            if g.rank != number % g.size:
                assert g.receive(number % g.size, timeout=0) == number

    run(MEMBERS, body)


# --- mnist_modelparallel ---


def test_mnist_modelparallel() -> None:
    """Each member holds the weights for its share of the inputs to two linear layers.

    Outputs and gradients equal those of the whole layers with one bias. In TorchMPI, each member added the
    bias.
    """
    chance = np.random.default_rng(0)
    x, weights = chance.integers(-9, 9, (5, 12)).astype(float), []
    for rows, columns in ((12, 8), (8, 4)):
        weights.append(chance.integers(-9, 9, (rows, columns)).astype(float))
    bias = [np.arange(8.0), np.arange(4.0)]

    def body(g: Any) -> None:
        def share(a: Any, axis: int) -> Any:
            return np.split(a, g.size, axis)[g.rank]

        y = x
        for w, b in zip(weights, bias, strict=True):
            y = g.allreduce(share(y, 1) @ share(w, 0)) + b
        assert (y == (x @ weights[0] + bias[0]) @ weights[1] + bias[1]).all()
        gradient = np.ones_like(y)
        for w in reversed(weights):
            gradient = np.concatenate(g.allgather(gradient @ share(w, 0).T), 1)
        assert (gradient == np.ones_like(y) @ weights[1].T @ weights[0].T).all()

    raised(in_threads(4, body))
