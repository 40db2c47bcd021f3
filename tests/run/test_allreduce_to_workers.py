"""Test ``allreduce(to_workers=True)``: each worker that contributed to round k gets its result as item k."""

from __future__ import annotations

import os
from typing import Any

import pytest
from runs import everywhere, stage_of
from support.worker_latch import Gate

from flowchan import Channel, Graph, In, Out, Reduced, worker
from flowchan.hosts import local


def train(
    batches: In[int], totals: In[Reduced[int]], gradients: Out[int], sums: Out[tuple[int, int]]
) -> None:
    """Put a gradient for each batch, and then wait for the total of its round."""
    total = 0
    for batch in batches:
        gradients.put(batch)
        total += totals.get().value
    sums.put((worker().number, total))


def shares(numbers: Out[int]) -> None:
    """In worker n, put n numbers."""
    number = worker().number
    numbers.put_many(range(10 * number, 11 * number))


def heard(totals: In[Reduced[int]], out: Out[tuple[int, list[Reduced[int]]]]) -> None:
    out.put((worker().number, list(totals)))


@everywhere
def test_workers_of_a_loop_get_the_results_of_their_rounds(on: str) -> None:
    graph = Graph("loop")
    totals = graph.feedback()
    gradients, sums = graph.stage(
        train, graph.source(range(30)), totals, workers=3, per_worker="totals", on=on
    )
    totals.feed(gradients.allreduce("sum", to_workers=True))
    found = sums.collect()
    results = dict(graph.run()[found])
    assert sorted(results) == [1, 2, 3]
    assert max(results.values()) == sum(range(30))


def test_workers_on_hosts_get_the_results_of_their_rounds() -> None:
    graph = Graph("loop")
    totals = graph.feedback()
    gradients, sums = graph.stage(
        train, graph.source(range(12)), totals, workers=2, per_worker="totals", on=local(2)
    )
    totals.feed(gradients.allreduce(to_workers=True))
    found = sums.collect()
    assert max(dict(graph.run()[found]).values()) == sum(range(12))


@everywhere
def test_each_worker_of_a_later_stage_gets_its_rounds(on: str) -> None:
    graph = Graph("later")
    totals = graph.stage(shares, on=on, workers=3).allreduce("sum", to_workers=True)
    found = graph.stage(heard, totals, on=on, workers=3, per_worker="totals").collect()
    rounds = [Reduced(10 + 20 + 30, 3, 0), Reduced(21 + 31, 2, 1), Reduced(32, 1, 2)]
    assert dict(graph.run()[found]) == {1: rounds[:1], 2: rounds[:2], 3: rounds}


def test_results_for_a_worker_that_has_left_count_as_unwanted() -> None:
    gate = Gate()

    def first_only(totals: In[Any], out: Out[int]) -> None:
        if worker().number == 1:
            totals.close()
            gate.open()
        else:
            out.put(sum(total.value for total in totals))

    def two(numbers: Out[int]) -> None:
        numbers.put(1)
        gate.wait()
        numbers.put(2)

    graph = Graph("left")
    totals = graph.stage(two, workers=2).allreduce(to_workers=True)
    found = graph.stage(first_only, totals, workers=2, per_worker="totals").collect()
    run = graph.start()
    assert run.wait()[found] == [6]
    assert stage_of(run, "allreduce").unwanted > 0


def test_loop_survives_the_death_of_a_worker() -> None:
    """A replacement gets the same items again, but does not repeat outputs."""
    deaths: Channel[None] = Channel(1, across="processes")
    deaths.put(None)

    def work(totals: In[Any], out: Out[tuple[int, int]]) -> None:
        for total in totals:
            if total.round == 5 and worker().number == 1 and deaths.stats().inside:
                deaths.get()
                os.kill(os.getpid(), 9)
            out.put((worker().number, total.value))

    graph = Graph("deaths")
    ones = graph.merge(*(graph.source([1] * 9, name=name) for name in "ab"))
    totals = ones.allreduce(to_workers=True)
    found = graph.stage(
        work, totals, workers=2, per_worker="totals", on="process", restartable=True
    ).collect()
    assert sorted(graph.run()[found]) == [(1, 2)] * 9 + [(2, 2)] * 9


def test_allreduce_to_workers_emits_pairs_of_worker_and_result() -> None:
    numbers = Graph("typed").source([1])
    assert numbers.allreduce(to_workers=True).item == tuple[int, Reduced[Any]]
    with pytest.raises(TypeError, match="to_workers must be True or False"):
        numbers.allreduce(to_workers=1)  # type: ignore[call-overload]
