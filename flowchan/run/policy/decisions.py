"""What the supervisor decides, as pure functions: a state value and something that happened give the next
state and the actions to take. Nothing here touches a process, a thread, a channel or a clock.

The life of a run:

    running ──stop──> stopping ──┐
       │                         ├──all workers ended──> ended
       ├──failure──> failing ────┤
       ├──abort────> aborting ───┘
       └──every end of the graph reached──> finishing

In *stopping* sources are stopped and the rest drains. In *failing* and *aborting* all channels are broken,
and whoever does not end by itself is ended: processes are terminated after ``GRACE`` seconds and killed after
twice that; a thread that is stuck in the user's code can't be ended, it is given up. *finishing* is the same
without a failure: everything that the user can see has ended, the sources are stopped, and only workers are
left that nobody needs (a source that waits for its device).

A worker process that dies while the run is *running* or *stopping* is replaced as long as its stage has
restarts left: at once the first time, later after a pause that doubles with every death over the same item.

The workers of a gang begin again together: when one has died, the others are ended, and once all are gone,
all are started. Those in whose group's operation a member is missing may say so before its death is heard
of: they are *bereft*, and their word is not a failure of their own. When nobody died, one has ended because
nobody reads what they put, and then they end, too; or connections between their hosts broke, and then they
begin again, too, as long as their stage has restarts left.

Of an elastic gang only the worker that died is replaced. Who finds its group over waits for another one: all
that are at work get it once none of them has a group, and who takes the index of a dead one ends their group
when it comes, so that the next one has it, too. Groups that are over though nobody died or came are as many
as the stage has restarts.

How a stage gets more workers, or fewer: ``policy.scaling``. One that dies before it has left is replaced as
usual, and its replacement leaves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from flowchan.errors import MemberDied, MemberLeft
from flowchan.run.policy.events import Ended, Failure, GroupLost, WorkerId
from flowchan.run.policy.failures import text_of
from flowchan.run.policy.scaling import Add, Remove, Scale, Size, scaled

GRACE = 2.0
"""Seconds that a worker has to end by itself once it shall."""
STOP_SECONDS = 30.0
"""Seconds that a stopped run may go on without that any item moves, before it is aborted."""

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds before a worker is started again after the second death over the same item, and at most."""

Phase = Literal["running", "stopping", "finishing", "failing", "aborting", "ended"]


@dataclass(frozen=True, slots=True)
class Replace:
    """Give back what a dead worker had in hand, and start another in its index after ``pause`` seconds."""

    worker: WorkerId
    pause: float


@dataclass(frozen=True, slots=True)
class PolicyState:
    """All that decisions depend on. ``since`` is when the phase began, in seconds of a clock that only goes
    forward; ``ends`` are the workers of stages whose end is what the user waits for. ``restarts`` says how
    many workers of a stage have been replaced, ``limits`` how many may be.

    ``gangs`` are the stages whose workers form a group, and begin again together. ``regrouping``: for which
    death a gang is being ended; ``fallen``: its workers that are gone, and not yet replaced. ``bereft``: what
    those said in whose group somebody is missing. ``unread``: gangs of which one has ended because nobody
    reads what it puts.

    ``elastic``: gangs that go on while one of them is replaced. ``waiting``: their workers that have no
    group, with what they heard; ``coming``: their workers that are replaced and have not come yet;
    ``changed``: those gangs of which one died, ended or came since they had their group.

    ``began``: when the run did. ``sizes``: of the stages that may get more workers, or fewer. ``leaving``:
    workers that are to end."""

    alive: frozenset[WorkerId]
    processes: frozenset[WorkerId]
    sources: frozenset[WorkerId]
    ends: frozenset[WorkerId]
    limits: Mapping[str, int] = field(default_factory=dict)
    restarts: Mapping[str, int] = field(default_factory=dict)
    phase: Phase = "running"
    since: float = 0.0
    failures: tuple[Failure, ...] = ()
    stopped: bool = False
    aborted: bool = False
    terminated: bool = False
    killed: bool = False
    abandoned: frozenset[WorkerId] = frozenset()
    gangs: frozenset[str] = frozenset()
    bereft: Mapping[WorkerId, Failure] = field(default_factory=dict)
    regrouping: Mapping[str, Replace] = field(default_factory=dict)
    fallen: frozenset[WorkerId] = frozenset()
    unread: frozenset[str] = frozenset()
    elastic: frozenset[str] = frozenset()
    waiting: Mapping[WorkerId, Failure | None] = field(default_factory=dict)
    coming: frozenset[WorkerId] = frozenset()
    changed: frozenset[str] = frozenset()
    began: float = 0.0
    sizes: Mapping[str, Size] = field(default_factory=dict)
    leaving: frozenset[WorkerId] = frozenset()

    def ends_with_mates(self, worker: WorkerId) -> bool:
        """Whether the end of its process says nothing that is not known: it is bereft, or was ended so that
        all of its gang begin again."""
        return worker in self.bereft or worker.stage in self.regrouping


