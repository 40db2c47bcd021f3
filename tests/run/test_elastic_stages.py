"""Test R13: stages that process one item at a time get more or fewer workers while the graph runs."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from runs import Gate, everywhere, stage_of
from support.waiting import wait_until

from flowchan import Channel, Graph, In, Out, Run, hosts, worker
from flowchan.run.crew import local_part
from flowchan.run.policy.decisions import (
    StopRequested,
    decide,
)
from flowchan.run.policy.events import Ended, WorkerId
from flowchan.run.policy.scaling import AddWorker, RemoveWorker, Scale, Size
from flowchan.run.policy.transitions import (
    PolicyState,
)


def alive(run: Run, stage: str, number: int) -> None:
    """Wait until the stage has this many workers."""
    wait_until(lambda: stage_of(run, stage).alive == number, what=run.report)


class Feeder(threading.Thread):
    """Thread that puts items into an input until ``end`` is called."""

    def __init__(self, run: Run, stream: Any) -> None:
        super().__init__()
        self._out, self._over = run[stream], threading.Event()
        self.put = 0
        self.start()

    def run(self) -> None:
        while not self._over.is_set():
            self._out.put(self.put)
            self.put += 1
        self._out.close()

    def end(self) -> int:
        self._over.set()
        self.join()
        return self.put


@everywhere
@pytest.mark.parametrize("workers", [1, 3])
def test_map_keeps_order_while_workers_are_added_and_removed(on: Any, workers: int) -> None:
    graph = Graph("scaled")
    numbers = graph.input("numbers", capacity=8)
    out = numbers.map(lambda item: item + 1, on=on, workers=workers, capacity=8, name="work").collect()
    with graph.start() as run:
        feeder = Feeder(run, numbers)
        for wanted in (2, 5, 1, 4, 2):
            run.scale("work", wanted)
            alive(run, "work", wanted)
            taken = stage_of(run, "work").items_out
            wait_until(lambda taken=taken: stage_of(run, "work").items_out > taken + 50)  # type: ignore[misc]
        number = feeder.end()
        assert run.wait()[out] == list(range(1, number + 1))
    assert stage_of(run, "work").items_in == stage_of(run, "work").items_out == number


@everywhere
@pytest.mark.parametrize("ordered", [True, False])
def test_elastic_operators_neither_lose_nor_repeat_items(on: Any, ordered: bool) -> None:
    seen: Channel[int] = Channel(10**6, across="processes")
    graph = Graph("scaled")
    numbers = graph.input("numbers", capacity=8)
    kept = numbers.filter(lambda item: item % 3 > 0, on=on, ordered=ordered, name="filter")
    twice = kept.flat_map(lambda item: [item, -item], on=on, ordered=ordered, name="flat_map")
    same = twice.map(lambda item: item, on=on, ordered=ordered, name="map")
    even, odd = same.partition(abs, 2, on=on, name="partition")
    odd.sink(seen.put, on=on, name="sink")
    out = even.collect()
    with graph.start() as run:
        feeder = Feeder(run, numbers)
        for wanted in (3, 1, 2):
            for stage in ("filter", "flat_map", "map", "partition", "sink"):
                run.scale(stage, wanted)
            for stage in ("filter", "flat_map", "map", "partition", "sink"):
                alive(run, stage, wanted)
        number = feeder.end()
        found = run.wait()[out]
    seen.close()
    expected = [one for item in range(number) if item % 3 for one in (item, -item)]
    evens = [item for item in expected if item % 2 == 0]
    assert found == evens if ordered else Counter(found) == Counter(evens)
    assert Counter(seen) == Counter(item for item in expected if item % 2)


@everywhere
def test_new_worker_works_while_the_first_is_blocked(on: Any) -> None:
    """The output for the first worker's current item must still come first."""
    gate = Gate()

    def work(item: int) -> tuple[int, int]:
        if item == 3:
            gate.wait()
        return item, worker().number

    graph = Graph("scaled")
    out = graph.source(range(20)).map(work, on=on, name="work").collect()
    with graph.start() as run:
        gate.wait_held()
        run.scale("work", 2)
        wait_until(lambda: stage_of(run, "work").items_in == 20, what=run.report)
        gate.open()
        found = run.wait()[out]
    assert [item for item, _ in found] == list(range(20))
    assert [number for _, number in found] == [1] * 4 + [2] * 16


