"""Test whole runs with a scripted crew, so that no process is started.

Each run has its supervisor's thread, as in a real run. The script reports the events that workers would
report, and reacts to the supervisor's calls.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from support.gangs import in_step
from support.scripted_crew import ScriptedChannels, ScriptedCrew, ScriptedRun, killed

from flowchan import Deadlock, Graph, Interrupted, MemberDied, Run, RunError
from flowchan.run import run as run_module
from flowchan.run.observe.report import render
from flowchan.run.policy import deadlock, decisions
from flowchan.run.policy.actions import BreakChannels
from flowchan.run.policy.decisions import AbortRequested, Decided, StopRequested
from flowchan.run.policy.events import Death, Ended, Failure, ProcessEnded, Result, Warned, WorkerId
from flowchan.run.policy.plan import Plan, plan
from flowchan.run.supervisor import Supervisor

SOURCE, WORK, SINK = ALL = tuple(WorkerId(name, 1) for name in ("source", "work", "sink"))
GANG = tuple(WorkerId("gang", number) for number in (1, 2, 3))


def pipeline(**options: Any) -> Plan:
    graph = Graph("scripted")
    numbers = graph.source([], name="source")
    numbers.map(abs, on="process", name="work", **options).sink(abs, name="sink")
    return plan(graph, seed=1, memory=1 << 20)


def with_gang(**options: Any) -> Plan:
    graph = Graph("scripted")
    gang: dict[str, Any] = {"on": "process", "workers": 3, "restartable": True, **options}
    graph.stage(in_step, graph.source([], name="source"), name="gang", **gang).sink(abs, name="sink")
    return plan(graph, seed=1, memory=1 << 20)


def follow(run: ScriptedRun) -> list[Decided]:
    """Return a list that collects the run's decisions, except ticks that change nothing."""
    found: list[Decided] = []

    def receive(event: Any) -> None:
        if isinstance(event, Decided) and (event.actions or event.after is not event.before):
            found.append(event)

    run.supervisor.feed.listen(receive)
    return found


def ended(supervisor: Supervisor) -> str:
    """Wait until a run has ended, and return its state."""
    assert supervisor.wait(60)
    assert supervisor.crashed is None
    return supervisor.stats().state


def test_run_without_failures_is_done() -> None:
    run = ScriptedRun(pipeline())
    run.supervisor.start()
    run.crew.report(Result("sink", 5))
    run.crew.end_all(*ALL)
    assert ended(run.supervisor) == "done"
    assert run.supervisor.results == {"sink": 5}
    assert run.crew.calls == [
        ("start",), *(("release", id) for id in ALL), ("close", frozenset()),
    ]  # fmt: skip


def test_start_that_fails_leaves_no_run() -> None:
    run = ScriptedRun(pipeline())
    run.crew.refuses = OSError("no process")
    with pytest.raises(OSError, match="no process"):
        run.supervisor.start()
    assert run.crew.calls == [("start",), ("break", None), ("kill",), ("close", frozenset())]


def test_item_failure_breaks_the_channels_and_fails_the_run() -> None:
    run = ScriptedRun(pipeline())
    run.crew.on("break", lambda _: run.crew.end_all(SOURCE, SINK))
    run.supervisor.start()
    error = ValueError("wrong")
    run.crew.report(Failure(WORK, error, "7", 1))
    assert ended(run.supervisor) == "failed"
    assert [failure.error for failure in run.supervisor.state.failures] == [error]
    assert run.crew.called("break") == [(error,)]


def test_killed_worker_is_replaced_once() -> None:
    run = ScriptedRun(pipeline())
    decided = follow(run)
    run.crew.on("replace", lambda *_: run.crew.end_all(*ALL))
    run.supervisor.start()
    run.crew.report(killed(WORK))
    assert ended(run.supervisor) == "done"
    assert run.crew.calls[:2] == [("start",), ("replace", (WORK,), WORK, False)]
    assert [type(one.event) for one in decided] == [Death, Ended, Ended, Ended]
    assert run.supervisor.stats().stages[1].restarts == 1


