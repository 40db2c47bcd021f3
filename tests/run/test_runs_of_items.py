"""Test runs of items: a map between processes takes several items at once, but the user sees no
difference."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from typing import Any

import pytest
from runs import Gate, stage_of
from support.waiting import wait_until

from flowchan import Channel, Full, Graph

MANY: dict[str, Any] = {"on": "process", "capacity": 1024}
"""Options with which a worker finds many items at once."""


def sources(count: int) -> dict[str, Iterable[int]]:
    return {
        "range": range(count),
        "list": list(range(count)),
        "tuple": tuple(range(count)),
        "generator": (number for number in range(count)),
        "iterator": iter(range(count)),
    }


@pytest.mark.parametrize("source", sources(0))
@pytest.mark.parametrize(("workers", "ordered"), [(1, True), (2, True), (2, False)])
def test_map_passes_each_item_once(source: str, workers: int, ordered: bool) -> None:
    graph = Graph("once")
    numbers = graph.source(sources(20_000)[source], capacity=1024)
    result = numbers.map(lambda item: item, workers=workers, ordered=ordered, **MANY).collect()
    found = graph.run()[result]
    assert (found if ordered else sorted(found)) == list(range(20_000))


def test_slow_item_delays_no_other_item() -> None:
    """The slow item ends only after all other items have arrived."""
    gate, count = Gate(), 5_000
    graph = Graph("slow")
    numbers = graph.source(range(count), capacity=1024)
    result = numbers.map(
        lambda item: gate.wait(item) if item == 3_000 else item, workers=2, ordered=False, **MANY
    ).collect()
    with graph.start() as run:
        found = []
        for item in run.iter(result):
            found.append(item)
            if len(found) == count - 1:
                gate.open()
    assert sorted(found) == list(range(count))
    assert found[-1] == 3_000


@pytest.mark.parametrize("slow", [1_000, 50_000, 100_003])
def test_slow_item_lets_no_later_items_pass_those_behind_it(slow: int) -> None:
    """Items arrive without end. The slow item ends only after the items right behind it have arrived."""
    gate = Gate()
    graph = Graph("slow")
    numbers = graph.source(itertools.count(), capacity=1024)
    result = numbers.map(
        lambda item: gate.wait(item) if item == slow else item, workers=2, ordered=False, **MANY
    ).collect()
    behind = set(range(slow + 1, slow + 50))
    with graph.start() as run:
        for item in run.iter(result):
            behind.discard(item)
            if not behind:
                break
        gate.open()
        run.abort()


def test_item_counts_are_exact_inside_a_run() -> None:
    gate = Gate()
    graph = Graph("counts")
    numbers = graph.source(range(1_000), capacity=1024, name="numbers")
    result = numbers.map(lambda item: gate.wait(item) if item == 700 else item, name="work", **MANY).collect()
    with graph.start() as run:
        gate.wait_held()
        found = stage_of(run, "work")
        assert (found.items_in, found.items_out, found.in_hand) == (701, 700, 1)
        gate.open()
        assert run.wait()[result] == list(range(1_000))


def test_failed_items_leave_order_and_errors_intact() -> None:
    def work(item: int) -> int:
        if item % 7 == 3:
            raise ValueError(item)
        return item

    graph = Graph("failed")
    mapped = graph.source(range(5_000), capacity=1024).map(work, workers=2, **MANY)
    result, errors = mapped.collect(), mapped.errors.collect()
    results = graph.run()
    assert results[result] == [item for item in range(5_000) if item % 7 != 3]
    assert sorted(failed.item for failed in results[errors]) == list(range(3, 5_000, 7))


def test_items_of_different_kinds_keep_their_order() -> None:
    kinds: list[Any] = [1, "text", b"bytes" * 100, {"key": [1, 2]}, None, 1.5, (1, "two"), "x" * 5_000, 2**80]
    items = list(itertools.islice(itertools.cycle(kinds), 3_000))
    graph = Graph("kinds")
    result = graph.source(items, capacity=1024).map(lambda item: item, workers=2, **MANY).collect()
    assert graph.run()[result] == items


@pytest.mark.parametrize("items", [range(100), list(range(100)), itertools.repeat(1, 100)])
def test_put_many_counts_the_items_put_when_full(items: Any) -> None:
    channel: Channel[int] = Channel(40, across="processes")
    with pytest.raises(Full) as caught:
        channel.put_many(items, timeout=0)
    assert (caught.value.items_put, len(channel)) == (40, 40)


def test_put_many_leaves_the_rest_of_a_shared_iterator() -> None:
    channel: Channel[int] = Channel(40, across="processes")
    items = iter(range(100))
    with pytest.raises(Full):
        channel.put_many(items, timeout=0)
    assert list(items) == list(range(41, 100))


def test_get_many_ends_before_an_item_that_cannot_be_unpickled() -> None:
    channel: Channel[Any] = Channel(across="processes")
    channel.put_many([1, 2, 3, _Refuses(), 4, 5])
    channel.close()
    with channel.reader() as reader:
        assert reader.get_many(10) == [1, 2, 3]
        with pytest.raises(ZeroDivisionError):
            reader.get()


class _Refuses:
    def __reduce__(self) -> Any:
        return divmod, (1, 0)


def test_closed_output_ends_a_run_of_items_early() -> None:
    graph = Graph("early")
    numbers = graph.source(itertools.count(), capacity=1024)
    result = numbers.map(lambda item: item, workers=2, **MANY).take(500).collect()
    assert graph.run()[result] == list(range(500))


def test_collect_takes_items_that_do_not_fill_its_channel() -> None:
    gate = Gate()
    graph = Graph("few")
    numbers = graph.source(range(11), capacity=1024)
    mapped = numbers.map(lambda item: gate.wait(item) if item == 10 else item, **MANY)
    result = mapped.collect(name="few")
    with graph.start() as run:
        done = threading.Thread(target=run.wait)
        done.start()
        gate.wait_held()
        wait_until(lambda: stage_of(run, "few").items_in == 10)
        gate.open()
        done.join()
    assert run.wait()[result] == list(range(11))
