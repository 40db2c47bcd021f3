"""Test which cause a run reports for its speed.

The tests cover simple cases, and nine cases in which fractions of the whole run suggested the wrong cause.
Those nine run real graphs and check only which cause is named. Other tests pass snapshots to the pure
function, because a loaded machine could hide some effects.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.waiting import wait_until

from flowchan import Drained, Graph, In, Out, Run, RunStats, select
from flowchan.run.observe.causes import cause_of
from flowchan.run.observe.windows import between
from flowchan.run.policy.stats import Cause, EdgeStats, StageStats, WorkSeconds

MS = 0.001


def naps(ms: float) -> Callable[[Any], Any]:
    def nap(item: Any) -> Any:
        time.sleep(ms * MS)
        return item

    return nap


def counting() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


def burn(item: Any) -> Any:
    """Compute for about 2 ms while holding the interpreter lock."""
    ends = time.thread_time() + 2 * MS
    while time.thread_time() < ends:
        pass
    return item


def cause_in(run: Run, window: float, is_it: Callable[[Cause], bool]) -> Cause:
    """Return the cause in a window of this length, as soon as it is the expected cause."""
    found: list[Cause | None] = [None]

    def named() -> bool:
        before = run._supervisor._counters()
        time.sleep(window)
        found[0] = between(before, run._supervisor._counters()).cause
        return found[0] is not None and is_it(found[0])

    wait_until(named, what=lambda: f"{found[0]}\n{run.report()}")
    assert found[0] is not None
    return found[0]


def is_stage(name: str) -> Callable[[Cause], bool]:
    return lambda cause: (cause.kind, cause.stage) == ("bottleneck", name)


def is_kind(kind: str) -> Callable[[Cause], bool]:
    return lambda cause: cause.kind == kind


# --- snapshots ---


def load(
    name: str, work: float = 0.0, waits: float = 0.0, place: float = 0.0, turn: float = 0.0,
    cpu: float | None = 0.0, ready: float = 0.0, **values: Any,
) -> tuple[StageStats, WorkSeconds]:  # fmt: skip
    """Return a stage with a worker that spent these seconds in a window of one second."""
    worked = WorkSeconds(work + waits + place + turn, waits, place, turn, cpu, None if cpu is None else ready)
    whole = worked.working or 1.0
    known = {
        "kind": "map", "on": "thread", "workers": 1, "alive": 1, "items_in": 100, "items_out": 100,
        "failed": 0, "retried": 0, "restarts": 0, "unwanted": 0, "in_hand": 0, "rate": 100.0, "working": 1,
        "busy": work / whole, "waiting_input": waits / whole, "waiting_output": (place + turn) / whole,
        "waiting_turn": turn / whole,
    }  # fmt: skip
    return StageStats(name=name, **(known | values)), worked


def chain(*loads: tuple[StageStats, WorkSeconds], **edges: dict[str, Any]) -> Cause | None:
    """Return the cause for a chain of stages.

    ``edges`` maps the name of a stage to values for the channel after that stage.
    """
    stages = tuple(dataclasses.replace(stage, worked=worked) for stage, worked in loads)
    between_two = itertools.pairwise(stages)
    edges = tuple(
        dataclasses.replace(
            EdgeStats(one.name, one.name, other.name, "threads", 0, 64, 100, 100.0), **edges.get(one.name, {})
        )
        for one, other in between_two
    )
    stats = RunStats("graph", "running", 10.0, stages, edges, None, window=1.0)
    return cause_of(stats, cores=8, gil=True)


def kind_of(cause: Cause | None) -> tuple[str, str | None] | None:
    return None if cause is None else (cause.kind, cause.stage)


def test_busy_stage_is_the_bottleneck() -> None:
    found = chain(load("a", 0.3, place=0.7), load("b", 0.95, waits=0.05), load("c", 0.1, waits=0.9))
    assert kind_of(found) == ("bottleneck", "b")


def test_bottleneck_that_reaches_its_rate_limit_names_the_limit() -> None:
    limited = chain(load("a", 0.3, place=0.7), load("b", 1.0, rate=19.0, rate_limit=20.0))
    assert limited == Cause("bottleneck", "b", "its rate=20 allows no more items to start")
    slower = chain(load("a", 0.3, place=0.7), load("b", 1.0, rate=10.0, rate_limit=20.0))
    assert slower == Cause("bottleneck", "b", "its workers are busy 100 % of the time")


def test_slower_of_two_busy_stages_is_the_bottleneck() -> None:
    """Both stages are busy while the channel between them fills. Stage a takes 5 ms per item, and b 6 ms."""
    found = chain(load("a", 1.0, rate=200.0), load("b", 1.0, rate=166.0), load("c", 0.1, waits=0.9))
    assert kind_of(found) == ("bottleneck", "b")


def test_items_added_by_a_stage_count_for_later_stages() -> None:
    """For each input, stage a takes 5 ms and puts 10 items. Stage b takes 1 ms per item."""
    found = chain(
        load("source", 0.1, place=0.9, kind="source", items_in=0),
        load("a", 1.0, rate=200.0, items_out=1000),
        load("b", 1.0, rate=1000.0, items_in=1000),
        a={"passed": 1000},
    )
    assert kind_of(found) == ("bottleneck", "b")


def test_interpreter_lock_is_the_bottleneck_if_no_stage_is() -> None:
    burning = load("burn", 2.4, place=1.6, cpu=0.95, workers=4, working=4)
    assert kind_of(chain(burning, load("nap", 0.98, waits=0.02, cpu=0.01))) == ("gil", None)
    crowded = load("burn", 2.4, place=1.6, cpu=0.4, ready=0.5, workers=4, working=4)
    assert kind_of(chain(crowded, load("nap", 0.98, waits=0.02, cpu=0.01))) == ("gil", None)


def test_single_computing_thread_is_the_bottleneck() -> None:
    found = chain(load("burn", 0.98, waits=0.02, cpu=0.97), load("nap", 0.3, waits=0.7, cpu=0.01))
    assert kind_of(found) == ("bottleneck", "burn")


def test_use_of_all_cores_is_named_as_the_cause() -> None:
    burning = load("burn", 7.9, waits=0.1, cpu=7.8, on="process", workers=8, working=8)
    assert kind_of(chain(burning, load("end", 0.1, waits=0.9))) == ("cores", None)


def test_waiting_for_a_core_is_named_as_the_cause() -> None:
    waiting = load("burn", 3.9, waits=0.1, cpu=1.4, ready=2.5, on="process", workers=4, working=4)
    assert kind_of(chain(waiting, load("end", 0.1, waits=0.9))) == ("cores", None)


def test_channel_without_free_memory_is_named_as_the_cause() -> None:
    found = chain(load("a", 0.2, place=0.8), load("b", 0.2, waits=0.8), a={"short_of_bytes": True})
    assert kind_of(found) == ("memory", "a")


def test_stage_without_a_ready_worker_is_reported_as_starting() -> None:
    found = chain(load("a", 0.01, place=0.99), load("b", working=0, rate=0.0, items_in=0))
    assert kind_of(found) == ("starting", "b")


def test_idle_run_has_no_cause() -> None:
    found = chain(load("in", kind="input", working=0, rate=0.0), load("b", 0.0, waits=1.0, rate=0.0))
    assert found is None


def test_ordering_is_the_bottleneck_if_outputs_wait_for_earlier_items() -> None:
    found = chain(load("a", 3.0, turn=5.0, workers=8, working=8), load("b", 0.1, waits=0.9))
    assert kind_of(found) == ("order", "a")


def test_full_channel_with_waiting_reader_is_reported_as_order() -> None:
    """The channel is full of later outputs, while its reader waits for an earlier output."""
    ordered, waits = load("a", 2.0, place=4.0, turn=2.0, workers=8, working=8), {"waiting_readers": 1}
    later = load("b", 0.1, waits=0.9)
    assert kind_of(chain(ordered, later, a=waits | {"waiting_writers": 4})) == ("order", "a")
    assert kind_of(chain(ordered, later, a=waits)) != ("order", "a")


def test_order_cause_names_item_that_holds_up_others() -> None:
    """The reader has taken 40 outputs and waits for output 41. Later outputs are already in the channel."""
    ordered = load("a", 3.0, turn=5.0, workers=8, working=8, items_in=48, items_out=46)
    waits = {"readers_waiting_for": 2.345, "passed": 40}
    found = chain(ordered, load("b", 0.1, waits=0.9), a=waits)
    assert found is not None
    assert "; item 41 has held them up for 2.3 s; " in found.why
    failed = load("a", 3.0, turn=5.0, workers=8, working=8, failed=2)
    unknown = chain(failed, load("b", 0.1, waits=0.9), a=waits)
    assert unknown is not None
    assert "held" not in unknown.why
    short = chain(ordered, load("b", 0.1, waits=0.9), a={"readers_waiting_for": 0.01})
    assert short is not None
    assert "held" not in short.why


# --- the nine cases ---


def test_bottleneck_changes_when_another_stage_becomes_slow() -> None:
    """Case 1: another stage becomes slow during the run."""
    phase = threading.Event()

    def first(item: int) -> int:
        if not phase.is_set():
            time.sleep(2 * MS)
        return item

    def second(item: int) -> int:
        if phase.is_set():
            time.sleep(2 * MS)
        return item

    graph = Graph("phases")
    graph.source(counting, capacity=4).map(first, name="a", capacity=4).map(second, name="b").sink(abs)
    with graph.start() as run:
        cause_in(run, 0.3, is_stage("a"))
        assert run.stats().elapsed > 0.3
        phase.set()
        wait_until(lambda: run.stats(window=0.5).bottleneck == "b")
        run.abort()


def test_stage_is_the_bottleneck_while_most_of_its_workers_start() -> None:
    """Case 2: three of four workers are still loading a model."""
    loaded, turns = threading.Event(), iter([True])

    class Model:
        def __init__(self) -> None:
            if not next(turns, False):
                loaded.wait()

        def __call__(self, item: int) -> int:
            time.sleep(5 * MS)
            return item

    graph = Graph("starting")
    items = graph.source(counting, capacity=4).map(Model, workers=4, name="model")
    items.map(naps(2), name="post").sink(abs)
    with graph.start() as run:
        found = cause_in(run, 0.3, is_stage("model"))
        assert "3 of 4 have not started to work" in found.why
        loaded.set()
        run.abort()


def test_slowest_stage_is_the_bottleneck_while_channels_fill() -> None:
    """Case 3: all stages before the slowest of ten stages are as busy as that stage."""
    graph = Graph("filling")
    stream = graph.source(counting)
    for number in range(10):
        stream = stream.map(naps(10 if number == 8 else 5), name=f"s{number}", capacity=10_000)
    stream.sink(abs)
    with graph.start() as run:
        cause_in(run, 0.4, is_stage("s8"))
        run.abort()


@pytest.mark.parametrize("on", ["thread", "process"])
def test_ordering_is_the_bottleneck_if_item_times_vary(on: Any) -> None:
    """Case 4: the items take different amounts of time."""
    graph = Graph("ordered")
    numbers = graph.source(counting, capacity=16)
    numbers.map(varied, workers=8, name="s0", capacity=2, on=on).sink(abs)
    with graph.start() as run:
        found = cause_in(run, 0.4, is_kind("order"))
        assert found.stage == "s0"
        stage = next(stage for stage in run.stats().stages if stage.name == "s0")
        assert stage.seconds.turn > stage.seconds.place
        run.abort()


def test_order_cause_names_blocked_item_of_real_run() -> None:
    gate = threading.Event()
    graph = Graph("held up")
    numbers = graph.source(range(100))

    def held(number: int) -> int:
        if number == 10:
            gate.wait()
        return number

    numbers.map(held, workers=4, name="s0").sink(abs)
    with graph.start() as run:
        found = cause_in(run, 0.4, lambda cause: cause.kind == "order" and "held" in cause.why)
        gate.set()
    assert found.stage == "s0"
    assert "; item 11 has held them up for " in found.why


def varied(item: int) -> int:
    time.sleep(random.expovariate(1 / (10 * MS)))
    return item


@pytest.mark.parametrize("nap", [True, False])
def test_interpreter_lock_is_the_bottleneck_if_threads_compute(nap: bool) -> None:
    """Cases 5 and 6: with and without a stage that sleeps after the stage that computes."""
    graph = Graph("burning")
    stream = graph.source(counting, capacity=4).map(burn, workers=4, name="burn", capacity=4)
    (stream.map(naps(1), name="nap") if nap else stream).sink(abs)
    with graph.start() as run:
        cause_in(run, 0.5, is_kind("gil"))
        run.abort()


def test_input_is_the_bottleneck_if_the_program_puts_slowly() -> None:
    """Case 7: the program puts items more slowly than the stage processes them."""
    graph = Graph("input")
    numbers = graph.input(name="numbers")
    numbers.map(naps(1), name="work").sink(abs)
    with graph.start() as run:
        stop = threading.Event()

        def put() -> None:
            while not stop.wait(20 * MS):
                run[numbers].put(1)

        putting = threading.Thread(target=put)
        putting.start()
        found = cause_in(run, 0.4, is_kind("input"))
        stop.set()
        putting.join()
        assert found.stage == "numbers"


def test_program_is_the_bottleneck_if_it_reads_slowly() -> None:
    """Case 8: the program reads items more slowly than the graph produces them."""
    graph = Graph("consumer")
    result = graph.source(counting, capacity=4).map(naps(1), name="work", capacity=4).collect()
    with graph.start() as run:
        found: list[RunStats] = []
        for _ in run.iter(result):
            time.sleep(20 * MS)
            stats = run.stats(window=0.5)
            if stats.cause is not None and stats.cause.kind == "consumer" and stats.elapsed > 1:
                found.append(stats)
                break
        run.abort()
    assert found[0].cause is not None
    assert "the program" in found[0].cause.why


def test_loop_is_the_bottleneck_if_it_admits_few_items() -> None:
    """Case 9: the loop admits two items at a time, but has two stages with four workers each."""

    def steer(fresh: In[int], again: In[int], work: Out[int], done: Out[int]) -> None:
        under_way = 0
        while True:
            try:
                taken = select([again] if under_way == 2 else [fresh, again])
            except Drained:
                return
            if taken.channel is again:
                under_way -= 1
                done.put(taken.item)
            else:
                under_way += 1
                work.put(taken.item)

    graph = Graph("loop")
    again = graph.feedback("again")
    work, done = graph.stage(steer, graph.source(counting), again, name="steer")
    again.feed(work.map(naps(4), workers=4, name="p").map(naps(4), workers=4, name="q"))
    done.sink(abs)
    with graph.start() as run:
        cause_in(run, 0.4, is_kind("in_flight"))
        run.abort()
