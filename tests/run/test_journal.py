"""Test what the log of a run says about decisions, made by the real policy without a run."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
from deciding import died, failure

from flowchan import Graph
from flowchan.run.policy import decisions
from flowchan.run.policy.decisions import AbortRequested, Decided, EndWorker, StopRequested, Tick, decide
from flowchan.run.policy.events import Ended, NotAdded, RunBegan, RunEnded, Started, Warned, WorkerId
from flowchan.run.policy.journal import Journal
from flowchan.run.policy.plan import plan
from flowchan.run.policy.scaling import ScalingDecision
from flowchan.run.policy.transitions import PolicyState, first_state

SOURCE, WORK, SINK = (WorkerId(name, 1) for name in ("source", "work", "sink"))


class Log:
    """Journal of a run with a stage in a process, and the records that it writes."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG, logger="flowchan.run")
        graph = Graph("logged")
        numbers = graph.source([], name="source").map(abs, on="process", restarts=3, name="work")
        numbers.sink(abs, name="sink")
        made = plan(graph, seed=1, memory=1 << 20)
        self.state: PolicyState = first_state(made, 0.0)
        self._journal = Journal(made)
        self._caplog = caplog

    def record(self, event: Any) -> None:
        self._journal.record(event)

    def decide(self, event: Any, now: float = 0.0) -> None:
        before = self.state
        self.state, actions = decide(before, event, now)
        self.record(Decided(event, before, self.state, actions))

    def lines(self) -> list[tuple[str, str]]:
        """Return the level and text of each new record."""
        found = [(record.levelname, record.getMessage()) for record in self._caplog.records]
        self._caplog.clear()
        return found


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Log:
    return Log(caplog)


def test_each_death_and_restart_is_a_warning(log: Log) -> None:
    what = "the process of worker work 1 (pid 1) was killed by SIGKILL"
    for number in (1, 2, 3):
        log.decide(died(WORK))
        assert log.lines() == [("WARNING", f"{what}; it is replaced (restart {number} of 3 in 60 s)")]
    log.decide(died(WORK))
    assert log.lines() == [("WARNING", f"{what}; it is not replaced, and the run fails")]


def test_death_over_an_item_uses_no_restart(log: Log) -> None:
    death = dataclasses.replace(died(WORK), over_item=2, host="far", stack="line 1\nline 2\n")
    log.decide(death)
    ((level, text),) = log.lines()
    assert level == "WARNING"
    assert text.splitlines() == [
        "the process of worker work 1 (pid 1 on host far) was killed by SIGKILL while it was processing an "
        "item (death 2 over this item); it is replaced",
        "its stack was (most recent call last):",
        "line 1",
        "line 2",
    ]


def test_death_that_the_user_need_not_know_is_not_logged(log: Log) -> None:
    log.decide(dataclasses.replace(died(WORK), retired=True))
    assert log.lines() == []
    log.decide(failure(SOURCE))
    log.decide(died(WORK))  # the run is already ending
    assert log.lines() == []


@pytest.mark.parametrize(
    ("finish", "kept"),
    [(True, "the items in flight"), (False, "the items that workers are processing")],
)
def test_first_stop_is_logged_with_the_items_that_are_finished(log: Log, finish: bool, kept: str) -> None:
    log.decide(StopRequested(finish_queued=finish))
    assert log.lines() == [("INFO", f"graph 'logged' is stopping: {kept} are being finished")]
    log.decide(StopRequested(timeout=5.0))
    assert log.lines() == []
    log.decide(Tick(), 5.0)
    assert log.lines() == [
        ("WARNING", "graph 'logged' did not end within the timeout of stop(), so it is aborted")
    ]


def test_abort_is_logged_once(log: Log) -> None:
    log.decide(AbortRequested())
    assert log.lines() == [("INFO", "graph 'logged' is aborted")]
    log.decide(AbortRequested())
    assert log.lines() == []


def test_abort_of_a_failed_run_is_not_logged(log: Log) -> None:
    log.decide(failure(WORK))
    log.decide(AbortRequested())
    assert log.lines() == []


def test_other_changes_of_the_phase_are_not_logged(log: Log) -> None:
    log.decide(Ended(SINK))
    assert log.state.phase == "finishing"
    assert log.lines() == []


def test_late_process_is_logged_when_it_is_terminated_and_killed(log: Log) -> None:
    log.decide(AbortRequested())
    log.lines()
    for now in (decisions.GRACE, decisions.GRACE + 1, 2 * decisions.GRACE, 2 * decisions.GRACE + 1, 1e9):
        log.decide(Tick(), now)
    assert log.lines() == [
        ("WARNING", "worker work 1 did not end within 2 s and is terminated"),
        ("WARNING", "worker work 1 did not end within 4 s and is killed"),
    ]


def test_process_that_the_user_ends_is_not_called_late(log: Log) -> None:
    log.decide(EndWorker(WORK, force=True))
    assert log.lines() == []


def test_events_of_the_feed_have_one_line_each(log: Log, caplog: pytest.LogCaptureFixture) -> None:
    for event in (
        RunBegan(3, 7), Started(WORK, 11), Started(WORK, 12, "far"), NotAdded(WORK, "no memory"),
        Warned("work", "nearly used up"), ScalingDecision(1.0, "work", 1, 2, "busy"),
        RunEnded("done", 1.234, frozenset({SINK, SOURCE})), Ended(WORK),
    ):  # fmt: skip
        log.record(event)
    about = [(vars(one).get("stage"), vars(one).get("number")) for one in caplog.records]
    assert about == [
        (None, None), ("work", 1), ("work", 1), ("work", 1), ("work", None), ("work", None), ("sink", 1),
        ("source", 1), (None, None),
    ]  # fmt: skip
    assert log.lines() == [
        ("INFO", "graph 'logged' starts with 3 workers, seed 7"),
        ("DEBUG", "worker work 1 starts as pid 11"),
        ("DEBUG", "worker work 1 starts as pid 12 on host far"),
        ("WARNING", "no memory"),
        ("WARNING", "nearly used up"),
        ("INFO", "stage 'work': workers 1 → 2: busy"),
        ("WARNING", "worker sink 1 is still running code that cannot be interrupted"),
        ("WARNING", "worker source 1 is still running code that cannot be interrupted"),
        ("INFO", "graph 'logged' is done after 1.23 s"),
    ]
