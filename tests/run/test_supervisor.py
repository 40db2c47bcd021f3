"""Test what the supervisor asks of the crew and the channels, event by event.

The tests create neither processes nor channels, and the only thread is the supervisor's.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
from support.gangs import in_step
from support.scripted_crew import ScriptedChannels, ScriptedCrew, ScriptedRun, killed
from support.waiting import wait_until

from flowchan import Deadlock, Graph
from flowchan.run.policy import deadlock, decisions
from flowchan.run.policy.decisions import AbortRequested, StopRequested, Tick
from flowchan.run.policy.events import (
    Aborted,
    Crashed,
    Ended,
    Failure,
    ProcessEnded,
    Result,
    Retried,
    WorkerId,
)
from flowchan.run.policy.plan import Plan, plan
from flowchan.run.policy.scaling import Scale
from flowchan.run.supervisor import Supervisor

SOURCE, WORK, SINK = (WorkerId(name, 1) for name in ("source", "work", "sink"))


def planned(first: str = "source") -> Plan:
    graph = Graph("faked")
    numbers = graph.source([], name="source") if first == "source" else graph.input(name="source")
    numbers.map(abs, on="process", restarts=2, name="work").sink(abs, name="sink")
    return plan(graph, seed=1, memory=1 << 20)


@pytest.fixture
def run() -> ScriptedRun:
    return ScriptedRun(planned())


@pytest.fixture
def crew(run: ScriptedRun) -> ScriptedCrew:
    return run.crew


@pytest.fixture
def channels(run: ScriptedRun) -> ScriptedChannels:
    return run.channels


@pytest.fixture
def supervisor(run: ScriptedRun) -> Supervisor:
    return run.supervisor


def test_run_reports_each_event_from_start_to_end(crew: ScriptedCrew, supervisor: Supervisor) -> None:
    supervisor.start()
    for event in (Result("sink", 5), Retried(WORK), Ended(SOURCE), Ended(WORK, unwanted=2), Ended(SINK)):
        assert not supervisor.ended.is_set()
        supervisor.report(event)
    assert supervisor.ended.wait(60)
    assert crew.calls == [
        ("start",), *(("release", id) for id in (SOURCE, WORK, SINK)), ("close", frozenset()),
    ]  # fmt: skip
    assert supervisor.results == {"sink": 5}
    stats = supervisor.stats()
    assert (stats.state, stats.stages[1].retried, stats.stages[1].unwanted) == ("done", 1, 2)
    wait_until(lambda: not supervisor._thread.is_alive())  # type: ignore[union-attr]


def test_failed_start_of_a_run_is_undone(crew: ScriptedCrew, supervisor: Supervisor) -> None:
    crew.refuses = OSError("no process")
    with pytest.raises(OSError, match="no process"):
        supervisor.start()
    assert crew.calls == [("start",), ("break", None), ("kill",), ("close", frozenset())]


def test_internal_error_ends_the_run_and_is_reported(crew: ScriptedCrew, supervisor: Supervisor) -> None:
    error = KeyError("ours")
    supervisor.start()
    supervisor.report(Crashed(error))
    assert supervisor.ended.wait(60)
    assert supervisor.crashed is error
    all_workers = frozenset({SOURCE, WORK, SINK})
    assert crew.calls[1:] == [("break", error), ("kill",), ("close", all_workers)]


def test_failure_breaks_the_channels_and_ends_the_run(crew: ScriptedCrew, supervisor: Supervisor) -> None:
    error = ValueError("wrong")
    supervisor.turn(Failure(WORK, error, "7", 1))
    assert crew.calls == [("break", error), ("release", WORK)]
    supervisor.turn(Ended(SOURCE))
    supervisor.turn(Ended(SINK))
    assert supervisor.state.phase == "ended"
    assert [failure.error for failure in supervisor.state.failures] == [error]


def test_dead_worker_is_replaced_until_its_restarts_are_used(
    crew: ScriptedCrew, supervisor: Supervisor
) -> None:
    for _ in range(2):
        supervisor.turn(killed(WORK))
        assert crew.calls == [("replace", (WORK,), WORK, False)]
        assert supervisor.state.phase == "running"
        crew.calls.clear()
    supervisor.turn(killed(WORK))
    assert [call[0] for call in crew.calls] == ["break", "release"]
    assert str(supervisor.state.failures[0].error) == (
        "the process of worker work 1 was killed by SIGKILL; it is not replaced: "
        "2 of 2 restarts were used in 60 s"
    )


def test_replacement_pauses_when_its_item_has_killed_before(
    crew: ScriptedCrew, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "FIRST_PAUSE", 3600.0)
    monkeypatch.setattr(decisions, "LONGEST_PAUSE", 3600.0)
    supervisor.turn(killed(WORK, deaths=2))
    supervisor.turn(Tick())
    assert crew.calls == [("replace", (WORK,), WORK, True)]
    supervisor.turn(AbortRequested())  # the run does not wait for the replacement any more
    assert crew.calls[1:] == [("break", None), ("release", WORK)]


def test_gang_restarts_in_one_supervisor_turn_despite_slow_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Graph("faked")
    gang: dict[str, Any] = {"on": "process", "workers": 3, "restarts": 9, "restartable": True}
    graph.stage(in_step, graph.source([], name="source"), name="gang", **gang).collect()
    run = ScriptedRun(plan(graph, seed=1, memory=1 << 20))
    workers = tuple(WorkerId("gang", number) for number in (1, 2, 3))
    # the clock advances only here and at every call to the crew
    monkeypatch.setattr(time, "monotonic", lambda: float(turns + len(run.crew.calls)))
    turns = 0
    for worker in workers:
        run.supervisor.turn(killed(worker, deaths=9))
    assert run.crew.calls[-1] == ("replace", workers, workers[0], True)
    while not run.crew.called("start workers"):
        turns += 1
        run.supervisor.turn(Tick())
    assert run.crew.called("start workers") == [(workers,)]


def test_replacement_that_cannot_be_started_fails_the_run(crew: ScriptedCrew, supervisor: Supervisor) -> None:
    crew.refuses = OSError("no process")
    supervisor.turn(killed(WORK))
    assert crew.calls[-2:] == [("break", crew.refuses), ("release", WORK)]


def test_worker_is_added_to_a_stage_and_removed_again(crew: ScriptedCrew, supervisor: Supervisor) -> None:
    added = WorkerId(WORK.stage, 2)
    supervisor.turn(Scale(WORK.stage, 2))
    assert supervisor.stats().stages[1].workers == 2
    supervisor.turn(Scale(WORK.stage, 1))
    supervisor.turn(Ended(added))
    supervisor.turn(ProcessEnded(added))
    assert crew.calls == [("add", added), ("remove", added), ("release", added), ("forget", added)]
    assert supervisor.state.failures == ()


def test_worker_that_cannot_be_added_does_not_fail_the_run(
    crew: ScriptedCrew, supervisor: Supervisor
) -> None:
    crew.refuses = OSError("no process")
    supervisor.turn(Scale(WORK.stage, 2))
    assert "no process" in supervisor.stats().last_error
    assert supervisor.state.failures == ()
    assert supervisor.stats().stages[1].alive == 1


def test_process_that_reported_its_end_does_not_count_as_dead(
    crew: ScriptedCrew, supervisor: Supervisor
) -> None:
    supervisor.turn(Ended(WORK))
    supervisor.turn(ProcessEnded(WORK))
    assert crew.calls == [("release", WORK), ("forget", WORK)]
    assert supervisor.state.failures == ()


def test_stop_ends_the_sources_and_drains_the_other_stages(
    crew: ScriptedCrew, supervisor: Supervisor
) -> None:
    supervisor.turn(StopRequested())
    assert crew.calls == [("stop sources",)]
    assert supervisor.stats().state == "stopping"
    for id in (SOURCE, WORK, SINK):
        supervisor.turn(Ended(id))
    assert supervisor.stats().state == "stopped"


def test_stop_may_drop_the_queued_items(crew: ScriptedCrew, supervisor: Supervisor) -> None:
    supervisor.turn(StopRequested(finish_queued=False))
    assert crew.calls == [("stop sources",), ("drop queued",)]


@pytest.mark.parametrize(("host", "count_told"), [("", 0), ("far", 1024)])
def test_cancelling_requests_never_waits_for_the_supervisor(host: str, count_told: int) -> None:
    """The supervisor's queue is full, and only other hosts must learn of the cancellation."""
    plan_here = planned()
    plan_remote = tuple(dataclasses.replace(worker, host=host) for worker in plan_here.workers)
    supervisor = ScriptedRun(dataclasses.replace(plan_here, workers=plan_remote)).supervisor
    for question in range(1100):
        supervisor.cancel_request(question)
    assert len(supervisor._events) == count_told


