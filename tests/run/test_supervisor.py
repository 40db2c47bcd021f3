"""A whole run as its supervisor decides it, over a crew that has no worker: it only remembers what it was
asked for. No process, no thread but the supervisor's own, and no channel of items."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from support.gangs import in_step
from support.waiting import wait_until

from flowchan import Deadlock, Graph
from flowchan.channel.channel import ChannelStats
from flowchan.run.observe.measure import Snapshot
from flowchan.run.policy import deadlock, decisions
from flowchan.run.policy.deadlock import Elsewhere, Glance
from flowchan.run.policy.decisions import STOP_SECONDS, AbortAsked, Died, StopAsked, Tick
from flowchan.run.policy.events import (
    Aborted,
    Crashed,
    Ended,
    Event,
    Failure,
    Gone,
    Result,
    Retried,
    WorkerId,
)
from flowchan.run.policy.plan import Plan, plan
from flowchan.run.policy.scaling import Scale
from flowchan.run.policy.stats import HostStats
from flowchan.run.supervisor import Supervisor

SOURCE, WORK, SINK = (WorkerId(name, 1) for name in ("source", "work", "sink"))
NOTHING = ChannelStats(
    **{field.name: 0 for field in dataclasses.fields(ChannelStats) if field.name != "holders"}
)


def planned(first: str = "source") -> Plan:
    graph = Graph("faked")
    numbers = graph.source([], name="source") if first == "source" else graph.input(name="source")
    numbers.map(abs, on="process", restarts=2, name="work").sink(abs, name="sink")
    return plan(graph, seed=1, memory=1 << 20)


class FakeCrew:
    """Remembers what it was asked for."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.asked: list[tuple[Any, ...]] = []
        self.channels_broken: list[str] = []
        self.refuses_to_start: Exception | None = None
        self.moved = 0
        self.waiting: dict[str, dict[str, int]] = {}  # counts of waiting workers by channel
        self.deaths = 1
        self.hears_all = True
        self.result_unread = False
        self.forgotten: list[WorkerId] = []

    def start(self, tell: Callable[[Event], None]) -> None:
        self.asked.append(("start",))
        if self.refuses_to_start is not None:
            raise self.refuses_to_start

    def stop_sources(self) -> None:
        self.asked.append(("stop sources",))

    def end_unwanted(self) -> None:
        pass

    def break_channels(self, cause: BaseException | None) -> None:
        self.asked.append(("break", cause))

    def release_ports(self, id: WorkerId) -> None:
        self.asked.append(("release", id))

    def cancel_tasks(self, all_of_them: bool) -> None:
        pass

    def terminate(self, id: WorkerId, force: bool) -> None:
        self.asked.append(("terminate", id, force))

    def kill(self) -> None:
        self.asked.append(("kill",))

    def death_of(self, id: WorkerId, used: int) -> Died:
        return Died(id, Failure(id, ValueError(f"died, {used} used"), None, 1), self.deaths)

    def recover(self, id: WorkerId, blame: bool | None = None) -> None:
        self.asked.append(("recover", id) if blame is None else ("recover", id, blame))

    def regroup(self, ids: Iterable[WorkerId]) -> None:
        self.asked.append(("regroup", [*ids]))

    def start_again(self, id: WorkerId) -> None:
        self.asked.append(("start again", id))
        if self.refuses_to_start is not None:
            raise self.refuses_to_start

    def add(self, id: WorkerId) -> None:
        self.asked.append(("add", id))
        if self.refuses_to_start is not None:
            raise self.refuses_to_start

    def remove(self, id: WorkerId) -> None:
        self.asked.append(("remove", id))

    def forget(self, id: WorkerId) -> None:
        self.forgotten.append(id)

    def all_is_heard(self) -> bool:
        return self.hears_all

    def broken(self, id: WorkerId | None) -> list[str]:
        return self.channels_broken

    def cause_of(self, channel: str) -> BaseException:
        return ValueError(f"cause of {channel}")

    def glance(self) -> Glance:
        counts = self.waiting.values()
        reading = sum(one.get("waiting_readers", 0) for one in counts)
        writing = sum(one.get("waiting_writers", 0) for one in counts)
        unread = frozenset({SINK} if self.result_unread else ())
        return Glance(self.moved, reading, writing, unread=unread)

    def may_move(self, alive: Iterable[WorkerId]) -> bool:
        return False

    def elsewhere(self, alive: frozenset[WorkerId]) -> Elsewhere | None:
        return Elsewhere()

    def snapshots(self) -> tuple[Snapshot, ...]:
        return tuple(
            Snapshot(edge, dataclasses.replace(NOTHING, **self.waiting.get(edge.name, {})))
            for edge in self.plan.edges
        )

    def hosts(self) -> tuple[HostStats, ...]:
        return ()

    def clear_up(self, abandoned: frozenset[WorkerId], peer_timeout: float | None) -> frozenset[WorkerId]:
        self.asked.append(("clear up", abandoned))
        return frozenset()

    def warn_of(self, abandoned: frozenset[WorkerId]) -> None:
        pass


