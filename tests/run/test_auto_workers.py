"""Test stages with ``workers="auto"``: how a run scales them, and where ``auto`` is refused."""

from __future__ import annotations

import logging
import math
import re
import select as waiting_for
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from runs import everywhere, stage_of
from support.waiting import wait_until

from flowchan import Graph, GraphError, In, Run, RunStats, ScalingDecision, auto, hosts
from flowchan.run import auto_scaler
from flowchan.run.policy import autoscale
from flowchan.run.policy.autoscale import Chosen, Scaler, Trial


def same(item: int) -> int:
    return item


def slow(item: int) -> int:
    waiting_for.select([], [], [], 0.02)
    return item


async def later(item: int) -> int:
    return item


@pytest.fixture
def decide(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Scaler, RunStats], dict[str, int]]], None]:
    """Return a function that replaces the scaling policy with a callback that runs after each window."""

    def replace(chosen: Callable[[Scaler, RunStats], dict[str, int]]) -> None:
        def choose(scaler: Scaler, stats: RunStats, *_: Any) -> Chosen:
            before = {stage.name: stage.workers for stage in stats.stages}
            made = tuple(
                ScalingDecision(stats.elapsed, name, before[name], number, "test")
                for name, number in chosen(scaler, stats).items()
            )
            trial = Trial(dict.fromkeys((one.stage for one in made), 1), {}, True, ()) if made else None
            return Scaler(scaler.limits, trial, decisions=scaler.decisions + made), made

        monkeypatch.setattr(auto_scaler, "choose", choose)

    monkeypatch.setattr(auto_scaler, "WINDOW_S", 0.0)
    monkeypatch.setattr(autoscale, "WINDOW_S", 0.0)
    monkeypatch.setattr(autoscale, "LEAST_ITEMS", 0)
    return replace


def begun(run: Run, stage: str, number: int) -> None:
    """Wait until the stage has this many workers and all of them have begun."""

    def reached() -> bool:
        now = stage_of(run, stage)
        return (now.workers, now.alive, now.working) == (number,) * 3

    wait_until(reached, what=run.report)


# --- real decisions ---


@everywhere
def test_slow_auto_stage_starts_with_one_worker_and_gains_more(on: Any) -> None:
    graph = Graph("auto")
    out = graph.source(range(100_000)).map(slow, on=on, workers=auto(most=4), name="work").collect()
    with graph.start() as run:
        assert stage_of(run, "work").workers == 1
        wait_until(lambda: stage_of(run, "work").working > 1, what=run.report)
        assert [decision.workers_before for decision in run.decisions()][:1] == [1]
        run.stop(finish_queued=False)
        found = run.wait()[out]
    assert found == list(range(len(found)))


def test_run_without_auto_stages_makes_no_decisions() -> None:
    graph = Graph("fixed")
    graph.source(range(3)).map(same, workers=2).sink(hash)
    run = graph.start()
    run.wait()
    assert run._supervisor.scaler.next_at == math.inf
    assert run.decisions() == []


# --- decisions made by the test ---


@everywhere
def test_decision_changes_the_number_of_workers(on: Any, decide: Any) -> None:
    wanted = {"work": 3}
    decide(lambda scaler, stats: {name: n for name, n in wanted.items() if stats.stages[1].workers != n})
    graph = Graph("auto")
    numbers = graph.input()
    out = numbers.map(same, on=on, workers="auto", name="work").collect()
    with graph.start() as run:
        begun(run, "work", 3)
        wanted["work"] = 1
        begun(run, "work", 1)
        run[numbers].put_many(range(10))
        run[numbers].close()
        assert run.wait()[out] == list(range(10))
    assert [(one.workers_before, one.workers) for one in run.decisions()] == [(1, 3), (3, 1)]


