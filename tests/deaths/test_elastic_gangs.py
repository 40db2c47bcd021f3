"""Test R11: when a worker of an elastic gang dies, the others continue in their processes.

Until a replacement joins, the gang is smaller.
"""

from __future__ import annotations

import functools
import os
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kill_points import Deaths, stage_of
from support.gangs import check_each_once
from support.waiting import wait_until

from flowchan import Channel, Graph, In, MemberDied, Out, RunError, WorkerDied, worker
from flowchan.collective import Group


def add(a: Any, b: Any) -> Any:
    return a + b


def test_elastic_gang_continues_with_fewer_members_and_regrows() -> None:
    """The user's object keeps its state, and all members of a group have the same bits."""
    fewer: Channel[None] = Channel(across="processes")
    whole: Channel[None] = Channel(across="processes")
    deaths = Deaths(5)

    class Work:
        def __init__(self, fewer: Channel[None], whole: Channel[None], deaths: Deaths) -> None:
            self.fewer, self.whole, self.deaths = fewer, whole, deaths
            self.sizes: list[int] = []
            self.sum = np.zeros(1)
            if worker().incarnation:
                fewer.get()

        def __call__(self, numbers: In[int], group: Group, out: Out[tuple[Any, ...]]) -> None:
            self.sizes.append(group.size)
            group.broadcast(self.sum)  # a member that has the sum sends it to new members
            for number in numbers:
                self.deaths.at(number)
                total, n = group.allreduce_with(np.array([0.1 * number]), add)
                self.sum += total
                same = group.allreduce_with({self.sum.tobytes()}, set.union)[0]
                seen = {(3, 2): self.fewer, (3, 2, 3): self.whole}.get(tuple(self.sizes))
                if seen is not None and not seen.stats().items_in:
                    seen.put(None)
                out.put((number, worker().number, os.getpid(), tuple(self.sizes), len(same), n))
            for _ in group.join(lambda a, b: a | b if isinstance(a, set) else a + b):
                pass

    def numbers() -> Iterator[int]:
        number = 0
        while not whole.stats().items_in:
            yield number
            number += 1

    graph = Graph("elastic")
    work = functools.partial(Work, fewer, whole, deaths)
    result = graph.stage(
        work, graph.source(numbers, capacity=4), on="process", workers=3, elastic=True, name="work"
    ).collect()
    run = graph.start()
    found = run.wait()[result]
    assert {one[4] for one in found} == {1}
    processes = check_each_once([one[:3] for one in found])
    assert processes in ([1, 1, 1], [1, 1, 2])  # the dead worker may not have put any output
    sizes = {one[3] for one in found}
    assert {(3,), (3, 2), (3, 2, 3)} <= sizes
    assert stage_of(run, "work").restarts == 1


@pytest.mark.parametrize("workers", [2, 3])
def test_elastic_gang_puts_each_output_once(workers: int) -> None:
    """Even an item that several workers have started again must have each of its outputs once."""
    points = [(item, k) for item, k in ((0, 0), (7, 1), (7, 2), (8, 1), (20, 2), (29, 0))]
    deaths = Deaths(*points)

    def work(items: In[int], group: Group, out: Out[tuple[int, int]]) -> None:
        for item in items:
            for k in range(3):
                deaths.at((item, k))
                group.allreduce_with(item, add)
                out.put((item, k))
        for _ in group.join(add):
            pass

    graph = Graph("outputs")
    items = graph.source(range(30), capacity=4)
    result = graph.stage(work, items, on="process", workers=workers, elastic=True, name="work").collect()
    run = graph.start()
    assert Counter(run.wait()[result]) == Counter((item, k) for item in range(30) for k in range(3))
    assert stage_of(run, "work").restarts == deaths.total


def test_worker_ahead_of_its_gang_gets_its_items_again() -> None:
    deaths = Deaths(3, 17)

    def work(items: In[int], group: Group, out: Out[int]) -> None:
        while items_now := items.get_many(4):
            for item in items_now:
                deaths.at(item)
                group.allreduce_with(item, add)
                out.put(item)

    def until_drained(items: In[int], group: Group, out: Out[int]) -> None:
        from flowchan import Drained

        try:
            work(items, group, out)
        except Drained:
            for _ in group.join(add):
                pass

    graph = Graph("many")
    items = graph.source(range(40))
    result = graph.stage(until_drained, items, on="process", workers=2, elastic=True).collect()
    assert Counter(graph.run()[result]) == Counter(range(40))


def test_last_gang_worker_is_replaced_after_the_others_ended() -> None:
    """The replacement processes the dead worker's item in a group of one."""
    deaths = Deaths("late")
    ended: Channel[None] = Channel(across="processes")

    def work(items: In[int], group: Group, out: Out[tuple[int, int]]) -> None:
        for item in items:
            if item == 0:
                wait_until(lambda: ended.stats().items_in == 1 or bool(worker().incarnation))
                deaths.at("late")
            out.put((item, group.size))
        ended.put(None)

    graph = Graph("last")
    result = graph.stage(work, graph.source([0, 1]), on="process", workers=2, elastic=True).collect()
    assert sorted(graph.run()[result]) == [(0, 1), (1, 2)]


def test_death_without_remaining_restarts_ends_the_run() -> None:
    def work(items: In[int], group: Group, out: Out[int]) -> None:
        if worker().number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        for item in items:
            group.allreduce_with(item, add)
        for _ in group.join(add):
            pass

    graph = Graph("spent")
    graph.stage(work, graph.source(range(20)), on="process", workers=2, elastic=True, restarts=1).collect()
    with pytest.raises(RunError) as caught:
        graph.run()
    cause = caught.value.exceptions[0].__cause__
    assert isinstance(cause, WorkerDied)
    assert "1 of 1 restarts were used" in str(cause)


def test_group_failure_without_a_death_counts_as_restart() -> None:
    calls: Channel[None] = Channel(across="processes")

    def work(items: In[int], group: Group) -> None:
        calls.put(None)
        items.get()
        raise MemberDied("so it says")

    graph = Graph("again")
    graph.stage(work, graph.source([1, 2]), on="process", workers=2, elastic=True, restarts=2)
    with pytest.raises(RunError) as caught:
        graph.run()
    assert [str(error.__cause__) for error in caught.value.exceptions] == ["so it says"]
    assert calls.stats().items_in == 2 * 3


def test_worker_waiting_for_a_group_ends_with_the_run() -> None:
    def work(items: In[int], group: Group) -> None:
        items.get()
        if group.rank == 0:
            group.barrier()
        elif group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        wait_until(lambda: bool(group._see(0)[1]))  # type: ignore[attr-defined]
        raise ValueError("mine")

    graph = Graph("fails")
    graph.stage(work, graph.source([1, 2, 3]), on="process", workers=3, elastic=True)
    with pytest.raises(RunError) as caught:
        graph.run()
    causes = [str(error.__cause__) for error in caught.value.exceptions]
    assert "mine" in causes
    assert all("not replaced" in cause for cause in causes if cause != "mine")  # other workers may die later
