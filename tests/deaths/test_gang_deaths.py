"""Test R11: when a worker of a gang dies, all its workers restart together with their current items."""

from __future__ import annotations

from collections import Counter

from kill_points import Deaths, stage_of

from flowchan import Graph, In, Out
from flowchan.collective import Group


def add(a: int, b: int) -> int:
    return a + b


def test_death_restarts_the_gang_with_its_current_items() -> None:
    """Each item has one output, and no worker is blamed for the deaths of other workers."""
    deaths = Deaths(3, 11, 12, 29)

    def work(numbers: In[int], group: Group, out: Out[int]) -> None:
        for number in numbers:
            deaths.at(number)
            group.allreduce_with(number, add)
            out.put(number)
        for _ in group.join(add):
            pass

    graph = Graph("gang")
    numbers = graph.source(range(30), capacity=4)
    result = graph.stage(work, numbers, on="process", workers=3, restartable=True, name="work").collect()
    run = graph.start()
    assert Counter(run.wait()[result]) == Counter(range(30))
    assert 1 <= stage_of(run, "work").restarts <= deaths.total


def test_gang_of_one_is_replaced_like_any_worker() -> None:
    deaths = Deaths(0, 5)

    def work(numbers: In[int], group: Group, out: Out[int]) -> None:
        for number in numbers:
            deaths.at(number)
            out.put(group.allreduce(number))

    graph = Graph("gang")
    result = graph.stage(work, graph.source(range(9)), on="process", restartable=True).collect()
    assert graph.run()[result] == list(range(9))