@dataclass(frozen=True, slots=True)
class Died:
    """A worker's process is gone without having told how it ended. ``deaths`` counts the workers that have
    died with the item that it had in hand, this one included. ``hopeless``: it dies again and again before it
    begins to work. ``counts``: as one of the restarts that its stage has, which the death of a host does
    not. ``how``, in words; empty: nothing to speak of. ``always``: another takes its index whatever the limit
    of its stage, for it took too long for an item."""

    worker: WorkerId
    failure: Failure
    deaths: int = 1
    hopeless: bool = False
    counts: bool = True
    how: str = ""
    always: bool = False


@dataclass(frozen=True, slots=True)
class MateEnded:
    """The process of a gang's worker is gone that was ended by us, or is bereft."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Stuck:
    """Nobody can ever move again; the failure says who waits for whom."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Broke:
    """Somebody has broken a channel of the run; the failure says which, who, and with what cause."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class StopAsked:
    """``run.stop()``, the first Ctrl-C, or SIGTERM."""


@dataclass(frozen=True, slots=True)
class AbortAsked:
    """``run.abort()``, or the second Ctrl-C."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Items have moved since the run was stopped, or since this was last told."""


SupervisorEvent = (
    Ended
    | Failure
    | Died
    | MateEnded
    | GroupLost
    | Stuck
    | Broke
    | StopAsked
    | AbortAsked
    | Moved
    | Tick
    | Scale
)


@dataclass(frozen=True, slots=True)
class StopSources:
    """Close the channels of all sources and inputs."""


@dataclass(frozen=True, slots=True)
class BreakChannels:
    """Abort every channel."""


@dataclass(frozen=True, slots=True)
class ReleasePorts:
    """End the sessions of a worker, however it ended."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Terminate:
    """End the worker's process; by force if it did not hear the first time."""

    worker: WorkerId
    force: bool


@dataclass(frozen=True, slots=True)
class Regroup:
    """The same for all workers of a gang, of which one ``died``, or none did."""

    workers: tuple[WorkerId, ...]
    pause: float
    died: WorkerId | None


@dataclass(frozen=True, slots=True)
class Disband:
    """End the group that workers of an elastic gang still have."""

    stage: str


@dataclass(frozen=True, slots=True)
class Meet:
    """Make a group of these workers of an elastic gang, which wait for it. Those that are new come last."""

    workers: tuple[WorkerId, ...]


Action = (
    StopSources | BreakChannels | ReleasePorts | Terminate | Replace | Regroup | Disband | Meet | Add | Remove
)


def decide(
    state: PolicyState, happening: SupervisorEvent, now: float
) -> tuple[PolicyState, tuple[Action, ...]]:
    """The next state and what to do, after ``happening`` at time ``now``."""
    if state.phase == "ended":
        return state, ()
    state, actions = _decide(state, happening, now)
    # Again: when one gang breaks the run off, those before it wait for their mates no more.
    for follow in (_settle_gangs, _let_meet, _settle_gangs):
        state, more = follow(state, now)
        actions = (*actions, *more)
    return state, actions