def test_next_window_starts_after_new_workers_have_begun(decide: Any) -> None:
    """No stage is measured while one of its workers is still building the callable."""
    gate, seen = threading.Event(), []

    class Late:
        def __init__(self) -> None:
            if decided.is_set():
                gate.wait()

        def __call__(self, item: int) -> int:
            return item

    decided = threading.Event()

    def chosen(scaler: Scaler, stats: RunStats) -> dict[str, int]:
        seen.append(stats.stages[1].starting)
        if decided.is_set():
            return {}
        decided.set()
        return {"work": 2}

    decide(chosen)
    graph = Graph("auto")
    numbers = graph.input()
    numbers.map(Late, workers="auto", name="work").sink(hash)
    with graph.start() as run:
        wait_until(lambda: stage_of(run, "work").starting == 1)
        gate.set()
        wait_until(lambda: len(seen) > 1)
    assert seen[1] == 0


def test_run_can_end_during_a_decision(decide: Any) -> None:
    """The stage has already ended when the decision is made."""
    over, closed = threading.Event(), threading.Event()

    class Sink:
        def __call__(self, item: int) -> None:
            pass

        def close(self) -> None:
            over.set()

    def chosen(scaler: Scaler, stats: RunStats) -> dict[str, int]:
        closed.set()
        over.wait()
        return {"work": 4}

    decide(chosen)
    graph = Graph("auto")
    numbers = graph.input()
    numbers.map(same, workers="auto", name="work").sink(Sink)
    with graph.start() as run:
        run[numbers].put_many(range(10))
        closed.wait()
    assert (run.state, stage_of(run, "work").items_out) == ("done", 10)


@everywhere
@pytest.mark.parametrize("end", ["stop", "abort"])
def test_stopping_or_aborting_while_scaling_leaves_no_workers(on: Any, end: str, decide: Any) -> None:
    decide(lambda scaler, stats: {"work": 1 + stats.stages[1].workers % 4})
    graph = Graph("auto")
    graph.source(iter(int, 1)).map(slow, on=on, workers="auto", name="work").sink(hash)
    run = graph.start()
    wait_until(lambda: len(run.decisions()) > 3)
    getattr(run, end)()
    run.wait()
    assert run.state == {"stop": "stopped", "abort": "aborted"}[end]
    assert stage_of(run, "work").alive == 0


def test_auto_stage_keeps_number_set_by_run_scale() -> None:
    graph = Graph("auto")
    numbers = graph.input()
    numbers.map(slow, workers="auto", name="work").sink(hash)
    with graph.start() as run:
        run.scale("work", 3)
        begun(run, "work", 3)
        (decision,) = run.decisions()
        assert (decision.workers_before, decision.workers, decision.outcome) == (1, 3, "pinned")
        assert "work" not in run._supervisor.scaler._scaler.limits


def test_scaling_decisions_are_logged_and_sent_to_subscribers(
    decide: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flowchan.run")
    decide(lambda scaler, stats: {} if scaler.decisions else {"work": 2})
    graph = Graph("auto")
    numbers = graph.input()
    numbers.map(same, workers="auto", name="work").sink(hash)
    events: list[Any] = []
    with graph.start() as run, run.subscribe(events=events.append):
        wait_until(lambda: any(isinstance(event, ScalingDecision) for event in events))
    assert [event for event in events if isinstance(event, ScalingDecision)] == run.decisions()
    record = next(one for one in caplog.records if "workers 1 → 2" in one.getMessage())
    assert (record.levelno, record.stage) == (logging.INFO, "work")  # type: ignore[attr-defined]
    assert record.getMessage() == "stage 'work': workers 1 → 2: test"


def test_report_shows_worker_counts_over_time(decide: Any) -> None:
    steps = {1: 2, 2: 4}
    decide(lambda scaler, stats: {"work": steps[n]} if (n := stats.stages[1].workers) in steps else {})
    graph = Graph("auto")
    numbers = graph.input()
    numbers.map(same, workers="auto", name="work").sink(hash)
    with graph.start() as run:
        begun(run, "work", 4)
    assert "workers of work: 1 → 2 → 4\n" in run.report()


# --- limits ---


def limit_of(**options: Any) -> autoscale.AutoLimit:
    graph = Graph("auto")
    graph.source([1]).map(same, name="work", **options).collect()
    run = graph.start()
    run.wait()
    return run._supervisor.scaler._scaler.limits["work"]


def test_auto_maximum_defaults_to_32_threads() -> None:
    assert limit_of(workers="auto").most == limit_of(workers=auto()).most == 32


def test_auto_maximum_of_processes_defaults_to_number_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_scaler, "local_cores", lambda: 5)
    assert limit_of(workers="auto", on="process").most == 5


