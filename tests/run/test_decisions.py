"""Test the supervisor's decisions for every phase and event, without processes, threads or a clock."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from deciding import died, failure, missing

from flowchan.errors import MemberLeft
from flowchan.run.observe import measure
from flowchan.run.policy import decisions
from flowchan.run.policy.actions import (
    BreakChannels,
    DropQueued,
    EndGroup,
    FormGroup,
    ReleasePorts,
    Replace,
    RestartGang,
    StopSources,
    Terminate,
    Warn,
)
from flowchan.run.policy.decisions import (
    GRACE,
    STOP_NOTICE_S,
    AbortRequested,
    StopRequested,
    Tick,
    decide,
    next_at,
)
from flowchan.run.policy.events import (
    Death,
    Ended,
    Failure,
    GroupLost,
    ProcessEnded,
    WorkerId,
)
from flowchan.run.policy.restart_limit import RESTART_PERIOD_S
from flowchan.run.policy.transitions import (
    Phase,
    PolicyState,
)

SOURCE, MAP, SINK = (WorkerId(name, 1) for name in ("source", "map", "sink"))
ALL = frozenset({SOURCE, MAP, SINK})
START = PolicyState(
    alive=ALL, processes=frozenset({MAP}), sources=frozenset({SOURCE}), ends=frozenset({SINK})
)
GOING_ON = [phase for phase in get_args(Phase) if phase != "ended"]


def at(phase: Phase, **values: Any) -> PolicyState:
    return dataclasses.replace(START, phase=phase, **values)


def restarted(stage: str, times: int) -> dict[str, Any]:
    """Return the fields of a state after a stage was restarted ``times`` times at time 0."""
    return {"restarts": {stage: times}, "recent_restarts": {stage: (0.0,) * times}}


@pytest.mark.parametrize("phase", GOING_ON)
def test_ports_of_an_ended_worker_are_released_in_every_phase(phase: Phase) -> None:
    state, actions = decide(at(phase), Ended(MAP), 0.0)
    assert MAP not in state.alive
    assert actions == (ReleasePorts(MAP),)
    assert state.phase == phase


def test_stopped_run_is_stopping_until_it_has_ended() -> None:
    assert measure.state_of(at("running")) == measure.state_of(at("finishing")) == "running"
    for phase in ("stopping", "finishing"):
        assert measure.state_of(at(phase, stopped=True)) == "stopping"


@pytest.mark.parametrize("phase", GOING_ON)
def test_run_ends_with_its_last_worker(phase: Phase) -> None:
    state, actions = decide(at(phase, alive=frozenset({SINK})), Ended(SINK), 0.0)
    assert (state.phase, actions) == ("ended", (ReleasePorts(SINK),))


@pytest.mark.parametrize(
    "event", [Ended(MAP), failure(MAP), died(MAP), StopRequested(), AbortRequested(), Tick()]
)
def test_events_after_the_end_change_nothing(event: Any) -> None:
    state = at("ended", alive=frozenset())
    assert decide(state, event, 1e9) == (state, ())


@pytest.mark.parametrize("phase", ["running", "stopping"])
def test_run_finishes_when_its_last_sink_has_ended(phase: Phase) -> None:
    state, _ = decide(at(phase), Ended(SINK), 7.0)
    assert (state.phase, state.since) == ("finishing", 7.0)


@pytest.mark.parametrize("phase", ["running", "stopping", "finishing"])
def test_failure_breaks_the_channels(phase: Phase) -> None:
    state, actions = decide(at(phase), failure(MAP), 7.0)
    assert actions == (BreakChannels(), ReleasePorts(MAP))
    assert (state.phase, state.since, state.failures) == ("failing", 7.0, (failure_in(state),))


def failure_in(state: PolicyState) -> Failure:
    (found,) = state.failures
    return found


@pytest.mark.parametrize("phase", ["failing", "aborting"])
def test_later_failure_is_kept_after_the_first(phase: Phase) -> None:
    first, second = failure(SOURCE, "first"), failure(MAP, "second")
    state, actions = decide(at(phase, failures=(first,)), second, 7.0)
    assert state.failures == (first, second)
    assert actions == (ReleasePorts(MAP),)


def test_failure_of_the_only_worker_ends_the_run() -> None:
    state, actions = decide(at("running", alive=frozenset({SINK})), failure(SINK), 0.0)
    assert (state.phase, len(state.failures)) == ("ended", 1)
    assert actions == (BreakChannels(), ReleasePorts(SINK))


@pytest.mark.parametrize("phase", ["running", "stopping"])
def test_death_without_restarts_left_is_a_failure(phase: Phase) -> None:
    state, actions = decide(at(phase), died(MAP), 0.0)
    assert (state.phase, len(state.failures)) == ("failing", 1)
    assert actions == (BreakChannels(), ReleasePorts(MAP))


LASTING = at("running", limits={"map": 10})


def after_deaths(state: PolicyState, deaths: Sequence[Death], every: float) -> tuple[PolicyState, list[Warn]]:
    """Let workers die one after another. Return the final state and the warnings."""
    warnings = []
    for number, death in enumerate(deaths):
        state, actions = decide(state, death, number * every)
        warnings += [action for action in actions if isinstance(action, Warn)]
    return state, warnings


def test_restarts_in_an_earlier_period_do_not_count() -> None:
    often = RESTART_PERIOD_S / 10
    state, warnings = after_deaths(LASTING, [died(MAP)] * 100, every=often)
    assert (state.phase, state.restarts) == ("running", {"map": 100})
    assert len(warnings) == 1  # only one warning, although the stage is still near its limit
    state, _ = after_deaths(LASTING, [died(MAP)] * 11, every=often * 0.99)
    assert state.phase == "failing"
    assert "10 of 10 restarts were used in 60 s" in str(failure_in(state).error)


def test_pauses_before_replacements_do_not_count_towards_the_restart_period() -> None:
    """If pauses counted, a limit above the number of pauses that fit in a period would never be reached."""
    state, now = at("running", limits={"map": 100}), 0.0
    for number in range(101):
        state, actions = decide(state, dataclasses.replace(died(MAP), deaths=number), now)
        now += sum(action.pause for action in actions if isinstance(action, Replace))
    assert now > 5 * RESTART_PERIOD_S
    assert (state.phase, state.restarts) == ("failing", {"map": 100})


def test_deaths_while_processing_an_item_do_not_count_as_restarts() -> None:
    over = [dataclasses.replace(died(MAP), over_item=number % 3 + 1) for number in range(12)]
    state, warnings = after_deaths(LASTING, over, every=0.0)
    assert (state.phase, state.restarts, warnings) == ("running", {"map": 12}, [])
    state, _ = decide(at("running", limits={"map": 0}), over[0], 0.0)
    assert state.phase == "failing"


def test_workers_that_all_die_while_starting_end_the_run() -> None:
    starts = [dataclasses.replace(died(MAP), unbegun=number) for number in range(1, 5)]
    state, _ = after_deaths(LASTING, starts, every=2 * RESTART_PERIOD_S)
    assert "it keeps dying before it starts to work" in str(failure_in(state).error)
    explicit = dataclasses.replace(LASTING, limits={"map": 3}, explicit=frozenset({"map"}))
    state, _ = after_deaths(explicit, starts[:3], every=2 * RESTART_PERIOD_S)
    assert state.phase == "running"
    state, _ = after_deaths(explicit, starts, every=2 * RESTART_PERIOD_S)
    assert "it keeps dying before it starts to work" in str(failure_in(state).error)


@pytest.mark.parametrize(("limit", "first"), [(1, 1), (2, 1), (10, 8), (100, 80)])
def test_stage_near_its_restart_limit_warns_once(limit: int, first: int) -> None:
    state = at("running", limits={"map": limit})
    state, warnings = after_deaths(state, [died(MAP)] * (first - 1), every=0.0)
    assert warnings == []
    _, warnings = after_deaths(state, [died(MAP)] * (limit - first + 1), every=0.0)
    (warning,) = warnings
    assert (warning.stage, warning.topic) == ("map", "restarts")
    assert f"has used {first} of {limit} restarts in 60 s" in warning.text


def test_death_of_a_host_does_not_count_as_a_restart() -> None:
    """If the workers of a stage cannot be replaced, the death still ends the run."""
    lost = dataclasses.replace(died(MAP), counts=False)
    state, actions = decide(at("running", limits={"map": 2}, **restarted("map", 2)), lost, 0.0)
    assert (state.phase, state.restarts) == ("running", {"map": 2})
    assert actions == (Replace(MAP, 0.0),)
    state, _ = decide(at("running", limits={"map": 0}), lost, 0.0)
    assert state.phase == "failing"


@pytest.mark.parametrize("phase", ["finishing", "failing", "aborting"])
def test_death_of_a_terminated_worker_is_not_a_failure(phase: Phase) -> None:
    state, actions = decide(at(phase, terminated=True), died(MAP), 0.0)
    assert (state.phase, state.failures) == (phase, ())
    assert actions == (ReleasePorts(MAP),)


@pytest.mark.parametrize("phase", ["failing", "aborting"])
def test_death_with_restarts_left_does_not_fail_an_ending_run(
    phase: Phase,
) -> None:
    state, actions = decide(at(phase, limits={"map": 2}, **restarted("map", 1)), died(MAP), 0.0)
    assert (state.phase, state.failures) == (phase, ())
    assert actions == (ReleasePorts(MAP),)
    state, _ = decide(at(phase, limits={"map": 2}, **restarted("map", 2)), died(MAP), 0.0)
    assert len(state.failures) == 1


GANG = tuple(WorkerId("gang", number) for number in (1, 2, 3))
GANG_AT_WORK = PolicyState(
    alive=frozenset(GANG), processes=frozenset(GANG), sources=frozenset(), ends=frozenset(GANG),
    limits={"gang": 2}, gangs=frozenset({"gang"}),
)  # fmt: skip


def test_gang_restarts_after_all_its_workers_have_ended() -> None:
    first, second, third = GANG
    state, actions = decide(GANG_AT_WORK, missing(third), 0.0)
    assert (state.failures, actions) == ((), ())
    state, actions = decide(state, died(first), 0.0)
    assert actions[1:] == (Terminate(second, force=True), Terminate(third, force=True))
    assert state.ends_with_peers(second)
    state, actions = decide(state, ProcessEnded(third), 0.0)
    assert actions == ()
    state, actions = decide(state, ProcessEnded(second), 0.0)
    assert actions == (RestartGang(GANG, 0.0, first),)
    assert state == dataclasses.replace(GANG_AT_WORK, **restarted("gang", 1))


def test_missing_member_in_an_aborted_run_is_not_a_failure() -> None:
    # as if the gang ran on threads
    state = dataclasses.replace(GANG_AT_WORK, phase="aborting", processes=frozenset())
    state, actions = decide(state, missing(GANG[0]), 0.0)
    assert (state.failures, actions) == ((), (ReleasePorts(GANG[0]),))


def test_only_unfinished_workers_of_a_gang_restart() -> None:
    first, second, third = GANG
    state, _ = decide(GANG_AT_WORK, died(first), 0.0)
    state, _ = decide(state, ProcessEnded(third), 0.0)
    state, actions = decide(state, Ended(second), 0.0)
    assert actions == (ReleasePorts(second), RestartGang((first, third), 0.0, first))


def test_group_failures_without_deaths_use_the_gangs_restarts() -> None:
    state = GANG_AT_WORK
    for restart in (1, 2, 3):
        for worker in GANG:
            state, _ = decide(state, missing(worker), 0.0)
        for worker in GANG[:2]:
            state, actions = decide(state, ProcessEnded(worker), 0.0)
            assert actions == ()
        state, actions = decide(state, ProcessEnded(GANG[2]), 0.0)
        if restart < 3:
            assert actions[-1] == RestartGang(GANG, 0.0, None)
            assert state == dataclasses.replace(GANG_AT_WORK, **restarted("gang", restart))
    assert (state.phase, [one.worker for one in state.failures]) == ("ended", [GANG[0]])
    assert BreakChannels() in actions


def test_missing_member_is_not_reported_next_to_a_later_failure() -> None:
    """Members on other hosts may have reported the missing member earlier."""
    first, second, _ = GANG
    failure_left = dataclasses.replace(missing(second), error=MemberLeft("rank 0 has left"))
    state, _ = decide(GANG_AT_WORK, failure_left, 0.0)
    assert (state.phase, state.failures) == ("failing", (failure_left,))
    why = failure(first)
    state, _ = decide(state, why, 0.0)
    assert state.failures == (why,)


def test_failures_of_several_gang_workers_are_all_kept() -> None:
    first, second, _ = GANG
    failures = failure(SOURCE), failure(first), failure(second)
    state = dataclasses.replace(GANG_AT_WORK, alive=frozenset({*GANG, SOURCE}))
    for event in failures:
        state, _ = decide(state, event, 0.0)
    assert state.failures == failures


def test_missing_member_fails_the_gang_despite_another_workers_normal_end() -> None:
    first, second, _ = GANG
    state, _ = decide(GANG_AT_WORK, Ended(first), 0.0)
    state, actions = decide(state, missing(second), 0.0)
    assert (second in state.alive, second in state.missing_peer, actions) == (True, True, ())


@pytest.mark.parametrize("is_reported", [0, 1, 2], ids=["first", "before its process is gone", "last"])
def test_gang_ends_when_one_worker_ends_without_readers(is_reported: int) -> None:
    """Members on other hosts may report a missing member before the end of the worker is known.

    The third worker is waiting for an item.
    """
    first, second, third = GANG
    events = [missing(second), *([ProcessEnded(second)] if is_reported else [])]
    events.insert(is_reported, Ended(first, early=True))
    state = GANG_AT_WORK
    for event in events:
        state, _ = decide(state, event, 0.0)
    assert state == dataclasses.replace(
        GANG_AT_WORK, alive=frozenset({third}), no_readers=frozenset({"gang"})
    )
    state, actions = decide(state, died(third), 0.0)
    assert actions[-1] == RestartGang((third,), 0.0, third)


def test_losing_a_group_member_while_finishing_is_not_a_failure() -> None:
    state, actions = decide(dataclasses.replace(GANG_AT_WORK, phase="finishing"), missing(GANG[0]), 0.0)
    assert (state.phase, state.failures, actions) == ("finishing", (), (ReleasePorts(GANG[0]),))


def test_failing_run_does_not_wait_for_a_gang() -> None:
    first, second, third = GANG
    state = dataclasses.replace(GANG_AT_WORK, limits={})
    state, _ = decide(state, missing(third), 0.0)
    state, _ = decide(state, ProcessEnded(third), 0.0)
    state, actions = decide(state, died(first), 0.0)
    assert (state.phase, state.alive) == ("failing", frozenset({second}))
    assert actions == (BreakChannels(), ReleasePorts(first), ReleasePorts(third))
    state, _ = decide(state, missing(second), 0.0)
    assert (state.phase, [one.worker for one in state.failures]) == ("ended", [first])


def test_gang_that_fails_the_run_lets_earlier_gangs_end() -> None:
    failure_left, present, *others = (WorkerId(stage, number) for stage in ("a", "b") for number in (1, 2))
    workers = frozenset({failure_left, present, *others})
    state = PolicyState(workers, workers, frozenset(), workers, gangs=frozenset({"a", "b"}))
    actions: tuple[Any, ...] = ()
    for worker in (failure_left, *others):
        state, _ = decide(state, missing(worker), 0.0)
        state, actions = decide(state, ProcessEnded(worker), 0.0)
    assert (state.phase, state.alive, state.ended_peers) == ("failing", {present}, frozenset())
    assert ReleasePorts(failure_left) in actions


ELASTIC = dataclasses.replace(GANG_AT_WORK, elastic=frozenset({"gang"}))


def test_elastic_gang_regroups_after_a_death_and_a_replacement() -> None:
    first, second, third = GANG
    state, actions = decide(ELASTIC, died(first), 0.0)
    assert actions[1:] == (Replace(first, 0.0),)
    state, actions = decide(state, GroupLost(third, missing(third)), 0.0)
    assert actions == (EndGroup("gang"),)
    state, actions = decide(state, GroupLost(second, missing(second)), 0.0)
    assert actions == (EndGroup("gang"), FormGroup((second, third)))
    state, actions = decide(state, GroupLost(first, None), 0.0)
    assert actions == (EndGroup("gang"),)
    state, actions = decide(state, GroupLost(second, missing(second)), 0.0)
    state, actions = decide(state, Ended(third), 0.0)
    assert actions == (ReleasePorts(third), FormGroup((second, first)))  # new members come last in a group
    assert state.restarts == {"gang": 1}
    assert not state.without_group
    assert not state.joining


def test_elastic_gang_regroups_without_a_worker_that_died_waiting() -> None:
    first, second, third = GANG
    state, _ = decide(ELASTIC, died(first), 0.0)
    state, _ = decide(state, GroupLost(third, missing(third)), 0.0)
    state, _ = decide(state, died(third), 0.0)
    state, actions = decide(state, GroupLost(second, missing(second)), 0.0)
    assert actions == (EndGroup("gang"), FormGroup((second,)))


def test_elastic_gang_without_deaths_regroups_within_its_restart_limit() -> None:
    state = ELASTIC
    for meeting in (1, 2, 3):
        for worker in GANG:
            state, actions = decide(state, GroupLost(worker, missing(worker)), 0.0)
        if meeting < 3:
            assert actions[-1] == FormGroup(GANG)
    assert (state.phase, actions[-1]) == ("failing", BreakChannels())
    assert [one.worker for one in state.failures] == [GANG[0]]


def test_stop_of_the_run_stops_the_sources() -> None:
    state, actions = decide(START, StopRequested(), 7.0)
    assert (state.phase, state.since, state.stopped) == ("stopping", 7.0, True)
    assert actions == (StopSources(),)


@pytest.mark.parametrize("phase", ["finishing", "failing", "aborting"])
def test_stop_of_an_ending_run_changes_only_its_state(phase: Phase) -> None:
    state, actions = decide(at(phase), StopRequested(), 7.0)
    assert (state, actions) == (at(phase, stopped=True), ())


@pytest.mark.parametrize("phase", ["running", "stopping", "finishing"])
def test_abort_breaks_the_channels(phase: Phase) -> None:
    state, actions = decide(at(phase), AbortRequested(), 7.0)
    assert (state.phase, state.since, state.aborted) == ("aborting", 7.0, True)
    assert actions == (BreakChannels(),)


@pytest.mark.parametrize("phase", ["failing", "aborting"])
def test_abort_of_a_broken_run_changes_nothing(phase: Phase) -> None:
    assert decide(at(phase), AbortRequested(), 7.0) == (at(phase), ())


@pytest.mark.parametrize("phase", GOING_ON)
def test_aborted_run_is_unchanged_during_the_grace_period(phase: Phase) -> None:
    assert decide(at(phase), Tick(), GRACE) == (at(phase), ())


def test_no_module_imports_grace_by_name() -> None:
    """If a module imported GRACE by name, tests with ``short_grace`` would not shorten it there."""
    folder = Path(decisions.__file__).parents[1]
    imported = re.compile(rf"^from {decisions.__name__} import (\([^)]*\)|.*)", re.MULTILINE)
    found = {path: " ".join(imported.findall(path.read_text())) for path in folder.rglob("*.py")}
    assert "decide" in found[folder / "supervisor.py"]
    assert [path for path, names in found.items() if re.search(r"\bGRACE\b", names)] == []


def test_running_graph_has_no_time_limit() -> None:
    assert decide(START, Tick(), 1e9) == (START, ())


def test_stopped_run_finishes_when_only_sources_are_left() -> None:
    state, actions = decide(at("stopping", alive=frozenset({SOURCE})), Tick(), GRACE + 1)
    assert (state.phase, state.since, actions) == ("finishing", GRACE + 1, ())


def test_stopped_run_warns_once_and_discards_nothing() -> None:
    assert decide(at("stopping"), Tick(), STOP_NOTICE_S) == (at("stopping"), ())
    state, (warning,) = decide(at("stopping"), Tick(), STOP_NOTICE_S + 1)
    assert isinstance(warning, Warn)
    assert "was stopped 30 s ago and is still processing items in map, sink" in warning.text
    assert state.phase == "stopping"
    assert decide(state, Tick(), 1e9) == (state, ())
    assert next_at(state) == math.inf


def test_stopped_run_is_aborted_after_its_timeout() -> None:
    state, actions = decide(START, StopRequested(timeout=40.0), 7.0)
    assert (state.phase, actions, next_at(state)) == ("stopping", (StopSources(),), 7.0 + STOP_NOTICE_S)
    state, _ = decide(state, Tick(), 46.0)
    assert (state.phase, next_at(state)) == ("stopping", 47.0)
    state, actions = decide(state, Tick(), 47.0)
    assert (state.phase, state.aborted, actions) == ("aborting", True, (BreakChannels(),))


def test_second_stop_sets_another_timeout() -> None:
    state, _ = decide(START, StopRequested(), 0.0)
    state, actions = decide(state, StopRequested(timeout=5.0, finish_queued=False), 100.0)
    assert (state.phase, state.since, state.stop_by, actions) == ("stopping", 0.0, 105.0, (DropQueued(),))
    assert decide(state, StopRequested(), 101.0) == (state, ())


def test_stop_can_drop_the_queued_items() -> None:
    _, actions = decide(START, StopRequested(finish_queued=False), 7.0)
    assert actions == (StopSources(), DropQueued())


@pytest.mark.parametrize("phase", ["finishing", "failing", "aborting"])
def test_processes_are_terminated_then_killed_after_the_grace_period(phase: Phase) -> None:
    state, actions = decide(at(phase), Tick(), GRACE + 1)
    assert actions == (Terminate(MAP, force=False),)
    assert decide(state, Tick(), 2 * GRACE) == (state, ())
    state, actions = decide(state, Tick(), 2 * GRACE + 1)
    assert actions == (Terminate(MAP, force=True),)
    # The process will certainly die, and the report of its death is in transit.
    assert decide(state, Tick(), 1e9) == (state, ())


@pytest.mark.parametrize("phase", ["finishing", "failing", "aborting"])
def test_threads_are_abandoned_after_the_grace_period(phase: Phase) -> None:
    state, actions = decide(at(phase, alive=frozenset({SOURCE, SINK})), Tick(), GRACE + 1)
    assert (state.phase, state.alive, state.abandoned) == ("ended", frozenset(), frozenset({SOURCE, SINK}))
    assert actions == ()