def _decide(
    state: PolicyState, happening: SupervisorEvent, now: float
) -> tuple[PolicyState, tuple[Action, ...]]:
    if isinstance(happening, Ended):
        return _ended(state, happening, now)
    if isinstance(happening, Died):
        return _died(state, happening, now)
    if isinstance(happening, MateEnded):
        return dataclasses.replace(state, fallen=state.fallen | {happening.worker}), ()
    if isinstance(happening, Failure):
        return _raised(state, happening, now)
    if isinstance(happening, GroupLost):
        return _bereft(state, happening)
    if isinstance(happening, Stuck):
        return _stuck(state, happening, now)
    if isinstance(happening, Broke):
        return _broke(state, happening, now)
    if isinstance(happening, StopAsked):
        if state.phase != "running":
            return dataclasses.replace(state, stopped=True), ()
        return dataclasses.replace(state, phase="stopping", since=now, stopped=True), (StopSources(),)
    if isinstance(happening, AbortAsked):
        return _abort(state, now)
    if isinstance(happening, Moved):
        return (dataclasses.replace(state, since=now) if state.phase == "stopping" else state), ()
    if isinstance(happening, Scale):
        return _scale(state, happening, now)
    return _tick(state, now)


def next_at(state: PolicyState) -> float:
    """From when on time alone changes something, if nothing happens before."""
    if state.phase == "stopping":
        return state.since + (GRACE if state.alive <= state.sources else STOP_SECONDS)
    if state.phase not in ("finishing", "failing", "aborting"):
        return math.inf
    if not state.alive & state.processes or not state.terminated:
        return state.since + GRACE
    return math.inf if state.killed else state.since + 2 * GRACE


def _ended(state: PolicyState, ended: Ended, now: float) -> tuple[PolicyState, tuple[Action, ...]]:
    stage = ended.worker.stage
    if ended.early and stage in state.gangs:
        state = dataclasses.replace(state, unread=state.unread | {stage})
    return _gone(state, ended.worker, now)


def _scale(state: PolicyState, scale: Scale, now: float) -> tuple[PolicyState, tuple[Action, ...]]:
    """Does nothing once the stage or the run comes to its end."""
    mates = frozenset(worker for worker in state.alive - state.leaving if worker.stage == scale.stage)
    if state.phase not in ("running", "stopping") or not mates:
        return state, ()
    size, new, fewer = scaled(state.sizes[scale.stage], scale, mates, now)
    new_ones = frozenset(new)
    state = dataclasses.replace(
        state,
        sizes={**state.sizes, scale.stage: size},
        alive=state.alive | new_ones,
        processes=state.processes | (new_ones if mates & state.processes else frozenset()),
        ends=state.ends | (new_ones if mates & state.ends else frozenset()),
        leaving=state.leaving | frozenset(fewer),
    )
    return state, (*map(Add, new), *map(Remove, fewer))


def _gone(state: PolicyState, worker: WorkerId, now: float) -> tuple[PolicyState, tuple[Action, ...]]:
    alive = state.alive - {worker}
    state = _forgotten(state, worker)
    phase, since = state.phase, state.since
    actions: tuple[Action, ...] = (ReleasePorts(worker),)
    if not alive:
        phase = "ended"
    elif phase in ("running", "stopping") and state.ends and not (alive & state.ends):
        if phase == "running":  # a stage that waits for an item does not see that nobody wants it
            actions = (*actions, StopSources())
        phase, since = "finishing", now
    leaving = state.leaving - {worker}
    return dataclasses.replace(state, alive=alive, phase=phase, since=since, leaving=leaving), actions


def _failed(
    state: PolicyState, failure: Failure, now: float, expected: bool
) -> tuple[PolicyState, tuple[Action, ...]]:
    """``expected``: it is no failure of the worker's own, for we have ended it, say."""
    breaking = state.phase in ("running", "stopping", "finishing") and not expected
    if not expected:
        state = dataclasses.replace(state, failures=_with(state.failures, failure))
    if breaking:
        state = dataclasses.replace(state, phase="failing", since=now)
    state, actions = _gone(state, failure.worker, now)
    return state, (*((BreakChannels(),) if breaking else ()), *actions)


