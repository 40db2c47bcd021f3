"""Test which worker is to blame for a broken channel, from reports in any order and with a hand-set clock."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from flowchan import Broken, Graph
from flowchan.run.policy import break_cause
from flowchan.run.policy.break_cause import POLL_INTERVAL_S, REPORT_TIMEOUT_S, Breaks
from flowchan.run.policy.events import Aborted, Ended, Met, WorkerId
from flowchan.run.policy.plan import plan

SOURCE, FIRST, SECOND, SINK = (WorkerId(name, 1) for name in ("source", "first", "second", "sink"))


class Line:
    """Run with three channels, ``source``, ``first`` and ``second``, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        graph = Graph("broken")
        numbers = graph.source(range(3), name="source").map(abs, name="first")
        numbers.map(abs, name="second").sink(abs, name="sink")
        self.now = 100.0
        self.broken: dict[WorkerId | None, list[str]] = {}
        self.asked: list[WorkerId | None] = []
        self.breaks = Breaks(plan(graph, seed=1, memory=1 << 20), self._broken, Broken)
        monkeypatch.setattr(break_cause, "time", SimpleNamespace(monotonic=lambda: self.now))

    def _broken(self, worker: WorkerId | None) -> list[str]:
        self.asked.append(worker)
        return list(self.broken.get(worker, []))

    def is_due(self, all_reported: bool = False) -> bool:
        return self.breaks.is_due(lambda: all_reported)


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Line:
    return Line(monkeypatch)


def aborted(worker: WorkerId, at: int, error: Any = None) -> Aborted:
    return Aborted(worker, worker.stage, error, pid=7, at=at, host="far")


def test_first_worker_to_abort_is_to_blame(line: Line) -> None:
    errors = [ValueError(name) for name in "abc"]
    for worker, at, error in zip((SECOND, FIRST, SOURCE), (5, 3, 4), errors, strict=True):
        line.breaks.record(aborted(worker, at, error))
    found = line.breaks.failure()
    assert found is not None
    assert (found.worker, found.error, found.item) == (FIRST, errors[1], None)
    assert (found.channel, found.pid, found.host) == ("first", 7, "far")


def test_abort_without_an_error_has_the_cause_of_its_channel(line: Line) -> None:
    line.breaks.record(aborted(FIRST, 1))
    found = line.breaks.failure()
    assert found is not None
    assert isinstance(found.error, Broken)
    assert str(found.error) == "first"


def test_report_of_an_abort_comes_before_channels_found_broken(line: Line) -> None:
    line.breaks.record_met(Met(SECOND, ("second",)))
    line.breaks.record(aborted(FIRST, 1))
    found = line.breaks.failure()
    assert found is not None
    assert found.worker == FIRST


def test_break_without_a_report_began_at_its_first_channel(line: Line) -> None:
    line.breaks.record_met(Met(SECOND, ("first",)))  # the worker then breaks its other channel, "second"
    line.broken = {None: ["second", "first"]}
    line.breaks.check()
    found = line.breaks.failure()
    assert found is not None
    assert (found.worker, found.channel, found.pid) == (WorkerId("first", 0), "first", os.getpid())
    assert str(found.error) == "first"


def test_break_passed_on_in_a_circle_names_the_first(line: Line) -> None:
    line.breaks.record_met(Met(FIRST, ("source",)))
    line.breaks.record_met(Met(SECOND, ("second",)))
    line.breaks.record_met(Met(SECOND, ("first",)))
    line.breaks.record_met(Met(FIRST, ("first",)))
    found = line.breaks.failure()
    assert found is not None
    assert found.channel == "source"


def test_failure_is_reported_once(line: Line) -> None:
    assert line.breaks.failure() is None
    line.breaks.record(aborted(FIRST, 1))
    assert line.breaks.pending
    assert line.breaks.has_reported(FIRST)
    assert not line.breaks.has_reported(SECOND)
    assert line.breaks.failure() is not None
    assert line.breaks.failure() is None
    assert not line.breaks.pending
    assert not line.breaks.has_reported(FIRST)


def test_end_with_a_broken_channel_is_held_back(line: Line) -> None:
    line.broken = {FIRST: ["source"]}
    assert line.breaks.keeps(Ended(FIRST))
    assert not line.breaks.keeps(Ended(SINK))
    assert line.breaks.pending
    assert line.breaks.ended() == {FIRST}
    found = line.breaks.failure()
    assert found is not None
    assert found.channel == "source"
    assert line.breaks.pending  # the end of FIRST is still held back
    assert line.breaks.ends() == [Ended(FIRST)]
    assert line.breaks.ends() == []
    assert not line.breaks.pending


def test_break_by_the_supervisor_has_no_cause(line: Line) -> None:
    line.broken = {FIRST: ["source"], None: ["source"]}
    line.breaks.check()
    line.breaks.end()
    assert not line.breaks.pending
    assert not line.breaks.keeps(Ended(FIRST))
    line.breaks.record(aborted(FIRST, 1))
    line.breaks.record_met(Met(SECOND, ("first",)))
    line.now += 2 * POLL_INTERVAL_S
    line.breaks.check()
    assert line.asked == [None]  # after breaks.end(), no channel was checked
    assert line.breaks.failure() is None
    assert not line.is_due(all_reported=True)


def test_channels_are_checked_once_per_interval(line: Line) -> None:
    for now, checks in ((100.0, 1), (100.0, 1), (100.4, 1), (100.5, 2), (100.9, 2), (101.0, 3), (200.0, 4)):
        line.now = now
        line.breaks.check()
        assert line.asked == [None] * checks
    assert POLL_INTERVAL_S == 0.5


def test_decision_waits_for_all_reports_up_to_a_limit(line: Line) -> None:
    assert not line.is_due(all_reported=True)  # nothing is broken
    line.breaks.record(aborted(FIRST, 1))
    assert not line.is_due()
    assert line.is_due(all_reported=True)
    line.now += REPORT_TIMEOUT_S
    assert not line.is_due()
    line.now += 0.1
    assert line.is_due()
    line.breaks.failure()
    assert not line.is_due()
    line.breaks.record(aborted(SECOND, 2))
    assert not line.is_due()  # the break starts the time limit again
    line.now += REPORT_TIMEOUT_S + 0.1
    assert line.is_due()


def test_held_end_is_due_once_the_supervisor_breaks_channels(line: Line) -> None:
    line.broken = {FIRST: ["source"]}
    line.breaks.keeps(Ended(FIRST))
    assert not line.is_due()
    line.breaks.end()
    assert line.is_due()
    assert line.breaks.failure() is None