@everywhere
def test_removed_worker_finishes_its_item_and_takes_no_more_items(on: Any) -> None:
    gate = Gate()

    def work(item: int) -> tuple[int, int]:
        if item < 3:
            gate.wait()
        return item, worker().number

    graph = Graph("scaled")
    out = graph.source(range(30)).map(work, on=on, workers=3, name="work").collect()
    with graph.start() as run:
        gate.wait_held(3)
        run.scale("work", 1)
        leaving = [run._ports.ports[WorkerId("work", number)].inputs["items"] for number in (2, 3)]
        wait_until(lambda: all(port._retired for port in leaving))
        gate.open()
        found = run.wait()[out]
    assert [item for item, _ in found] == list(range(30))
    assert {number for item, number in found if item >= 3} == {1}


@everywhere
def test_idle_workers_are_removed_at_once(on: Any) -> None:
    graph = Graph("scaled")
    numbers = graph.input("numbers")
    out = numbers.map(lambda item: item, on=on, workers=4, name="work").collect()
    with graph.start() as run:
        wait_until(lambda: run._ports.channels["numbers"].stats().waiting_readers == 4)
        run.scale("work", 1)
        alive(run, "work", 1)
        assert run._ports.channels["numbers"].stats().waiting_readers == 1
        run[numbers].put(7)
        run[numbers].close()
        assert run.wait()[out] == [7]


@everywhere
def test_second_worker_keeps_order_although_the_first_is_idle(on: Any) -> None:
    graph = Graph("scaled")
    numbers = graph.input("numbers")
    out = numbers.map(lambda item: item, on=on, name="work").collect()
    with graph.start() as run:
        run[numbers].put_many(range(10))
        wait_until(lambda: run._ports.channels["numbers"].stats().waiting_readers == 1)
        run.scale("work", 2)
        alive(run, "work", 2)
        run[numbers].put_many(range(10, 200))
        run[numbers].close()
        assert run.wait()[out] == list(range(200))


@everywhere
def test_items_put_one_at_a_time_arrive_after_scaling(on: Any) -> None:
    """Each item is put only after the last output has arrived, so no output may be held back."""
    graph = Graph("scaled")
    numbers = graph.input("numbers")
    out = numbers.filter(lambda item: item % 2 == 0, on=on, name="work").collect()
    with graph.start() as run:
        answers = run.iter(out)
        for wanted in (1, 2, 1, 3):
            run.scale("work", wanted)
            alive(run, "work", wanted)
            for item in range(20):
                run[numbers].put(item)
                if item % 2 == 0:
                    assert next(answers) == item
        run[numbers].close()
        assert list(answers) == []


@everywhere
def test_worker_numbers_are_not_reused(on: Any) -> None:
    graph = Graph("scaled")
    numbers = graph.input("numbers")
    out = numbers.map(lambda item: worker().number, on=on, name="work").collect()
    with graph.start() as run:
        for wanted in (3, 1, 2):
            run.scale("work", wanted)
            alive(run, "work", wanted)
        run.scale("work", 1)
        alive(run, "work", 1)
        run[numbers].put(None)
        run[numbers].close()
        assert run.wait()[out] == [1]
    assert run._supervisor.state.sizes["work"].last == 4


@everywhere
def test_removed_workers_release_their_resources_while_the_run_continues(on: Any) -> None:
    graph = Graph("scaled")
    numbers = graph.input("numbers")
    numbers.map(lambda item: item, on=on, name="work").collect()
    with graph.start() as run:
        for _ in range(5):
            run.scale("work", 3)
            alive(run, "work", 3)
            run.scale("work", 1)
            alive(run, "work", 1)
        of_work = lambda known: [id for id in known if id.stage == "work"]  # noqa: E731
        wait_until(lambda: len(of_work(run._crew.local.processes)) <= 1)
        assert len(of_work(run._ports.ports)) == 1
        assert run._ports.channels["numbers"].stats().readers == 1