def _died(state: PolicyState, died: Died, now: float) -> tuple[PolicyState, tuple[Action, ...]]:
    stage = died.worker.stage
    used, limit = state.restarts.get(stage, 0), state.limits.get(stage, 0)
    has_left = used < limit if died.counts else limit > 0
    replaceable = (died.always or has_left) and not died.hopeless
    going_on = state.phase in ("running", "stopping")
    mates = {worker for worker in state.alive if worker.stage == stage} - {died.worker}
    if going_on and replaceable:
        pause = 0.0 if died.deaths < 2 else min(FIRST_PAUSE * 2 ** min(died.deaths - 2, 30), LONGEST_PAUSE)
        restarts = {**state.restarts, stage: used + died.counts}
        state, replace = dataclasses.replace(state, restarts=restarts), Replace(died.worker, pause)
        if stage in state.elastic:
            state = _forgotten(state, died.worker)
            return dataclasses.replace(state, coming=state.coming | {died.worker}), (replace,)
        if stage not in state.gangs:
            return state, (replace,)
        regrouping = {**state.regrouping, stage: replace}
        fallen = state.fallen | {died.worker}
        state = dataclasses.replace(state, regrouping=regrouping, fallen=fallen)
        return state, _terminate(frozenset(mates - fallen), force=True)
    # A run that ends anyway has not failed by what it would have gone on after.
    expected = replaceable or state.terminated or state.phase == "finishing"
    return _failed(state, died.failure, now, expected)


def _raised(state: PolicyState, failure: Failure, now: float) -> tuple[PolicyState, tuple[Action, ...]]:
    """What a worker raised. Of a gang's it may be that another is missing, which is that one's affair."""
    stage, missed = failure.worker.stage, _missed(state, failure)
    if stage in state.gangs and not missed:  # those on other hosts may have missed it before it is heard
        own = tuple(one for one in state.failures if one.worker.stage != stage or not _missed(state, one))
        state = dataclasses.replace(state, failures=own)
    if missed and stage in state.unread:
        return _gone(state, failure.worker, now)
    if missed and state.phase not in ("running", "stopping"):
        return _failed(state, failure, now, expected=True)
    alone = isinstance(failure.error, MemberLeft) or failure.worker not in state.processes
    if not missed or alone or stage in state.elastic:
        return _failed(state, failure, now, expected=False)
    return dataclasses.replace(state, bereft={**state.bereft, failure.worker: failure}), ()


def _missed(state: PolicyState, failure: Failure) -> bool:
    return failure.worker.stage in state.gangs and isinstance(failure.error, MemberDied)


def _settle_gangs(state: PolicyState, now: float) -> tuple[PolicyState, tuple[Action, ...]]:
    """Lets a gang begin again once all that are left of it are gone; where nobody has died, and it can't
    begin again, what they raised is a failure after all. A run that does not go on waits for none of them."""
    actions: tuple[Action, ...] = ()
    for stage in sorted({worker.stage for worker in state.fallen}):
        mates = frozenset(worker for worker in state.alive if worker.stage == stage)
        fallen = sorted(state.fallen & mates, key=lambda worker: worker.number)
        going_on, died = state.phase in ("running", "stopping"), state.regrouping.get(stage)
        unread = stage in state.unread and died is None
        if going_on and len(fallen) < len(mates) and not unread:
            continue
        bereft, used = state.bereft, state.restarts.get(stage, 0)
        state = dataclasses.replace(
            state,
            fallen=frozenset(worker for worker in state.fallen if worker.stage != stage),
            bereft={worker: one for worker, one in bereft.items() if worker not in fallen},
            regrouping={name: one for name, one in state.regrouping.items() if name != stage},
        )
        if going_on and died is not None and fallen:
            actions = (*actions, Regroup(tuple(fallen), died.pause, died.worker))
            continue
        if going_on and fallen and not unread and used < state.limits.get(stage, 0):
            state = dataclasses.replace(state, restarts={**state.restarts, stage: used + 1})
            actions = (*actions, Regroup(tuple(fallen), 0.0, None))
            continue
        for worker in fallen:
            nobody_died = going_on and not unread and worker is fallen[0]
            state, more = (
                _failed(state, bereft[worker], now, expected=False)
                if nobody_died
                else _gone(state, worker, now)
            )
            actions = (*actions, *more)
    return state, actions


def _bereft(state: PolicyState, bereft: GroupLost) -> tuple[PolicyState, tuple[Action, ...]]:
    worker = bereft.worker
    if worker not in state.alive:
        return state, ()
    changed = state.changed | {worker.stage} if worker in state.coming else state.changed
    waiting = {**state.waiting, worker: bereft.failure}
    state = dataclasses.replace(state, waiting=waiting, coming=state.coming - {worker}, changed=changed)
    return state, (Disband(worker.stage),)