def test_stages_given_the_same_auto_object_share_its_limit() -> None:
    graph, limit = Graph("auto"), auto(most=8)
    first = graph.source([1]).map(same, name="first", workers=limit).map(same, name="second", workers=limit)
    first.map(same, name="third", workers=auto(most=8)).collect()
    run = graph.start()
    run.wait()
    limits = run._supervisor.scaler._scaler.limits
    assert limits["first"] == limits["second"] != limits["third"]


def test_resident_memory_is_measured_only_for_process_stages() -> None:
    graph = Graph("auto")
    numbers = graph.input()
    numbers.map(same, workers="auto", on="process", name="apart").map(
        same, workers="auto", name="here"
    ).collect()
    with graph.start() as run:
        begun(run, "apart", 1)
        memory = run._supervisor.scaler._memory(run.stats())
    assert memory.resident.keys() == {"apart"}
    assert memory.resident["apart"] > 10**6
    assert not math.isinf(memory.free)


# --- refusals ---

NEEDS = "requires a map, filter, flat_map, partition or sink on threads or processes, got"


def declared() -> Any:
    graph = Graph("refused")
    return graph, graph.source(range(3))


def refusals() -> Iterator[tuple[Callable[[Any], Any], str]]:
    got = f"map: workers='auto' {NEEDS} a map"
    yield lambda stream: stream.map(later, workers="auto"), f"{got} with an async def function"
    yield lambda stream: stream.map(same, workers="auto", on="hosts"), f"{got} on hosts; set a number"
    yield lambda stream: stream.map(same, workers="auto", on="process", gpus=1), f"{got} with gpus=1 for each"
    yield lambda stream: stream.map(same, workers="auto", on=hosts.local(1)), f"{got} on hosts"
    yield lambda stream: stream.sink(same, workers=auto(most=2), on="hosts"), "sink: workers=auto(most=2) req"
    yield lambda stream: stream.map(same, workers="auto", key=abs), "map: key requires a fixed number of"
    yield (
        lambda stream: stream.graph.stage(ports, stream, workers="auto"),
        f"stage: workers='auto' {NEEDS} a st",
    )
    yield (
        lambda stream: stream.map(same, workers="all"),
        "map: workers must be an int, 'auto' or auto(most=…)",
    )
    yield lambda stream: stream.map(same, workers=auto(most=0)), "auto: most must be at least 1, got 0"


def ports(numbers: In[int]) -> None:
    pass


@pytest.mark.parametrize(("declare", "message"), list(refusals()))
def test_auto_is_refused_if_number_of_workers_cannot_change(declare: Any, message: str) -> None:
    _, stream = declared()
    with pytest.raises(ValueError, match=re.escape(message)):
        declare(stream)


def test_auto_maximum_must_be_an_int() -> None:
    with pytest.raises(TypeError, match=r"auto: most must be an int of at least 1, got 2\.5"):
        auto(most=2.5)  # type: ignore[arg-type]


def test_check_reports_auto_stage_before_allreduce() -> None:
    graph, stream = declared()
    stream.map(same, workers="auto", name="work").allreduce("sum").collect()
    (problem,) = graph.check()
    assert (problem.rule, problem.stage) == ("workers", "work")
    assert "got a map with an output or input for each worker; set a number of workers" in problem.message


def test_pool_refuses_auto_for_its_processes() -> None:
    graph, stream = declared()
    stream.map(same, workers="auto", on="process", name="work").collect()
    with graph.pool() as pool, pytest.raises(GraphError, match="workers='auto' is not possible"):
        pool.run()


def test_pool_allows_auto_for_threads() -> None:
    graph, stream = declared()
    out = stream.map(same, workers="auto").collect()
    with graph.pool() as pool:
        assert pool.run()[out] == [0, 1, 2]


def test_check_counts_channel_ports_for_maximum_number_of_workers() -> None:
    graph, stream = declared()
    stream.map(same, workers=auto(most=5000), on="process", name="work").collect()
    assert [problem.rule for problem in graph.check()] == ["limit", "limit"]
