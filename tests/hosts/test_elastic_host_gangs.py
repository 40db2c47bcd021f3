"""Test elastic gangs over hosts (R11).

When a worker or a whole host dies, the surviving members continue in their processes as a smaller group,
until replacements join.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gangs import check_each_once, kill_agent, kill_worker, once
from support.waiting import wait_until

from flowchan import Graph, In, MemberDied, Out, RunError, worker
from flowchan.collective import Group
from flowchan.hosts import local

ITEMS = 30


pytestmark = pytest.mark.usefixtures("no_agent_stays")


def add(a: Any, b: Any) -> Any:
    return a | b if isinstance(a, set) else a + b


@pytest.mark.any_value
@pytest.mark.parametrize("workers", [2, 3])
def test_elastic_gang_continues_with_fewer_members_and_regrows(tmp_path: Path, workers: int) -> None:
    """The user's object keeps its state, and all members of every group have the same bits.

    Even a lone member learns that a replacement will join.
    """
    sizes = (workers, workers - 1, workers)
    fewer, whole = tmp_path / "fewer", tmp_path / "whole"

    class Work:
        def __init__(self) -> None:
            self.sizes: list[int] = []
            self.sum = np.zeros(1)
            if worker().incarnation:
                wait_until(fewer.exists)

        def __call__(self, numbers: In[int], group: Group, out: Out[tuple[Any, ...]]) -> None:
            self.sizes.append(group.size)
            group.broadcast(self.sum)  # a member that has the sum sends it to new members
            for number in numbers:
                if number == 5:
                    once(tmp_path, number, kill_worker)
                total, _ = group.allreduce_with(np.array([0.1 * number]), add)
                self.sum += total
                same, _ = group.allreduce_with({self.sum.tobytes()}, add)
                {sizes[:2]: fewer, sizes: whole}.get(tuple(self.sizes), tmp_path / "other").touch()
                out.put((number, worker().number, os.getpid(), tuple(self.sizes), len(same)))
            for _ in group.join(add):
                pass

    def numbers() -> Iterator[int]:
        number = 0
        while not whole.exists():
            yield number
            number += 1

    graph = Graph("elastic")
    source = graph.source(numbers, capacity=4)
    result = graph.stage(Work, source, on=local(2), workers=workers, elastic=True, name="work").collect()
    run = graph.start()
    found = run.wait()[result]
    assert {one[4] for one in found} == {1}
    processes = check_each_once([one[:3] for one in found])
    assert processes[:-1] == [1] * (workers - 1)  # except for the dead worker
    assert {sizes[:1], sizes[:2], sizes} <= {one[3] for one in found}
    assert next(stage.restarts for stage in run.stats().stages if stage.name == "work") == 1


@pytest.mark.any_value
@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("deed", [kill_worker, kill_agent], ids=["worker", "agent"])
def test_elastic_gang_puts_each_output_once(tmp_path: Path, deed: Callable[[], Any], workers: int) -> None:
    """Each item has its outputs once, even if several members have started it or its host was lost."""
    points = {(0, 0), (7, 1), (7, 2), (8, 1), (20, 2), (29, 0)}

    def work(items: In[int], group: Group, out: Out[tuple[int, int]]) -> None:
        for item in items:
            for k in range(3):
                if (item, k) in points:
                    once(tmp_path, (item, k), deed)
                group.allreduce_with(item, add)
                out.put((item, k))
        for _ in group.join(add):
            pass

    graph = Graph("outputs")
    items = graph.source(range(ITEMS), capacity=4)
    result = graph.stage(work, items, on=local(2), workers=workers, elastic=True, restarts=9).collect()
    assert Counter(graph.run()[result]) == Counter((item, k) for item in range(ITEMS) for k in range(3))


def test_broken_connection_between_hosts_reforms_the_elastic_gang(tmp_path: Path) -> None:
    """No process died, so the members form a new group in their old processes."""

    def work(items: In[int], group: Group, out: Out[tuple[int, int]]) -> None:
        for item in items:
            if item == 20:
                once(tmp_path, item, lambda: group._links.cut())  # type: ignore[attr-defined]
            group.allreduce_with(item, add)
            out.put((item, os.getpid()))
        for _ in group.join(add):
            pass

    graph = Graph("cut")
    items = graph.source(range(ITEMS))
    result = graph.stage(work, items, on=local(2), workers=2, elastic=True, name="work").collect()
    found = graph.run()[result]
    assert sorted(item for item, _ in found) == list(range(ITEMS))
    assert len({pid for _, pid in found}) == 2


def test_group_failure_without_a_death_counts_as_restart(tmp_path: Path) -> None:
    def work(items: In[int], group: Group) -> None:
        with (tmp_path / "calls").open("a") as calls:
            calls.write("one\n")
        items.get()
        raise MemberDied("so it says")

    graph = Graph("again")
    graph.stage(work, graph.source([1, 2]), on=local(2), workers=2, elastic=True, restarts=2)
    with pytest.raises(RunError) as caught:
        graph.run()
    assert [str(error.__cause__) for error in caught.value.exceptions] == ["so it says"]
    assert len((tmp_path / "calls").read_text().splitlines()) == 2 * 3


def test_worker_waiting_for_a_group_ends_with_the_run(tmp_path: Path) -> None:
    without_group = tmp_path / "bereft"

    def work(items: In[int], group: Group) -> None:
        if items.get() == 1:
            without_group.touch()
            raise MemberDied("so it says")
        wait_until(without_group.exists)
        raise ValueError("mine")

    graph = Graph("fails")
    graph.stage(work, graph.source([1, 2]), on=local(2), workers=2, elastic=True)
    with pytest.raises(RunError) as caught:
        graph.run()
    assert {str(error.__cause__) for error in caught.value.exceptions} == {"mine"}