def test_run_fails_after_the_maximum_number_of_restarts() -> None:
    run = ScriptedRun(pipeline(restarts=2))
    run.crew.on("replace", lambda *_: run.crew.report(killed(WORK)))  # the replacement dies too
    run.crew.on("break", lambda _: run.crew.end_all(SOURCE, SINK))
    run.supervisor.start()
    run.crew.report(killed(WORK))
    assert ended(run.supervisor) == "failed"
    assert len(run.crew.called("replace")) == 2
    assert "it is not replaced: 2 of 2 restarts were used" in str(run.supervisor.state.failures[0].error)


def test_stage_near_its_restart_limit_is_reported_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    run = ScriptedRun(pipeline(restarts=3))
    events: list[Any] = []
    run.supervisor.feed.listen(events.append)
    deaths = iter([killed(WORK)])
    run.crew.on("replace", lambda *_: run.crew.report(next(deaths, Ended(WORK))))
    run.crew.on("replace", lambda *_: run.crew.end_all(SOURCE, SINK) if next(deaths, None) is None else None)
    run.supervisor.start()
    run.crew.report(killed(WORK))
    assert ended(run.supervisor) == "done"
    text = "stage 'work' has used 2 of 3 restarts in 60 s; once all are used, the next death ends the run"
    assert Warned("work", text) in events
    assert run.supervisor.stats().warnings == (text,)
    assert f"warning: {text}" in render(run.supervisor.stats()).splitlines()
    (record,) = [record for record in caplog.records if record.getMessage() == text]
    assert (record.levelname, vars(record)["stage"]) == ("WARNING", "work")


class Counter:
    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, number: int) -> int:
        self.seen += 1
        return self.seen