def _forgotten(state: PolicyState, worker: WorkerId) -> PolicyState:
    """Without a worker that is no more, of whose gang the others are to have a group of their own."""
    if worker.stage not in state.elastic:
        return state
    waiting = {other: heard for other, heard in state.waiting.items() if other != worker}
    changed = state.changed | {worker.stage}
    return dataclasses.replace(state, waiting=waiting, coming=state.coming - {worker}, changed=changed)


def _let_meet(state: PolicyState, now: float) -> tuple[PolicyState, tuple[Action, ...]]:
    """Gives elastic gangs their groups of which all wait for one that are at work."""
    actions: tuple[Action, ...] = ()
    for stage in sorted({worker.stage for worker in state.waiting}):
        mates = {worker for worker in state.alive - state.coming if worker.stage == stage}
        if state.phase in ("failing", "aborting") or not mates <= state.waiting.keys():
            continue
        used = state.restarts.get(stage, 0)
        if stage not in state.changed:
            heard = [one for worker, one in state.waiting.items() if worker in mates and one is not None]
            if used >= state.limits.get(stage, 0) and heard:
                state, more = _stuck(state, Stuck(heard[0]), now)
                actions = (*actions, *more)
                continue
            state = dataclasses.replace(state, restarts={**state.restarts, stage: used + 1})
        new = {worker for worker in mates if state.waiting[worker] is None}
        waiting = {worker: one for worker, one in state.waiting.items() if worker not in mates}
        state = dataclasses.replace(state, waiting=waiting, changed=state.changed - {stage})
        actions = (*actions, Meet((*_by_number(mates - new), *_by_number(new))))
    return state, actions


def _by_number(workers: set[WorkerId]) -> list[WorkerId]:
    return sorted(workers, key=lambda worker: worker.number)


def _stuck(state: PolicyState, stuck: Stuck, now: float) -> tuple[PolicyState, tuple[Action, ...]]:
    if state.phase not in ("running", "stopping"):
        return state, ()
    failures = (*state.failures, stuck.failure)
    return dataclasses.replace(state, failures=failures, phase="failing", since=now), (BreakChannels(),)


def _broke(state: PolicyState, broke: Broke, now: float) -> tuple[PolicyState, tuple[Action, ...]]:
    breaking = state.phase in ("running", "stopping", "finishing")
    state = dataclasses.replace(state, failures=_with(state.failures, broke.failure))
    if not breaking:
        return state, ()
    return dataclasses.replace(state, phase="failing", since=now), (BreakChannels(),)


def _with(failures: tuple[Failure, ...], new: Failure) -> tuple[Failure, ...]:
    """A stage may raise what it has aborted its channel with: that is one failure."""
    for index, old in enumerate(failures):
        if (
            old.channel is not None
            and old.worker in (new.worker, WorkerId(new.worker.stage, 0))
            and _same(old, new)
        ):
            return (*failures[:index], dataclasses.replace(new, channel=old.channel), *failures[index + 1 :])
    return (*failures, new)


def _same(one: Failure, other: Failure) -> bool:
    return one.error is other.error or text_of(one.error) == text_of(other.error)


def _abort(state: PolicyState, now: float) -> tuple[PolicyState, tuple[Action, ...]]:
    if state.phase in ("failing", "aborting"):
        return state, ()
    return dataclasses.replace(state, phase="aborting", since=now, aborted=True), (BreakChannels(),)


def _tick(state: PolicyState, now: float) -> tuple[PolicyState, tuple[Action, ...]]:
    waited = now - state.since
    if state.phase == "stopping":
        # the rest has drained; only blocked sources are left
        if state.alive <= state.sources and waited > GRACE:
            return dataclasses.replace(state, phase="finishing", since=now), ()
        return _abort(state, now) if waited > STOP_SECONDS else (state, ())
    if state.phase not in ("finishing", "failing", "aborting") or waited <= GRACE:
        return state, ()
    stuck = state.alive & state.processes
    if stuck:
        if not state.terminated:
            return dataclasses.replace(state, terminated=True), _terminate(stuck, force=False)
        if waited > 2 * GRACE and not state.killed:
            return dataclasses.replace(state, killed=True), _terminate(stuck, force=True)
        return state, ()
    return dataclasses.replace(state, phase="ended", alive=frozenset(), abandoned=state.alive), ()


def _terminate(workers: frozenset[WorkerId], force: bool) -> tuple[Action, ...]:
    return tuple(Terminate(worker, force) for worker in sorted(workers, key=str))