@pytest.fixture
def crew() -> FakeCrew:
    return FakeCrew(planned())


@pytest.fixture
def supervisor(crew: FakeCrew) -> Supervisor:
    return Supervisor(crew.plan, crew)


def test_run_passes_from_its_start_to_its_end(crew: FakeCrew, supervisor: Supervisor) -> None:
    supervisor.start()
    for event in (Result("sink", 5), Retried(WORK), Ended(SOURCE), Ended(WORK, unwanted=2), Ended(SINK)):
        assert not supervisor.ended.is_set()
        supervisor.tell(event)
    assert supervisor.ended.wait(60)
    assert crew.asked == [
        ("start",), *(("release", id) for id in (SOURCE, WORK, SINK)), ("clear up", frozenset()),
    ]  # fmt: skip
    assert supervisor.results == {"sink": 5}
    stats = supervisor.stats()
    assert (stats.state, stats.stages[1].retried, stats.stages[1].unwanted) == ("done", 1, 2)
    wait_until(lambda: not supervisor._thread.is_alive())  # type: ignore[union-attr]


def test_failed_start_is_undone(crew: FakeCrew, supervisor: Supervisor) -> None:
    crew.refuses_to_start = OSError("no process")
    with pytest.raises(OSError, match="no process"):
        supervisor.start()
    assert crew.asked == [("start",), ("break", None), ("kill",), ("clear up", frozenset())]


def test_internal_error_ends_the_run_and_is_reported(crew: FakeCrew, supervisor: Supervisor) -> None:
    error = KeyError("ours")
    supervisor.start()
    supervisor.tell(Crashed(error))
    assert supervisor.ended.wait(60)
    assert supervisor.crashed is error
    everybody = frozenset({SOURCE, WORK, SINK})
    assert crew.asked[1:] == [("break", error), ("kill",), ("clear up", everybody)]


def test_failure_breaks_the_channels_and_ends_the_run(crew: FakeCrew, supervisor: Supervisor) -> None:
    error = ValueError("wrong")
    supervisor.turn(Failure(WORK, error, "7", 1))
    assert crew.asked == [("break", error), ("release", WORK)]
    supervisor.turn(Ended(SOURCE))
    supervisor.turn(Ended(SINK))
    assert supervisor.state.phase == "ended"
    assert [failure.error for failure in supervisor.state.failures] == [error]


def test_dead_worker_is_restarted_until_its_restarts_are_used(crew: FakeCrew, supervisor: Supervisor) -> None:
    for _ in range(2):
        supervisor.turn(Gone(WORK))
        assert crew.asked == [("recover", WORK), ("start again", WORK)]
        assert supervisor.state.phase == "running"
        crew.asked.clear()
    supervisor.turn(Gone(WORK))
    assert [ask[0] for ask in crew.asked] == ["break", "release"]
    assert str(supervisor.state.failures[0].error) == "died, 2 used"


