"""Test that each operator gives the same results on two hosts as on one machine."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from flowchan import Failed, Feedback, Graph, In, Out, Stream, worker
from flowchan.declare.operators import OPERATORS
from flowchan.hosts import local

POOL = local(2)


pytestmark = pytest.mark.usefixtures("no_agent_stays")


def same(item: Any) -> Any:
    return item


def even(number: int) -> bool:
    return number % 2 == 0


def twice(number: int) -> list[int]:
    return [number, number]


def on_hosts(stream: Stream) -> Stream:
    """Return the stream after it has passed through two hosts."""
    return stream.map(same, on=POOL, workers=2)


def run(graph: Graph, *streams: Stream) -> Any:
    found = graph.run()
    results = [found[stream] for stream in streams]
    return results[0] if len(results) == 1 else results


def begins(graph: Graph) -> Stream:
    return graph.source(lambda: iter(range(40)), on=POOL, name="numbers")


def source(graph: Graph) -> Any:
    return run(graph, begins(graph).collect()), list(range(40))


def map_(graph: Graph) -> Any:
    return run(graph, on_hosts(begins(graph)).collect()), list(range(40))


def flat_map(graph: Graph) -> Any:
    given = begins(graph).flat_map(twice, on=POOL, workers=2)
    return run(graph, given.collect()), [number for number in range(40) for _ in "ab"]


def filter_(graph: Graph) -> Any:
    return run(graph, begins(graph).filter(even, on=POOL, workers=2).collect()), list(range(0, 40, 2))


def partition(graph: Graph) -> Any:
    low, high = begins(graph).partition(lambda n: int(n > 9), 2, on=POOL, workers=2)
    found = run(graph, low.collect(), high.collect())
    return [sorted(one) for one in found], [list(range(10)), list(range(10, 40))]


def sink(graph: Graph) -> Any:
    stream, log = graph.stage(both, begins(graph), on=POOL, name="both")
    stream.sink(same, on=POOL, workers=2)
    return run(graph, log.collect()), list(range(40))


def both(numbers: In[int], out: Out[int], log: Out[int]) -> None:
    for number in numbers:
        out.put(number)
        log.put(number)


def reduce(graph: Graph) -> Any:
    total = on_hosts(begins(graph)).reduce(lambda so_far, number: so_far + number)
    return run(graph, total), sum(range(40))


def collect(graph: Graph) -> Any:
    """Collect a list and send it to a host as one item."""
    return run(graph, on_hosts(on_hosts(begins(graph)).collect()).collect()), [list(range(40))]


def batch(graph: Graph) -> Any:
    batches = on_hosts(on_hosts(begins(graph)).batch(16))
    return run(graph, batches.collect()), [list(range(16)), list(range(16, 32)), list(range(32, 40))]


def unbatch(graph: Graph) -> Any:
    given = begins(graph).map(twice, on=POOL, workers=2).unbatch()
    return run(graph, on_hosts(given).collect()), [number for number in range(40) for _ in "ab"]


def take(graph: Graph) -> Any:
    return run(graph, on_hosts(on_hosts(begins(graph)).take(7)).collect()), list(range(7))


def tee(graph: Graph) -> Any:
    one, other = on_hosts(begins(graph)).tee(2)
    return run(graph, on_hosts(one).collect(), other.collect()), [list(range(40))] * 2


def zip_(graph: Graph) -> Any:
    pairs = on_hosts(begins(graph)).zip(on_hosts(graph.source(range(30), name="fewer")))
    return run(graph, on_hosts(pairs).collect()), [(number, number) for number in range(30)]


def merge(graph: Graph) -> Any:
    merged = graph.merge(on_hosts(begins(graph)), on_hosts(graph.source(range(40, 60), name="more")))
    return sorted(run(graph, on_hosts(merged).collect())), list(range(60))


def allreduce(graph: Graph) -> Any:
    """Reduce with local workers, between stages on two hosts."""
    rounds = on_hosts(on_hosts(begins(graph)).map(same, workers=2).allreduce("sum"))
    found = run(graph, rounds.collect())
    contributed = sum(one.contributors for one in found)
    return (sum(one.value for one in found), contributed), (sum(range(40)), 40)


def stage(graph: Graph) -> Any:
    """Run a stage that reads a feedback stream, in which each number circulates until it is small."""
    back: Feedback = graph.feedback()
    again, done = graph.stage(halved, begins(graph), back, on=POOL["local-1"], name="halved")
    back.feed(again.map(same, on=POOL["local-2"]))
    expected = collections.Counter(small(number) for number in range(40))
    return collections.Counter(run(graph, done.collect())), expected


def small(number: int) -> int:
    return number if number < 3 else small(number // 2)


def halved(fresh: In[int], back: In[int], again: Out[int], done: Out[int]) -> None:
    for number in fresh:
        while number >= 3:
            again.put(number // 2)
            number = back.get()
        done.put(number)


def input_(graph: Graph) -> Any:
    numbers = graph.input("numbers")
    result = on_hosts(numbers).collect()
    with graph.start() as going:
        for number in range(40):
            going[numbers].put(number)
    return going.wait()[result], list(range(40))


CASES = [
    source, map_, flat_map, filter_, partition, sink, reduce, collect, batch, unbatch, take, tee, zip_, merge,
    allreduce, stage, input_,
]  # fmt: skip


ON_THREADS = {"route", "window", "join", "record"}
"""Operators that run only on a thread of the program."""


def test_each_operator_has_a_case() -> None:
    assert {case.__name__.rstrip("_") for case in CASES} | ON_THREADS == set(OPERATORS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.rstrip("_"))
def test_operator_on_two_hosts_equals_local_result(case: Any) -> None:
    found, expected = case(Graph("operators"))
    assert found == expected


def test_failed_items_on_hosts_reach_errors_for_each_operator() -> None:
    def refuse(number: int) -> int:
        if number % 3 == 0:
            raise ValueError(f"{number} at {worker().host}")
        return number

    graph = Graph("errors")
    numbers = graph.source(range(12))
    mapped = numbers.map(refuse, on=POOL, workers=2, name="map")
    poured = mapped.flat_map(lambda n: [refuse(n + 1)], on=POOL, workers=2, name="flat")
    kept = poured.filter(lambda n: bool(refuse(n + 1)), on=POOL, workers=2, name="filter")
    failures = [stream.errors.collect(name=stream.name + " failures") for stream in (mapped, poured, kept)]
    *failed, good = run(graph, *failures, kept.collect())
    items = [sorted(one.item for one in found) for found in failed]
    assert items == [[0, 3, 6, 9], [2, 5, 8, 11], [2, 5, 8, 11]]
    assert good == []
    everything: list[Failed] = [one for found in failed for one in found]
    assert {str(one.error).rpartition(" ")[2] for one in everything} <= set(POOL.hosts)


def test_async_functions_run_locally_and_on_hosts() -> None:
    async def slow(number: int) -> int:
        await asyncio.sleep(0)
        return number

    async def ticks() -> AsyncIterator[int]:
        for number in range(40):
            yield number

    graph = Graph("async")
    result = on_hosts(on_hosts(graph.source(ticks)).map(slow, workers=4)).collect()
    assert run(graph, result) == list(range(40))

    graph = Graph("on_hosts")
    found = graph.source(ticks, on=POOL).map(slow, workers=4, on=POOL).collect()
    assert sorted(run(graph, found)) == list(range(40))


def test_callable_class_is_built_once_on_each_workers_host() -> None:
    class Named:
        def __init__(self) -> None:
            self.place = worker().host, worker().number

        def __call__(self, number: int) -> tuple[str, int]:
            return self.place

    graph = Graph("built")
    found = run(graph, graph.source(range(40)).map(Named, on=POOL, workers=2).collect())
    assert set(found) <= {("local-1", 1), ("local-2", 2)}


def test_source_generator_closes_on_its_host_when_readers_stop() -> None:
    def endless(closed: In[int], out: Out[int], outcomes: Out[str]) -> None:
        def numbers() -> Iterator[int]:
            number = 0
            try:
                while True:
                    yield (number := number + 1)
            finally:
                outcomes.put(worker().host)

        out.put_many(numbers())

    graph = Graph("endless")
    out, outcomes = graph.stage(endless, graph.source([]), on=POOL["local-2"], name="endless")
    taken, words = run(graph, on_hosts(out).take(5).collect(), outcomes.collect())
    assert (taken, words) == ([1, 2, 3, 4, 5], ["local-2"])
