"""Large items for a stage with keys stay on their host until the host of the key's worker fetches them."""

from __future__ import annotations

import collections
import datetime
import os
import time
from pathlib import Path
from traceback import format_exception
from typing import Any

import pytest
from hosted import agents, wait_ended, workers_of
from kept_items import SIZE, CheckAndKill, MakeAndKill, check, driver_bytes, make
from support.waiting import wait_until

from flowchan import Graph, RunError, _core
from flowchan.hosts import local
from flowchan.hosts.kept_outputs import keeps_outputs
from flowchan.run.policy.plan import plan

KEYS = 7


def key_of(item: bytes) -> int:
    return len(item) % KEYS


def day_of(item: bytes) -> datetime.date:
    """Return a key whose hash differs from process to process."""
    return datetime.date(2026, 1, 1 + key_of(item))


def seen(item: bytes) -> tuple[int, int, int]:
    """Return the item's key and size, and the process that handles it."""
    return key_of(item), len(item), os.getpid()


def mixed(number: int) -> bytes:
    """Make a small item from an even number, and a large one from an odd number."""
    return bytes(number + number % 2 * SIZE)


@pytest.mark.parametrize("ordered", [True, False])
def test_large_items_for_keyed_stage_do_not_pass_through_driver(ordered: bool) -> None:
    graph, pool = Graph("keyed"), local(3)
    made = graph.source(range(60)).map(make, on=pool, workers=3)
    checked = made.map(check, on=pool, workers=3, key=key_of, ordered=ordered).collect()
    with graph.start() as run:
        result = run.wait()[checked]
        assert (result if ordered else sorted(result)) == list(range(60))
        assert driver_bytes(run) < 60 * SIZE / 4
    assert _core._references() == 0


def test_large_items_for_keyed_sink_do_not_pass_through_driver(tmp_path: Path) -> None:
    graph, pool = Graph("sink"), local(2)
    made = graph.source(range(40)).flat_map(lambda number: [make(number)], on=pool, workers=2)
    made.sink(lambda item: (tmp_path / str(check(item))).touch(), on=pool, workers=2, key=key_of)
    with graph.start() as run:
        run.wait()
        assert driver_bytes(run) < 40 * SIZE / 4
    assert {int(path.name) for path in tmp_path.iterdir()} == set(range(40))


def test_keyed_stage_on_hosts_gives_results_of_threads() -> None:
    results = []
    for on in ("thread", local(3)):
        graph = Graph("same")
        made = graph.source(range(200)).map(mixed, on=on, workers=3)
        results.append((graph, made.map(len, on=on, workers=3, key=key_of).collect()))
    first, second = (graph.run()[lengths] for graph, lengths in results)
    assert first == second


@pytest.mark.parametrize(("chosen", "per_key"), [(key_of, 1), (key_of, 2), (day_of, 1)])
def test_small_and_large_items_of_a_key_share_its_worker(chosen: Any, per_key: int) -> None:
    graph, pool = Graph("owners"), local(3)
    made = graph.source(range(210)).map(mixed, on=pool, workers=3)
    options: Any = {"key": chosen, "concurrency_per_key": per_key, "ordered": False}
    handled = made.map(seen, on=pool, workers=3, **options).collect()
    workers, sizes = collections.defaultdict(set), collections.defaultdict(list)
    for key, size, worker in graph.run()[handled]:
        workers[key].add(worker)
        sizes[key].append(size)
    assert {len(of_key) for of_key in workers.values()} == {per_key}
    assert chosen is day_of or len(set.union(*workers.values())) == 3
    expected = collections.defaultdict(list)
    for item in map(mixed, range(210)):
        expected[key_of(item)].append(len(item))
    if per_key == 1:
        assert sizes == expected


