"""Test groups with the cases from the tests of THD, PyTorch's first ``torch.distributed``.

They include 33 cases from Python and some of the C++ tests of THD's channels. The members are threads. Each
test has the name of the original test without ``_sum``, ``_product``, ``_min`` and ``_max``, but none of its
code. Cases that end in ``_group`` repeat a case in a subgroup. The following original tests have no
counterpart here, or a different result:

``*_cuda``, ``*_multigpu``
    CUDA tensors use NCCL: tests/collective/test_torch_algorithms.py.
``irecv``
    flowchan has no asynchronous receive.
``DistributedDataParallel``, ``DistributedDataParallelCPU``
    They run with the ``flowchan`` backend: tests/collective/test_torch_backend.py.
``tensors_are_not_the_same``
    Gathered values may differ in size; only an output that is passed in must fit.
``command_channel_smoke``, ``rpc_serialization``, ``tensor_smoke``
    They test the master-worker mode: test_thd_master_worker.py.
slow master, accept timeout
    They are in tests/collective/test_group_rendezvous.py and test_linked_groups.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.group_members import Body, in_threads, raised

SIZE = 4
OPS: dict[str, Callable[..., Any]] = {"sum": sum, "prod": math.prod, "min": min, "max": max}

Run = Callable[[Body], list[Any]]


@pytest.fixture(params=["world", "group"])
def run(request: pytest.FixtureRequest) -> Run:
    """Return a function that runs a body on all members, or on the subgroup without rank 1."""

    def in_group(body: Body, g: Any) -> Any:
        part = g.split(None if g.rank == 1 else "the others")
        assert (part is None) == (g.rank == 1)
        if part is None:
            return None
        with part:
            assert (part.size, part.rank) == (SIZE - 1, max(0, g.rank - 1))
            return body(part)

    if request.param == "world":
        return lambda body: raised(in_threads(SIZE, body))
    return lambda body: raised(in_threads(SIZE, functools.partial(in_group, body)))


def each_root(g: Any) -> Iterator[tuple[int, Any]]:
    """Yield each root with a tensor that is filled with this member's rank plus one.

    The tensor's side grows with the root's rank.
    """
    for root in range(g.size):
        yield root, np.full((root + 1, root + 1), g.rank + 1.0)


def test_get_rank() -> None:
    assert raised(in_threads(SIZE, lambda g: (g.rank, g.size))) == [(rank, SIZE) for rank in range(SIZE)]


def test_send_recv_and_isend(run: Run) -> None:
    """Each member sends to every other member. A send needs no waiting receiver."""

    def body(g: Any) -> None:
        for to in range(g.size):
            if to != g.rank:
                g.send(np.full(10, g.rank), to)
        for source in range(g.size):
            if source != g.rank:
                assert (g.receive(source, out=np.full(10, -1)) == source).all()

    run(body)


def test_send_recv_any_source(run: Run) -> None:
    def body(g: Any) -> None:
        for to in range(g.size):
            if to != g.rank:
                g.send(np.full(10, g.rank), to)
        found = [g.receive_any() for _ in range(g.size - 1)]
        assert all((x == source).all() for x, source in found)
        assert {source for _, source in found} == set(range(g.size)) - {g.rank}

    run(body)


def test_broadcast(run: Run) -> None:
    def body(g: Any) -> None:
        for root, x in each_root(g):
            assert (g.broadcast(x, root) == root + 1).all()

    run(body)


@pytest.mark.parametrize("op", OPS)
def test_reduce(run: Run, op: str) -> None:
    """Only the root's tensor changes. In THD, other members could get parts of the result."""

    def body(g: Any) -> None:
        for root, x in each_root(g):
            g.reduce(x, root, op)
            right = OPS[op](range(1, g.size + 1)) if g.rank == root else g.rank + 1
            assert (x == right).all()

    run(body)


@pytest.mark.parametrize("op", OPS)
def test_all_reduce(run: Run, op: str) -> None:
    def body(g: Any) -> None:
        for _, x in each_root(g):
            assert (g.allreduce(x, op) == OPS[op](range(1, g.size + 1))).all()

    run(body)


def test_scatter(run: Run) -> None:
    def body(g: Any) -> None:
        for root, x in each_root(g):
            parts = [np.full_like(x, rank) for rank in range(g.size)] if g.rank == root else None
            assert (g.scatter(parts, root) == np.full_like(x, g.rank)).all()

    run(body)


def test_gather(run: Run) -> None:
    def body(g: Any) -> None:
        for root, x in each_root(g):
            found = g.gather(x, root)
            assert (found is None) == (g.rank != root)
            assert all((part == rank + 1).all() for rank, part in enumerate(found or ()))

    run(body)


def test_all_gather(run: Run) -> None:
    def body(g: Any) -> None:
        for _, x in each_root(g):
            table = np.zeros((g.size, *x.shape))
            g.allgather(x, out=table)
            assert all((part == rank + 1).all() for rank, part in enumerate(table))

    run(body)


def test_barrier(run: Run) -> None:
    """No member passes before the last member has arrived. THD's test made the last member sleep."""
    came: list[int] = []

    def body(g: Any) -> None:
        for root in range(g.size):
            came.append(root)
            g.barrier()
            assert came.count(root) == g.size
            g.barrier()

    run(body)


# --- tests from THD's C++ code ---


def test_process_not_in_group_and_empty_group() -> None:
    """A process outside the group gets None. In THD, its calls silently did nothing."""

    def body(g: Any) -> Any:
        assert g.split(None) is None
        part = g.split(0 if g.rank else None)
        return part and part.allreduce(1)

    assert raised(in_threads(3, body)) == [None, 2, 2]


def test_invalid_rank() -> None:
    def body(g: Any) -> None:
        for wrong in (-1, g.size, g.rank):
            with pytest.raises(ValueError, match="rank of another member"):
                g.send(1, wrong)
        with pytest.raises(ValueError, match="root must be a rank of the group"):
            g.broadcast(1, root=g.size)

    raised(in_threads(3, body))


def test_tensors_do_not_match_group_size_or_are_not_the_same() -> None:
    def body(g: Any) -> None:
        with pytest.raises(ValueError, match="one part for each of the 3 members, got 2"):
            g.alltoall(np.zeros(2))
        with pytest.raises(ValueError, match="one part for each of the 3 members, got 4"):
            g.allgather(np.zeros(2), out=[np.zeros(2)] * 4)
        with pytest.raises(
            ValueError, match="out must have room for exactly the 8 bytes from rank 0, got room for 24"
        ):
            g.allgather(np.zeros(1 + g.rank), out=[np.zeros(3)] * 3)
        assert [len(x) for x in g.allgather(np.zeros(1 + g.rank))] == [1, 2, 3]

    raised(in_threads(3, body))


def test_gloo_cache() -> None:
    """Many rounds of broadcasts from all roots to 11 members leak nothing."""

    def body(g: Any) -> None:
        for number in range(20):
            for root in range(g.size):
                assert (g.broadcast(np.full(5, g.rank * number), root) == root * number).all()

    raised(in_threads(11, body))
