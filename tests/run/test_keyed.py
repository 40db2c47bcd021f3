"""Test keyed stages: order per key, parallel keys, state per key and ``concurrency_per_key``."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from typing import Any

import pytest
from runs import everywhere, stage_of

from flowchan import Graph, KeyedState, RunError, hosts, worker

ITEMS, KEYS = 200, 23


def key_of(item: tuple[str, int]) -> str:
    return item[0]


def items(keys: int = KEYS) -> list[tuple[str, int]]:
    return [(f"key {number % keys}", number) for number in range(ITEMS)]


def where(item: tuple[str, int]) -> tuple[str, int, int]:
    return (*item, worker().number)


async def where_async(item: tuple[str, int]) -> tuple[str, int, int]:
    await asyncio.sleep(0)
    return where(item)


def unordered(rows: list[tuple[str, int, int]]) -> dict[str, list[int]]:
    found = defaultdict(list)
    for key, number, _ in rows:
        found[key].append(number)
    return found


@everywhere
@pytest.mark.parametrize("ordered", [True, False])
def test_items_with_equal_keys_go_to_one_worker_in_order(on: Any, ordered: bool) -> None:
    graph = Graph()
    out = graph.source(items()).map(where, on=on, workers=3, key=key_of, ordered=ordered).collect()
    rows = graph.run()[out]
    workers = defaultdict(set)
    for key, _, number in rows:
        workers[key].add(number)
    assert all(len(numbers) == 1 for numbers in workers.values())
    assert set.union(*workers.values()) == {1, 2, 3}
    if ordered:
        assert [row[:2] for row in rows] == items()
    for key, numbers in unordered(rows).items():
        assert numbers == [number for one, number in items() if one == key]


def test_coroutines_process_one_item_of_a_key_at_a_time() -> None:
    running: dict[str, int] = defaultdict(int)
    most: dict[str, int] = defaultdict(int)

    async def process(item: tuple[str, int]) -> tuple[str, int]:
        running[item[0]] += 1
        most[item[0]] = max(most[item[0]], running[item[0]])
        await asyncio.sleep(0)
        running[item[0]] -= 1
        return item

    graph = Graph()
    out = graph.source(items()).map(process, workers=5, key=key_of).collect()
    assert graph.run()[out] == items()
    assert set(most.values()) == {1}


def test_different_keys_are_processed_in_parallel() -> None:
    both = threading.Barrier(2)

    def meet(key: int) -> int:
        both.wait(30)
        return key

    graph = Graph()
    out = graph.source([0, 1]).map(meet, workers=2, key=int).collect()
    assert graph.run()[out] == [0, 1]


@everywhere
def test_flat_map_filter_and_sink_accept_a_key(on: Any) -> None:
    graph = Graph()
    source = graph.source(items())
    twice = source.flat_map(lambda item: [item, item], on=on, workers=3, key=key_of)
    kept = twice.filter(lambda item: item[1] % 3, on=on, workers=3, key=key_of)
    first, second = kept.tee(2)
    out = first.collect()
    second.sink(where, on=on, workers=3, key=key_of)
    expected = [item for item in items() for _ in range(2) if item[1] % 3]
    assert graph.run()[out] == expected


@everywhere
def test_failed_items_leave_no_gap_in_the_order(on: Any) -> None:
    def inverse(item: tuple[str, int]) -> float:
        return 1 / (item[1] % 5)

    graph = Graph()
    numbers = graph.source(items()).map(inverse, on=on, workers=3, key=key_of)
    out, failed = numbers.collect(), numbers.errors.map(lambda failed: failed.item).collect()
    results = graph.run()
    assert results[out] == [1 / (number % 5) for _, number in items() if number % 5]
    assert sorted(results[failed]) == sorted(item for item in items() if item[1] % 5 == 0)


@everywhere
def test_key_that_fails_makes_its_item_fail(on: Any) -> None:
    graph = Graph()
    out = graph.source([(1,), (), (2,)]).map(len, on=on, workers=2, key=lambda item: item[0], name="work")
    good, bad = out.collect(), out.errors.collect()
    results = graph.run()
    assert results[good] == [1, 1]
    assert [(failed.item, type(failed.error)) for failed in results[bad]] == [((), IndexError)]


class Unreadable:
    """Item that cannot be unpickled."""

    def __reduce__(self) -> Any:
        return int, ("x",)


@everywhere
def test_item_that_cannot_be_unpickled_fails_in_the_keyed_stage(on: Any) -> None:
    graph = Graph()
    made = graph.source(range(6)).map(lambda number: Unreadable() if number == 3 else number, on="process")
    out = made.map(str, on=on, workers=2, key=int)
    good, bad = out.collect(), out.errors.collect()
    results = graph.run()
    assert results[good] == ["0", "1", "2", "4", "5"]
    assert [type(failed.error) for failed in results[bad]] == [ValueError]


@pytest.mark.parametrize("workers", [1, 2])
def test_unhashable_key_names_the_stage_and_the_key(workers: int) -> None:
    graph = Graph()
    graph.source([1]).map(str, workers=workers, key=lambda item: [item], name="work").collect()
    with pytest.raises(RunError) as raised:
        graph.run()
    assert "stage 'work': key must return hashable values" in str(raised.value.exceptions[0])
    assert "got [1]" in str(raised.value.exceptions[0])


@everywhere
@pytest.mark.parametrize("workers", [1, 3])
def test_state_belongs_to_its_key(on: Any, workers: int) -> None:
    def count(item: tuple[str, int], state: KeyedState[int]) -> tuple[str, int]:
        state.value += 1
        return state.key, state.value

    graph = Graph()
    out = graph.source(items()).map(count, on=on, workers=workers, key=key_of, state=int).collect()
    assert graph.run()[out] == [(key, 1 + number // KEYS) for key, number in items()]


@pytest.mark.usefixtures("_method")
def test_state_works_under_each_start_method() -> None:
    def count(item: tuple[str, int], state: KeyedState[int]) -> int:
        state.value += 1
        return state.value

    graph = Graph()
    out = graph.source(items()).map(count, on="process", workers=2, key=key_of, state=int).collect()
    assert graph.run()[out] == [1 + number // KEYS for _, number in items()]


def test_coroutine_gets_the_state_of_its_key() -> None:
    async def add(item: tuple[str, int], state: KeyedState[int]) -> int:
        await asyncio.sleep(0)
        state.value += 1
        return state.value

    graph = Graph()
    out = graph.source(items()).map(add, workers=3, key=key_of, state=int).collect()
    assert graph.run()[out] == [1 + number // KEYS for _, number in items()]


@everywhere
def test_call_that_raises_leaves_the_state_unchanged(on: Any) -> None:
    def append(item: int, state: KeyedState[list[int]]) -> list[int]:
        state.value.append(item)
        if item % 2:
            raise ValueError(item)
        return list(state.value)

    graph = Graph()
    lists = graph.source(range(5)).map(append, on=on, key=lambda item: 0, state=list, retries=1)
    out, failed = lists.collect(), lists.errors.collect()
    results = graph.run()
    assert results[out] == [[0], [0, 2], [0, 2, 4]]
    assert [one.item for one in results[failed]] == [1, 3]


@everywhere
def test_flat_map_stores_the_state_after_its_last_output(on: Any) -> None:
    def number(item: str, state: KeyedState[int]) -> Any:
        for _ in range(2):
            state.value += 1
            yield item, state.value

    graph = Graph()
    out = graph.source("aab").flat_map(number, on=on, key=str, state=int).collect()
    assert graph.run()[out] == [("a", 1), ("a", 2), ("a", 3), ("a", 4), ("b", 1), ("b", 2)]


@everywhere
def test_cleared_state_starts_again(on: Any) -> None:
    def count(item: int, state: KeyedState[int]) -> int:
        state.value += 1
        count = state.value
        if count == 3:
            state.clear()
        return count

    graph = Graph()
    out = graph.source(range(7)).map(count, on=on, key=lambda item: None, state=int).collect()
    assert graph.run()[out] == [1, 2, 3, 1, 2, 3, 1]


@everywhere
def test_state_starts_empty_in_each_run(on: Any) -> None:
    def count(item: int, state: KeyedState[int]) -> int:
        state.value += 1
        return state.value

    graph = Graph()
    out = graph.source(range(3)).map(count, on=on, key=lambda item: 0, state=int).collect()
    with graph.pool() as pool:
        assert pool.run()[out] == [1, 2, 3]
        assert pool.run()[out] == [1, 2, 3]


def test_state_that_cannot_be_pickled_makes_its_item_fail() -> None:
    def keep(item: int, state: KeyedState[Any]) -> int:
        state.value = threading.Lock()
        return item

    graph = Graph()
    graph.source([1]).map(keep, key=int, state=int, name="work").collect()
    with pytest.raises(RunError) as raised:
        graph.run()
    assert "pickle" in str(raised.value.exceptions[0])


def test_keyed_state_keeps_change_if_result_cannot_be_sent() -> None:
    def count(number: int, total: KeyedState[int]) -> Any:
        total.value += number
        return threading.Lock() if number == 2 else total.value

    graph = Graph()
    stage = graph.source([1, 2, 4]).map(count, on="process", key=lambda number: "all", state=int)
    totals, failed = stage.collect(), stage.errors.collect()
    results = graph.run()
    assert results[totals] == [1, 7]
    assert [one.item for one in results[failed]] == [2]


@everywhere
@pytest.mark.parametrize("limit", [1, 2, 4])
def test_concurrency_per_key_limits_the_workers_of_a_key(on: Any, limit: int) -> None:
    graph = Graph()
    rows = (
        graph.source(items(3)).map(where, on=on, workers=6, key=key_of, concurrency_per_key=limit).collect()
    )
    found = graph.run()[rows]
    assert [row[:2] for row in found] == items(3)
    for key in {row[0] for row in found}:
        assert len({number for one, _, number in found if one == key}) == limit


def test_concurrency_per_key_limits_coroutines() -> None:
    running, most = 0, 0

    async def process(item: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return item

    graph = Graph()
    out = graph.source(range(100)).map(process, workers=10, key=lambda item: "all", concurrency_per_key=3)
    result = out.collect()
    assert graph.run()[result] == list(range(100))
    assert most == 3


def test_asked_items_pass_through_a_keyed_stage() -> None:
    async def ask(run: Any, stream: Any) -> list[Any]:
        return await asyncio.gather(*(run.ask(stream, item) for item in items()[:20]))

    graph = Graph()
    requests = graph.input()
    requests.map(where, workers=3, key=key_of).sink(lambda row: row)
    with graph.start() as run:
        answers = asyncio.run(ask(run, requests))
    assert [row[:2] for row in answers] == items()[:20]


def test_report_shows_the_stage_that_routes_items() -> None:
    graph = Graph()
    graph.source(items()).map(where, workers=3, key=key_of).collect()
    run = graph.start()
    run.wait()
    assert stage_of(run, "where by key").items_out == ITEMS


def test_keyed_stage_keeps_its_number_of_workers() -> None:
    graph = Graph()
    source = graph.input()
    source.map(where, workers=3, key=key_of).sink(print)
    with graph.start() as run, pytest.raises(ValueError, match="key="):
        run.scale("where", 4)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"state": int}, TypeError, "state requires key"),
        ({"concurrency_per_key": 2}, TypeError, "concurrency_per_key requires key"),
        ({"key": 3}, TypeError, "key must be a function"),
        ({"key": where_async}, TypeError, "key must be a function that is not async"),
        (
            {"key": int, "state": int, "concurrency_per_key": 2},
            ValueError,
            "must be 1 if the stage has state, got 2",
        ),
        ({"key": int, "concurrency_per_key": 0}, ValueError, "concurrency_per_key must be"),
        ({"key": int, "state": 3}, TypeError, "state must be a function"),
        (
            {"key": int, "state": int, "on": hosts.local(2)},
            ValueError,
            "state requires on='thread' or on='pro",
        ),
        ({"key": int, "workers": 0}, ValueError, "workers must be"),
        ({"kye": int}, TypeError, "did you mean 'key'"),
    ],
)
def test_wrong_keyed_option_raises_at_the_declaration(options: Any, error: Any, match: str) -> None:
    graph = Graph()
    source = graph.source([1])
    with pytest.raises(error, match=match):
        source.map(str, **options)
    assert len(graph.stages) == 1