@pytest.mark.any_value
@pytest.mark.parametrize("agent", [True, False], ids=["agents", "workers"])
@pytest.mark.parametrize("ordered", [True, False])
def test_keyed_items_are_handled_once_although_hosts_die(tmp_path: Path, ordered: bool, agent: bool) -> None:
    graph, pool = Graph("deaths"), local(3)
    (tmp_path / "made").mkdir()
    (tmp_path / "checked").mkdir()
    killing_make = MakeAndKill(tmp_path / "made", frozenset({17, 60, 95}), agent)
    killing_check = CheckAndKill(tmp_path / "checked", frozenset({30, 33, 80}), agent)
    made = graph.source(range(120)).map(killing_make, on=pool, workers=3)
    options: Any = {"key": key_of, "ordered": ordered}
    checked = made.map(killing_check, on=pool, workers=3, **options).collect()
    result = graph.run()[checked]
    of_key = [[number for number in result if (number + SIZE) % KEYS == key] for key in range(KEYS)]
    assert sorted(result) == list(range(120))
    assert of_key == list(map(sorted, of_key))
    assert not ordered or result == sorted(result)
    assert len(list((tmp_path / "made").iterdir())) == 3
    assert len(list((tmp_path / "checked").iterdir())) == 3


@pytest.mark.parametrize("options", [{}, {"key": key_of}], ids=["plain", "keyed"])
def test_items_lost_after_their_maker_has_ended_are_recreated(tmp_path: Path, options: Any) -> None:
    graph, pool = Graph("late"), local(2)
    first, second = pool.provider.hosts
    made = graph.source(range(20)).map(make, on=pool.assigned((first,)))
    handle = WaitForFile(tmp_path / "go")
    checked = made.map(handle, on=pool.assigned((second,)), workers=2, **options).collect()
    with graph.start() as run:
        agent = agents()[0]
        wait_until(lambda: run.stats().stages[1].items_out == 20 and not workers_of(agent))
        agent.kill()
        wait_ended(agent)
        (tmp_path / "go").touch()
        assert run.wait()[checked] == list(range(20))


class WaitForFile:
    """Checks items as soon as a file exists."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, item: bytes) -> int:
        while not self.path.exists():
            time.sleep(0.01)
        return check(item)


def test_keyed_reader_that_ends_early_ends_its_maker() -> None:
    graph, pool = Graph("early"), local(2)
    made = graph.source(range(1000)).map(make, on=pool, workers=2)
    checked = made.map(check, on=pool, workers=2, key=key_of).take(5).collect()
    assert graph.run()[checked] == list(range(5))
    assert _core._references() == 0


def test_failed_run_releases_items_between_keyed_workers() -> None:
    graph, pool = Graph("fails"), local(2)
    made = graph.source(range(1000)).map(make, on=pool, workers=2)
    made.sink(fail_at_twenty, on=pool, workers=2, key=key_of)
    with pytest.raises(RunError) as failed:
        graph.run()
    assert "twenty" in "".join(format_exception(failed.value))
    assert _core._references() == 0


def fail_at_twenty(item: bytes) -> None:
    if check(item) == 20:
        raise ValueError("twenty")


def test_item_without_key_fails_in_the_keyed_stage() -> None:
    graph, pool = Graph("keyless"), local(2)
    made = graph.source(range(20)).map(make, on=pool, workers=2)
    checked = made.map(check, on=pool, workers=2, key=key_or_error)
    numbers, failed = checked.collect(), checked.errors.collect()
    result = graph.run()
    assert result[numbers] == [number for number in range(20) if number != 3]
    assert [str(one.error) for one in result[failed]] == ["no key"]


def key_or_error(item: bytes) -> int:
    if len(item) == SIZE + 3:
        raise ValueError("no key")
    return key_of(item)


def test_stage_before_keyed_stage_keeps_outputs_only_in_its_pool() -> None:
    graph, pool = Graph("which"), local(2)
    source = graph.source(range(4))
    source.map(make, on=pool, name="kept").map(check, on=pool, workers=2, key=key_of, name="keyed").collect()
    source.map(make, on=pool, name="for threads").map(check, workers=2, key=key_of).collect()
    source.map(make, on=pool, name="elsewhere").map(check, on=local(1), workers=2, key=key_of).collect()
    planned = plan(graph._blueprint(), 0, 0)
    workers = {one.id: one for one in planned.workers}
    of_pool = {id for id in workers if id.stage in ("kept", "keyed", "for threads", "elsewhere")}
    assert {id.stage for id in of_pool if keeps_outputs(planned, workers[id], of_pool)} == {"kept"}