def test_run_stops_its_sources_after_its_sinks_have_ended(crew: ScriptedCrew, supervisor: Supervisor) -> None:
    supervisor.turn(Ended(SINK))
    assert crew.calls == [("release", SINK), ("stop sources",)]
    assert supervisor.state.phase == "finishing"


def test_workers_that_do_not_end_are_terminated_and_killed(
    crew: ScriptedCrew, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "GRACE", 0.0)
    supervisor.turn(AbortRequested())
    for _ in range(3):
        supervisor.turn(Tick())
    assert crew.called("terminate") == [(WORK, False), (WORK, True)]
    supervisor.turn(killed(WORK))
    assert supervisor.state.failures == ()
    supervisor.turn(Tick())
    assert (supervisor.state.phase, supervisor.state.abandoned) == ("ended", {SOURCE, SINK})


def test_worker_that_broke_a_channel_is_blamed_once_it_reports(
    crew: ScriptedCrew, channels: ScriptedChannels, supervisor: Supervisor
) -> None:
    channels.broken_ones, crew.all_heard = ["source"], False
    supervisor.turn(Ended(SINK))
    assert crew.calls == []
    supervisor.turn(Aborted(WORK, "source", None, 1, at=1))
    crew.all_heard = True
    supervisor.turn(Tick())
    assert [call[0] for call in crew.calls] == ["break", "release"]
    (failure,) = supervisor.state.failures
    assert (failure.worker, failure.channel, str(failure.error)) == (WORK, "source", "cause of source")