@pytest.mark.parametrize(
    ("function", "unbegun", "warns"),
    [(Counter, 0, True), (Counter(), 0, True), (Counter, 1, False), (abs, 0, False)],
    ids=["class", "instance", "not begun", "function"],
)
def test_lost_state_of_a_callable_object_is_reported_and_logged(
    function: Any, unbegun: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    graph = Graph("scripted")
    graph.source([], name="source").map(function, on="process", name="work").sink(abs, name="sink")
    run = ScriptedRun(plan(graph, seed=1, memory=1 << 20))
    run.crew.on("replace", lambda *_: run.crew.end_all(*ALL))
    run.supervisor.start()
    run.crew.report(killed(WORK, unbegun=unbegun))
    assert ended(run.supervisor) == "done"
    texts = [text for text in run.supervisor.stats().warnings if "a new Counter" in text]
    assert len(texts) == warns
    for text in texts:
        assert "worker work 1 was replaced" in text
        assert "restarts=0" in text
        assert text in render(run.supervisor.stats())
        assert text in caplog.messages


@pytest.mark.parametrize(
    ("options", "replaced", "why"),
    [
        ({}, decisions.HOPELESS - 1, "it keeps dying before it starts to work"),
        ({"restarts": 10**9}, decisions.HOPELESS - 1, "it keeps dying before it starts to work"),
        ({"restarts": 10}, 10, "10 of 10 restarts were used"),
        ({"restarts": 30}, 30, "30 of 30 restarts were used"),
    ],
    ids=["default", "unlimited", "as the default", "more"],
)
def test_worker_that_never_starts_is_replaced_up_to_the_limit(options: Any, replaced: int, why: str) -> None:
    run = ScriptedRun(pipeline(**options))
    deaths = iter(range(2, 99))
    run.crew.on("replace", lambda *_: run.crew.report(killed(WORK, unbegun=next(deaths))))
    run.crew.on("break", lambda _: run.crew.end_all(SOURCE, SINK))
    run.supervisor.start()
    run.crew.report(killed(WORK, unbegun=1))
    assert ended(run.supervisor) == "failed"
    assert len(run.crew.called("replace")) == replaced
    assert f"it is not replaced: {why}" in str(run.supervisor.state.failures[0].error)


def test_replacement_is_delayed_after_repeated_deaths_on_an_item(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "FIRST_PAUSE", 0.01)
    run = ScriptedRun(pipeline())
    run.crew.on("start workers", lambda _: run.crew.end_all(*ALL))
    run.supervisor.start()
    run.crew.report(killed(WORK, deaths=2, over_item=2))
    assert ended(run.supervisor) == "done"
    assert run.crew.calls[1:3] == [("replace", (WORK,), WORK, True), ("start workers", (WORK,))]


def test_replacement_that_cannot_start_fails_the_run() -> None:
    run = ScriptedRun(pipeline())
    run.crew.on("break", lambda _: run.crew.end_all(SOURCE, SINK))
    run.supervisor.start()
    run.crew.refuses = OSError("no process")
    run.crew.report(killed(WORK))
    assert ended(run.supervisor) == "failed"
    assert run.supervisor.state.failures[0].error is run.crew.refuses


def test_gang_restarts_as_a_whole_when_one_worker_dies() -> None:
    run = ScriptedRun(with_gang())
    run.crew.on("terminate", lambda id, force: run.crew.report(killed(id)))
    run.crew.on("replace", lambda *_: run.crew.end_all(SOURCE, *GANG, SINK))
    run.supervisor.start()
    run.crew.report(killed(GANG[1]))
    assert ended(run.supervisor) == "done"
    assert run.crew.called("terminate") == [(GANG[0], True), (GANG[2], True)]
    assert run.crew.called("replace") == [(GANG, GANG[1], False)]
    assert run.supervisor.state.restarts == {"gang": 1}


def test_gang_that_misses_a_peer_restarts_once_all_have_ended() -> None:
    run = ScriptedRun(with_gang())
    run.crew.on("replace", lambda *_: run.crew.end_all(SOURCE, *GANG, SINK))
    run.supervisor.start()
    for worker in GANG:
        run.crew.report(Failure(worker, MemberDied("a peer died"), None, 1))
    for worker in GANG:
        assert run.crew.called("replace") == []
        run.crew.report(ProcessEnded(worker))
    assert ended(run.supervisor) == "done"
    assert run.crew.called("replace") == [(GANG, None, False)]


def test_elastic_gang_continues_while_one_worker_is_replaced() -> None:
    run = ScriptedRun(with_gang(elastic=True))
    run.crew.on("replace", lambda *_: run.crew.end_all(SOURCE, *GANG, SINK))
    run.supervisor.start()
    run.crew.report(killed(GANG[1]))
    assert ended(run.supervisor) == "done"
    assert run.crew.called("terminate") == []
    assert run.crew.called("replace") == [((GANG[1],), GANG[1], False)]


def test_sink_that_ends_early_drains_the_run() -> None:
    run = ScriptedRun(pipeline())
    run.crew.on("stop sources", lambda: run.crew.end_all(SOURCE, WORK))
    run.supervisor.start()
    run.crew.end_all(SINK)
    assert ended(run.supervisor) == "done"
    assert run.crew.called("break") == []


def test_stopped_run_drains() -> None:
    run = ScriptedRun(pipeline())
    run.crew.on("stop sources", lambda: run.crew.end_all(*ALL))
    run.supervisor.start()
    run.supervisor.ask(StopRequested())
    assert ended(run.supervisor) == "stopped"
    assert run.crew.called("break") == []


def test_stopped_run_is_aborted_after_its_timeout(caplog: pytest.LogCaptureFixture) -> None:
    run = ScriptedRun(pipeline())
    run.crew.on("break", lambda _: run.crew.end_all(*ALL))
    run.supervisor.start()
    run.supervisor.ask(StopRequested(timeout=0.01))
    assert ended(run.supervisor) == "aborted"
    assert "graph 'scripted' did not end within the timeout of stop(), so it is aborted" in caplog.messages


def test_stopped_run_waits_for_a_slow_item_and_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "STOP_NOTICE_S", 0.01)
    run = ScriptedRun(pipeline())
    run.supervisor.feed.listen(lambda event: run.crew.end_all(*ALL) if isinstance(event, Warned) else None)
    run.supervisor.start()
    run.supervisor.ask(StopRequested())
    assert ended(run.supervisor) == "stopped"
    assert run.crew.called("break") == []
    (warning,) = run.supervisor.stats().warnings
    assert "is still processing items in" in warning