def test_replacement_for_a_deadly_item_starts_after_a_pause(
    crew: FakeCrew, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew.deaths = 2
    monkeypatch.setattr(decisions, "FIRST_PAUSE", 3600.0)
    monkeypatch.setattr(decisions, "LONGEST_PAUSE", 3600.0)
    supervisor.turn(Gone(WORK))
    supervisor.turn(Tick())
    assert crew.asked == [("recover", WORK)]
    supervisor.turn(AbortAsked())  # nobody waits for it then
    assert crew.asked[1:] == [("break", None), ("release", WORK)]


def test_gang_restarts_in_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes to recover what each had in hand."""
    graph = Graph("faked")
    gang: dict[str, Any] = {"on": "process", "workers": 3, "restarts": 9, "restartable": True}
    graph.stage(in_step, graph.source([], name="source"), name="gang", **gang).collect()
    crew = FakeCrew(plan(graph, seed=1, memory=1 << 20))
    supervisor, mates = Supervisor(crew.plan, crew), [WorkerId("gang", number) for number in (1, 2, 3)]
    crew.deaths = 9
    # The clock moves only here, and whenever one is recovered.
    monkeypatch.setattr(time, "monotonic", lambda: float(turns + len(crew.asked)))
    turns = 0
    for mate in mates:
        supervisor.turn(Gone(mate))
    assert crew.asked[-4:] == [*(("recover", mate, mate == mates[0]) for mate in mates), ("regroup", mates)]
    while crew.asked[-1][0] == "regroup":
        turns += 1
        supervisor.turn(Tick())
    assert crew.asked[-3:] == [("start again", mate) for mate in mates]


def test_replacement_that_cannot_be_started_fails_the_run(crew: FakeCrew, supervisor: Supervisor) -> None:
    crew.refuses_to_start = OSError("no process")
    supervisor.turn(Gone(WORK))
    assert crew.asked[-2:] == [("break", crew.refuses_to_start), ("release", WORK)]


def test_stage_gains_a_worker_and_loses_it_again(crew: FakeCrew, supervisor: Supervisor) -> None:
    added = WorkerId(WORK.stage, 2)
    supervisor.turn(Scale(WORK.stage, 2))
    assert supervisor.stats().stages[1].workers == 2
    supervisor.turn(Scale(WORK.stage, 1))
    supervisor.turn(Ended(added))
    supervisor.turn(Gone(added))
    assert crew.asked == [("add", added), ("remove", added), ("release", added)]
    assert crew.forgotten == [added]
    assert supervisor.state.failures == ()


def test_worker_that_cannot_be_added_does_not_fail_the_run(crew: FakeCrew, supervisor: Supervisor) -> None:
    crew.refuses_to_start = OSError("no process")
    supervisor.turn(Scale(WORK.stage, 2))
    assert "no process" in supervisor.stats().last_error
    assert supervisor.state.failures == ()
    assert supervisor.stats().stages[1].alive == 1


def test_process_that_reported_its_end_did_not_die(crew: FakeCrew, supervisor: Supervisor) -> None:
    supervisor.turn(Ended(WORK))
    supervisor.turn(Gone(WORK))
    assert crew.asked == [("release", WORK)]
    assert supervisor.state.failures == ()


def test_stop_stops_the_sources_and_the_rest_drains(crew: FakeCrew, supervisor: Supervisor) -> None:
    supervisor.turn(StopAsked())
    assert crew.asked == [("stop sources",)]
    assert supervisor.stats().state == "stopping"
    for id in (SOURCE, WORK, SINK):
        supervisor.turn(Ended(id))
    assert supervisor.stats().state == "stopped"


def test_moving_items_extend_the_time_of_a_stopped_run(crew: FakeCrew, supervisor: Supervisor) -> None:
    def look() -> str:
        """When the time of a stopped run is up."""
        late = supervisor.state.since - STOP_SECONDS - 1
        supervisor.state = dataclasses.replace(supervisor.state, since=late)
        supervisor.turn(Tick())
        return supervisor.state.phase

    crew.moved = 7
    supervisor.turn(StopAsked())
    for _ in range(3):
        crew.moved += 1
        assert look() == "stopping"
    assert look() == "aborting"


@pytest.mark.parametrize(("host", "told"), [("", 0), ("far", 1024)])
def test_cancelling_requests_never_waits_for_the_supervisor(host: str, told: int) -> None:
    """Its queue is full here, and only other hosts have to be told."""
    here = planned()
    there = tuple(dataclasses.replace(worker, host=host) for worker in here.workers)
    supervisor = Supervisor(dataclasses.replace(here, workers=there), FakeCrew(here))
    for question in range(1100):
        supervisor.cross_off(question)
    assert len(supervisor._events) == told


def test_run_is_stopped_when_all_its_sinks_have_ended(crew: FakeCrew, supervisor: Supervisor) -> None:
    supervisor.turn(Ended(SINK))
    assert crew.asked == [("release", SINK), ("stop sources",)]
    assert supervisor.state.phase == "finishing"


def test_workers_that_do_not_end_are_terminated_and_killed(
    crew: FakeCrew, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "GRACE", 0.0)
    supervisor.turn(AbortAsked())
    for _ in range(3):
        supervisor.turn(Tick())
    assert [ask for ask in crew.asked if ask[0] == "terminate"] == [
        ("terminate", WORK, False), ("terminate", WORK, True),
    ]  # fmt: skip
    supervisor.turn(Gone(WORK))
    assert supervisor.state.failures == ()
    supervisor.turn(Tick())
    assert (supervisor.state.phase, supervisor.state.abandoned) == ("ended", {SOURCE, SINK})


def test_worker_that_broke_a_channel_is_blamed_after_all_reports(
    crew: FakeCrew, supervisor: Supervisor
) -> None:
    crew.channels_broken, crew.hears_all = ["source"], False
    supervisor.turn(Ended(SINK))
    assert crew.asked == []
    supervisor.turn(Aborted(WORK, "source", None, 1, at=1))
    crew.hears_all = True
    supervisor.turn(Tick())
    assert [ask[0] for ask in crew.asked] == ["break", "release"]
    (failure,) = supervisor.state.failures
    assert (failure.worker, failure.channel, str(failure.error)) == (WORK, "source", "cause of source")


def test_deadlocked_run_fails_with_the_reason(
    crew: FakeCrew, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlock, "STILL", 0.0)
    supervisor._deadlocks.next_at = 0.0
    everybody = {"source": {"waiting_writers": 1, "waiting_readers": 1}, "work": {"waiting_readers": 1}}
    crew.waiting = everybody
    for moved in range(5):  # it moves
        crew.moved = moved
        supervisor.turn(Tick())
    crew.waiting = {"work": {"waiting_readers": 1}}  # somebody works
    supervisor.turn(Tick())
    supervisor.turn(Tick())
    assert supervisor.state.phase == "running"
    crew.waiting = everybody
    for _ in range(2):
        supervisor.turn(Tick())
    assert supervisor.state.phase == "failing"
    assert isinstance(supervisor.state.failures[0].error, Deadlock)


def test_full_unread_result_is_gathered_when_the_program_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crew = FakeCrew(planned("input"))
    supervisor = Supervisor(crew.plan, crew)
    monkeypatch.setattr(deadlock, "STILL", 0.0)
    supervisor._deadlocks.next_at = 0.0
    taken: list[frozenset[WorkerId]] = []
    supervisor.take_in = taken.append
    crew.result_unread = True
    crew.waiting = {"work": {"waiting_writers": 1}}
    for _ in range(4):  # the program is elsewhere, and may come to read
        supervisor.turn(Tick())
    assert taken == []
    crew.waiting["source"] = {"waiting_writers": 1}
    for _ in range(3):
        supervisor.turn(Tick())
    assert taken[0] == {SINK}
    assert supervisor.state.phase == "running"
