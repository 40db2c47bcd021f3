"""Test that keyed stages keep their order and exact states when workers are killed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Hashable, Iterator

import pytest
from kill_points import Deaths, stage_of
from support.waiting import wait_until

from flowchan import Graph, KeyedState, worker
from flowchan.run.worker import state_log
from flowchan.run.worker.state_log import KeyedStates, StateLog


def pairs(items: int, keys: int = 5) -> list[tuple[int, int]]:
    return [(item % keys, item) for item in range(items)]


def of_key(found: list[tuple[int, int]], key: int) -> list[tuple[int, int]]:
    return [item for item in found if item[0] == key]


@pytest.mark.parametrize("spread", [1, 2])
@pytest.mark.parametrize("ordered", [True, False])
def test_each_output_of_a_keyed_stage_appears_once(spread: int, ordered: bool) -> None:
    deaths = Deaths(0, 7, 8, 9, 59)

    def dies(item: tuple[int, int]) -> tuple[int, int]:
        deaths.at(item[1])
        return item

    graph = Graph()
    source = graph.source(pairs(60))
    out = source.map(
        dies, on="process", workers=3, key=lambda item: item[0], concurrency_per_key=spread, ordered=ordered
    ).collect()
    run = graph.start()
    found = run.wait()[out]
    assert sorted(found) == sorted(pairs(60))
    if ordered:
        assert found == pairs(60)
    if spread == 1:
        assert all(of_key(found, key) == of_key(pairs(60), key) for key in range(5))
    assert stage_of(run, "dies").restarts == deaths.total


def kill_at_random(item: int, seed: int) -> None:
    """Kill this process at one of about a thousand calls. A call that a new worker repeats may be killed
    again."""
    if random.Random(f"{seed} {item} {worker().incarnation}").random() < 0.001:
        os.kill(os.getpid(), signal.SIGKILL)


def count(item: tuple[int, int], state: KeyedState[int]) -> tuple[int, int]:
    kill_at_random(item[1], 0)
    state.value += 1
    kill_at_random(item[1], 1)
    return item[0], state.value


def assert_counted(found: list[tuple[int, int]], items: int) -> None:
    seen: Counter[int] = Counter()
    for key, number in found:
        seen[key] += 1
        assert number == seen[key]
    assert sum(seen.values()) == items


@pytest.mark.parametrize(("workers", "items"), [(1, 5_000), (3, 20_000)])
def test_counter_per_key_is_exact_despite_random_kills(workers: int, items: int, long_walk: bool) -> None:
    graph = Graph()
    items *= 5 if long_walk else 1
    out = graph.source(pairs(items, 97)).map(
        count, on="process", workers=workers, key=lambda item: item[0], state=int, restarts=10**6
    )  # fmt: skip
    result = out.collect()
    run = graph.start()
    assert_counted(run.wait()[result], items)
    assert stage_of(run, "count").restarts > 0


def add(item: tuple[int, int], state: KeyedState[int]) -> tuple[int, int]:
    state.value += 1
    return item[0], state.value


def test_counter_per_key_is_exact_despite_kills_at_arbitrary_instructions() -> None:
    """Kill workers from outside, even while they write a record, put an output or end a lease."""
    graph, chance, kills = Graph(), random.Random(0), 0

    def paced() -> Iterator[tuple[int, int]]:
        for number, pair in enumerate(pairs(12_000, 97)):
            wait_until(lambda: number < 2000 + 500 * kills)  # noqa: B023 - the run must outlive the kills
            yield pair

    def killed() -> bool:
        """Kill a worker. Return False if both workers are being replaced."""
        pids = stage_of(run, "add").pids
        with contextlib.suppress(ProcessLookupError):
            if pids:
                os.kill(chance.choice(pids), signal.SIGKILL)
        return bool(pids)

    added = graph.source(paced()).map(
        add, on="process", workers=2, key=lambda item: item[0], state=int, restarts=10**6
    )  # fmt: skip
    result = added.collect()
    run = graph.start()
    for kills in range(20):
        wait_until(lambda: stage_of(run, "add").items_in > 500 * kills)  # noqa: B023
        wait_until(killed)
    kills = 20
    assert_counted(run.wait()[result], 12_000)
    assert stage_of(run, "add").restarts >= 10


@pytest.mark.parametrize("max_deaths", [1, 2])
def test_item_that_fails_after_deaths_leaves_the_state_unchanged(max_deaths: int) -> None:
    def dies(item: int, state: KeyedState[int]) -> int:
        state.value += 1
        if item == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return state.value

    graph = Graph()
    numbers = graph.source(range(10)).map(
        dies, on="process", key=lambda item: 0, state=int, max_deaths=max_deaths
    )  # fmt: skip
    out, failed = numbers.collect(), numbers.errors.map(lambda failed: failed.item).collect()
    results = graph.run()
    assert results[out] == [*range(1, 10)]
    assert results[failed] == [5]


class FakeReader:
    def __init__(self, number: int) -> None:
        self._number = number


def states(log: StateLog, number: int) -> KeyedStates:
    (stage,) = (stage for stage in GRAPH.stages if stage.name == "add")
    return KeyedStates(stage, log, FakeReader(number))  # type: ignore[arg-type]


GRAPH = Graph()
GRAPH.source([(0, 0)]).map(add, key=lambda item: item[0], state=int).sink(print)


def add_at(keyed: KeyedStates, number: int, key: Hashable) -> int:
    keyed._reader._number = number  # type: ignore[misc]
    state = keyed.begin(key)
    state.value += 1
    keyed.commit(state)
    return int(state.value)


def test_replacement_removes_the_record_of_its_first_item() -> None:
    log = StateLog()
    first = states(log, 0)
    assert [add_at(first, number, "a") for number in range(3)] == [1, 2, 3]
    assert add_at(states(log, 2), 2, "a") == 3
    assert add_at(states(log, 3), 3, "a") == 4


def test_replacement_ignores_a_record_that_was_cut_off() -> None:
    whole = StateLog()
    keyed = states(whole, 0)
    add_at(keyed, 0, "a")
    complete = keyed._end
    add_at(keyed, 1, "a")
    data = os.pread(whole.files[0].fd, keyed._end, 0)
    for end in range(complete, keyed._end):
        log = StateLog()
        os.pwrite(log.files[0].fd, data[:end], 0)
        assert add_at(states(log, 1), 1, "a") == 2


def test_log_with_outdated_records_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_log, "MIN_COMPACTED_BYTES", 1_000)
    log = StateLog()
    keyed = states(log, 0)
    sizes = []
    for number in range(1_000):
        assert add_at(keyed, number, number % 3) == number // 3 + 1
        sizes.append(sum(os.fstat(file.fd).st_size for file in log.files))
        if number % 100 == 99:  # a replacement finds the same states, however often they were copied
            keyed = states(log, number + 1)
    assert max(sizes) < 1_200


def test_worker_killed_during_a_copy_leaves_the_old_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_log, "MIN_COMPACTED_BYTES", 1_000)
    log = StateLog()
    keyed = states(log, 0)
    number = 0
    while keyed._end <= 1_000:
        add_at(keyed, number, number % 3)
        number += 1
    write, left = os.pwrite, 2

    def dies(fd: int, data: bytes, offset: int) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return write(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", dies)
    with pytest.raises(KeyboardInterrupt):
        add_at(keyed, number, number % 3)
    monkeypatch.undo()
    replacement = states(log, number)
    assert [add_at(replacement, number + one, key) for one, key in enumerate([0, 1, 2])] == [
        len(range(key, number, 3)) + 1 for key in range(3)
    ]