def test_aborted_run_terminates_then_kills_a_worker_that_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "GRACE", 0.01)
    run = ScriptedRun(pipeline())
    run.crew.on("break", lambda _: run.crew.end_all(SOURCE, SINK))
    run.crew.on("terminate", lambda id, force: run.crew.report(killed(id)) if force else None)
    run.supervisor.start()
    run.supervisor.ask(AbortRequested())
    assert ended(run.supervisor) == "aborted"
    assert run.crew.called("terminate") == [(WORK, False), (WORK, True)]
    assert run.supervisor.state.failures == ()


def test_run_without_progress_fails_with_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlock, "STILL", 0.01)
    run = ScriptedRun(pipeline())
    run.channels.counts = {
        "source": {"waiting_writers": 1, "waiting_readers": 1}, "work": {"waiting_readers": 1},
    }  # fmt: skip
    run.crew.on("break", lambda _: run.crew.end_all(*ALL))
    decided = follow(run)
    run.supervisor.start()
    assert ended(run.supervisor) == "failed"
    assert decided[0].actions == (BreakChannels(),)
    assert isinstance(run.supervisor.state.failures[0].error, Deadlock)


class Scripted(ScriptedCrew):
    """Crew for ``Run``. The graph has no results to collect, so the run does not request a thread from the
    crew."""

    local = None


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[ScriptedCrew], None]], Run]:
    """Return a function that starts a run with a scripted crew."""

    def start(script: Callable[[ScriptedCrew], None]) -> Run:
        crew = Scripted()
        script(crew)
        monkeypatch.setattr(run_module, "RunPorts", lambda plan: ScriptedChannels(plan, crew))
        monkeypatch.setattr(run_module, "CrewRouter", lambda *_: crew)
        return Run(pipeline())

    return start


def test_ctrl_c_stops_the_run_and_returns_its_results(start: Any) -> None:
    def script(crew: ScriptedCrew) -> None:
        crew.on("stop sources", lambda: crew.end_all(*ALL))

    run = start(script)
    with pytest.raises(Interrupted) as caught, run:
        signal.raise_signal(signal.SIGINT)
    assert run.state == "stopped"
    assert list(caught.value.results) == []


def test_second_ctrl_c_aborts_the_run(start: Any) -> None:
    def script(crew: ScriptedCrew) -> None:
        crew.on("stop sources", lambda: os.kill(os.getpid(), signal.SIGINT))
        crew.on("break", lambda _: crew.end_all(*ALL))

    run = start(script)
    with pytest.raises(Interrupted), run:
        signal.raise_signal(signal.SIGINT)
    assert run.state == "aborted"


def test_wait_raises_the_failure_of_the_run(start: Any) -> None:
    def script(crew: ScriptedCrew) -> None:
        crew.on("start", lambda: crew.report(Failure(WORK, ValueError("wrong"), "7", 1)))
        crew.on("break", lambda _: crew.end_all(SOURCE, SINK))

    with pytest.raises(RunError, match="graph 'scripted' failed") as caught, start(script):
        pass
    assert "stage 'work' failed on item 7 in worker work 1" in str(caught.value.exceptions[0])