def test_deadlocked_run_fails_with_the_reason(
    channels: ScriptedChannels, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlock, "STILL", 0.0)
    supervisor._deadlocks.next_at = 0.0
    all_workers = {"source": {"waiting_writers": 1, "waiting_readers": 1}, "work": {"waiting_readers": 1}}
    channels.counts = all_workers
    for moved in range(5):  # items move
        channels.moved = moved
        supervisor.turn(Tick())
    channels.counts = {"work": {"waiting_readers": 1}}  # the second worker is working
    supervisor.turn(Tick())
    supervisor.turn(Tick())
    assert supervisor.state.phase == "running"
    channels.counts = all_workers
    for _ in range(2):
        supervisor.turn(Tick())
    assert supervisor.state.phase == "failing"
    assert isinstance(supervisor.state.failures[0].error, Deadlock)


def test_full_unread_result_is_collected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = ScriptedRun(planned("input"))
    channels, supervisor = run.channels, run.supervisor
    monkeypatch.setattr(deadlock, "STILL", 0.0)
    supervisor._deadlocks.next_at = 0.0
    taken: list[frozenset[WorkerId]] = []
    supervisor.take_in = taken.append
    channels.unread = frozenset({SINK})
    channels.counts = {"work": {"waiting_writers": 1}}
    for _ in range(3):
        supervisor.turn(Tick())
    assert taken[0] == {SINK}
    assert supervisor.state.phase == "running"
