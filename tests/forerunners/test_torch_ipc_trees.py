"""Test groups with the cases from torch-ipc's tests of ``Tree``.

The tests use ``allreduce_with``, ``join`` and ``broadcast``. The members are threads, as in the original.
Each test has the name of the original test but none of its code. The following original tests have no
counterpart here, or have a different result:

``base``, ``buildTree``
    A group does not need the shape of a tree. On one host, members read each other's values in shared memory;
    between hosts, one member on each host does. Bases 4 and 8 lost nodes in the original.
    The sizes here are larger.
in-place results
    ``allreduce_with`` leaves its arguments unchanged and returns the result.
``zero``
    The function gets only contributed values. A member without steps left also gets the results, unlike in
    the original.
``tree.netStats``
    ``stats`` reports the traffic between hosts: tests/collective/test_linked_groups.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.group_members import SECRET, Body, free_address, in_threads, over_hosts, raised

from flowchan import collective

Run = Callable[[int, Body], list[Any]]


def add(a: Any, b: Any) -> Any:
    a += b
    return a


@pytest.fixture(params=[in_threads, over_hosts], ids=["one host", "two hosts"])
def run(request: pytest.FixtureRequest) -> Run:
    return lambda size, body: raised(request.param(size, body))


@pytest.mark.parametrize("size", [1, 2, 8, 9, 17])
def test_tree_numbers_base2(run: Run, size: int) -> None:
    found = run(size, lambda g: g.allreduce_with(g.rank + 1, add))
    assert found == [(sum(range(size + 1)), size)] * size


def test_tree_numbers_array_base2(run: Run) -> None:
    found = run(4, lambda g: g.allreduce_with([g.rank + 1, 2 * (g.rank + 1)], add))
    assert found == [([10, 20], 4)] * 4


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("function", [add, lambda a, b: a + b], ids=["in place", "not in place"])
def test_tree_tensors_base2_base4_base8(run: Run, size: int, function: Any) -> None:
    def body(g: Any) -> Any:
        mine = np.full(10, g.rank + 1)
        total, n = g.allreduce_with(mine, function)
        assert (mine == g.rank + 1).all()
        return total.sum(), n

    assert run(size, body) == [({2: 30, 8: 360}[size], size)] * size


def test_tree_multiple_tensors(run: Run) -> None:
    def body(g: Any) -> Any:
        total, _ = g.allreduce_with({"a": np.full(10, g.rank + 1), "b": np.full(10, g.rank)}, add)
        return total["a"].sum(), total["b"].sum()

    assert run(8, body) == [(360, 280)] * 8


def test_uneven_number_of_steps(run: Run) -> None:
    """The k-th member has k steps and then joins the steps of the other members."""
    size = 6

    def body(g: Any) -> Any:
        found = [g.allreduce_with(g.rank + 1, add) for _ in range(g.rank + 1)]
        return found + list(g.join(add)), g.allreduce_with(0, add)[1]

    steps = [(sum(range(step, size + 1)), size + 1 - step) for step in range(1, size + 1)]
    assert run(size, body) == [(steps, size)] * size


def test_scatter(run: Run) -> None:
    """All members get the root's value, as from flowchan's ``broadcast``.

    flowchan's ``scatter`` gives each member a different part.
    """

    def body(g: Any) -> Any:
        x = np.full(10, g.rank + 1)
        table = {"a": [g.rank + 1, (g.rank + 1, "text")]}
        return g.broadcast(x).tolist(), g.broadcast(table), g.scatter("abcdefgh" if g.rank == 0 else None)

    assert run(8, body) == [([1] * 10, {"a": [1, (1, "text")]}, "abcdefgh"[rank]) for rank in range(8)]


def test_walk_table(run: Run) -> None:
    """The original has no test. Leaves are paired by their position in nested tables.

    The order of the keys does not matter.
    """

    def body(g: Any) -> Any:
        items = [("w", [g.rank, (g.rank, {"deep": g.rank})]), ("b", str(g.rank)), (3, {})]
        return g.allreduce_with(dict(items if g.rank % 2 else reversed(items)), add)[0]

    right = {"w": [3, (3, {"deep": 3})], "b": "012", 3: {}}
    assert run(3, body) == [right] * 3


def test_constructors() -> None:
    """The test covers ``NullTree``, ``LocalhostTree`` and ``StaticTree``.

    ``DiscoveredTree`` corresponds to any other way to find an address. For Slurm, see
    tests/collective/test_group_rendezvous.py.
    """
    with collective.group() as alone:
        assert (alone.allreduce_with("x", add), alone.broadcast("x"), alone.rank) == (("x", 1), "x", 0)

    def body(_: Any, rank: int, **given: Any) -> Any:
        with collective.group(rank=rank, size=3, **given) as g:
            return g.allreduce_with(1, add)

    for given in ({"at": "the trees of a test"}, {"at": free_address(), "secret": SECRET}):
        found = in_threads(3, lambda g, given=given: body(g, g.rank, **given))
        assert raised(found) == [(3, 3)] * 3