def test_callable_class_is_closed_when_its_worker_is_removed() -> None:
    closed: list[int] = []

    class Work:
        def __call__(self, item: int) -> int:
            return item

        def close(self) -> None:
            closed.append(worker().number)

    graph = Graph("scaled")
    numbers = graph.input("numbers")
    numbers.map(Work, workers=2, name="work").collect()
    with graph.start() as run:
        run.scale("work", 1)
        alive(run, "work", 1)
        assert closed == [2]


@everywhere
def test_worker_with_requests_is_removed_without_closing_its_input(on: Any) -> None:
    async def main() -> list[int]:
        graph = Graph("scaled")
        numbers = graph.input("numbers")
        numbers.map(lambda item: 2 * item, on=on, workers=3, name="work").collect()
        with graph.start() as run:
            first = await run.ask(numbers, 1)
            run.scale("work", 1)
            while stage_of(run, "work").alive > 1:
                await asyncio.sleep(0.001)
            return [first, await run.ask(numbers, 2)]

    assert asyncio.run(main()) == [2, 4]


def test_errors_from_added_workers_reach_the_errors_stream() -> None:
    graph = Graph("scaled")
    numbers = graph.input("numbers")
    halves = numbers.map(lambda item: 1 // (item % 2), on="process", name="work")
    failed, out = halves.errors.collect(), halves.collect()
    with graph.start() as run:
        feeder = Feeder(run, numbers)
        run.scale("work", 3)
        alive(run, "work", 3)
        number = feeder.end()
        results = run.wait()
    assert len(results[out]) + len(results[failed]) == number


def test_scaling_of_an_ended_stage_or_run_does_nothing() -> None:
    gate = Gate()
    graph = Graph("scaled")
    first = graph.source(range(3)).map(lambda item: item, name="first")
    out = first.map(gate.wait, name="second").collect()
    with graph.start() as run:
        alive(run, "first", 0)
        run.scale("first", 4)
        run.scale("second", 2)
        alive(run, "second", 2)
        gate.open()
        run.wait()
    run.scale("second", 3)
    assert run.wait()[out] == [0, 1, 2]
    assert stage_of(run, "first").workers == 1


def test_stopped_run_gets_workers_for_items_in_flight() -> None:
    gate = Gate()
    graph = Graph("scaled")
    out = graph.source(iter(int, 1)).map(gate.wait, name="work").collect()
    with graph.start() as run:
        gate.wait_held()
        run.stop()
        run.scale("work", 3)
        alive(run, "work", 3)
        gate.open()
        assert set(run.wait()[out]) == {0}


def test_worker_that_cannot_be_started_does_not_affect_other_workers(monkeypatch: Any) -> None:
    graph = Graph("scaled")
    numbers = graph.input("numbers")
    out = numbers.map(lambda item: item, on="process", name="work").collect()
    with graph.start() as run:

        def refused(*_: Any) -> None:
            raise OSError("no processes left")

        monkeypatch.setattr(local_part.LocalPart, "_start_process", refused)
        run.scale("work", 2)
        wait_until(lambda: "no processes left" in run.stats().last_error)
        alive(run, "work", 1)
        run[numbers].put_many(range(10))
        run[numbers].close()
        assert run.wait()[out] == list(range(10))


@everywhere
def test_statistics_include_all_workers_of_a_scaled_stage(on: Any) -> None:
    gate = Gate()
    graph = Graph("scaled")
    graph.source(range(8)).sink(gate.wait, on=on, name="work")
    with graph.start() as run:
        gate.wait_held()
        run.scale("work", 4)
        gate.wait_held(4)
        now = stage_of(run, "work")
        assert (now.workers, now.alive, now.in_hand) == (4, 4, 4)
        assert 0 <= now.busy <= 1
        gate.open()
    assert stage_of(run, "work").items_out == 8


def general(numbers: In[int], out: Out[int]) -> None:
    for number in numbers:
        out.put(number)


async def late(item: int) -> int:
    return item


def fixed() -> Iterator[tuple[str, Any]]:
    yield "a source", lambda graph: graph.source(range(3), name="it").collect()
    yield "a batch", lambda graph: graph.source(range(3)).batch(2, name="it").collect()
    yield "a stage", lambda graph: graph.stage(general, graph.source(range(3)), name="it").collect()
    yield "a map with an async def function", lambda graph: graph.source([1]).map(late, name="it").collect()
    yield "a map with an output or input for each worker", _per_worker


def _per_worker(graph: Graph) -> None:
    graph.source(range(3)).map(abs, name="it", workers=2).allreduce("sum").collect()


@pytest.mark.parametrize(("what", "declare"), list(fixed()))
def test_scale_rejects_stages_with_a_fixed_number_of_workers(what: str, declare: Any) -> None:
    graph = Graph("fixed")
    declare(graph)
    with graph.start() as run, pytest.raises(ValueError, match=what) as raised:
        run.scale("it", 2)
    assert str(raised.value) == (
        "run.scale: the number of workers of stage 'it' cannot change, because the stage is "
        f"{what}; set workers= when you declare it"
    )


def test_scale_rejects_stages_on_hosts() -> None:
    graph = Graph("fixed")
    graph.source(range(3)).map(abs, on=hosts.local(1), name="it").collect()
    with graph.start() as run, pytest.raises(ValueError, match="the stage is a map on hosts"):
        run.scale("it", 2)


def test_scale_rejects_processes_of_a_pool() -> None:
    graph = Graph("fixed")
    graph.source(range(3)).map(abs, on="process", name="it").collect()
    with graph.pool() as pool, pool.start() as run, pytest.raises(ValueError, match="processes of a pool"):
        run.scale("it", 2)


def test_scale_reports_wrong_arguments() -> None:
    graph = Graph("fixed")
    squares = graph.source(range(3)).map(abs, name="it")
    squares.collect()
    with graph.start() as run:
        with pytest.raises(KeyError, match="no stage named 'other'"):
            run.scale("other", 2)
        with pytest.raises(KeyError, match="is not a stage of graph 'fixed'"):
            run.scale(Graph("another").source([1]), 2)
        with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
            run.scale(squares, 0)


# --- decisions ---

ONE, TWO, THREE = (WorkerId("work", number) for number in (1, 2, 3))
SINK = WorkerId("sink", 1)


def running(*workers: WorkerId, last: int) -> PolicyState:
    ids = frozenset(workers)
    size = Size(len(workers), since=10.0, last=last)
    return PolicyState(ids | {SINK}, ids, frozenset(), frozenset({SINK}), sizes={"work": size})


def test_scale_adds_workers_with_new_numbers() -> None:
    state, actions = decide(running(ONE, last=2), Scale("work", 3), 12.0)
    assert actions == (AddWorker(THREE), AddWorker(WorkerId("work", 4)))
    assert state.alive == {SINK, ONE, THREE, WorkerId("work", 4)}
    assert state.processes == state.alive - {SINK}
    assert state.sizes["work"] == Size(3, 12.0, 4, spent=2.0)


def test_scale_removes_the_workers_with_the_highest_numbers() -> None:
    state, actions = decide(running(ONE, TWO, THREE, last=3), Scale("work", 1), 12.0)
    assert actions == (RemoveWorker(TWO), RemoveWorker(THREE))
    assert state.alive == {SINK, ONE, TWO, THREE}
    state, _ = decide(state, Ended(THREE), 13.0)
    assert state.leaving == {TWO}
    state, actions = decide(state, Scale("work", 2), 14.0)  # workers that are being removed are not counted
    assert actions == (AddWorker(WorkerId("work", 4)),)


def test_scale_does_nothing_once_the_run_or_the_stage_ends() -> None:
    ended = running(last=1)
    assert decide(ended, Scale("work", 2), 12.0) == (ended, ())
    stopping, _ = decide(running(ONE, last=1), StopRequested(), 11.0)
    assert decide(stopping, Scale("work", 2), 12.0)[1] == (AddWorker(TWO),)
    finishing, _ = decide(running(ONE, last=1), Ended(SINK), 11.0)
    assert decide(finishing, Scale("work", 2), 12.0)[1] == ()
