"""Judge from two observations whether a run can ever move again."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from flowchan.errors import Deadlock
from flowchan.run.policy.decisions import Stuck
from flowchan.run.policy.events import Failure, WorkerId
from flowchan.run.policy.explain import all_wait, explain
from flowchan.run.policy.stats import RunStats

STILL = 0.5
"""Seconds without any movement after which a run counts as stuck."""
REMEDY = (
    "raise the capacity of a channel with a blocked writer (`stream.buffer(n)`), or read "
    "its branches independently"
)
NO_STAGE_PUTS = "no stage puts an item; let one stage of the loop put before it gets, or return"
MORE_MEMORY = (
    "give the run more memory (`graph.run(memory=…)`), because a channel with a blocked "
    "writer has places but no memory"
)
"""The remedies: when a worker waits to put, when all wait to get, and when bytes are short."""


@dataclass(frozen=True, slots=True)
class Activity:
    """The result of one cheap observation of all channels.

    Attributes:
        moved: The items put and taken so far.
        reading, writing: How many workers wait now.
        opened: Whether the program may still fill an input.
        unread: Results that the program has not begun to take.
    """

    moved: int
    reading: int
    writing: int
    opened: bool = False
    unread: frozenset[WorkerId] = frozenset()


@dataclass(frozen=True, slots=True)
class Waits:
    """Waits of workers that no channel of this process shows.

    Each host is asked and answers over the connection that carries the items. So an item that was on its way
    at one observation has arrived before the next one. It shows in the counts, however slow the connection
    is.

    Attributes:
        reading, writing: How many workers on other hosts wait for an item of each channel, and to put one.
        counts: Numbers that change when one of these workers has taken or put an item, or a connection has
            broken.
        moves: Whether something may move: a worker that does not wait, a dead worker before its replacement,
            or an event loop with other work.
    """

    reading: Mapping[str, int] = field(default_factory=dict)
    writing: Mapping[str, int] = field(default_factory=dict)
    counts: tuple[int, ...] = ()
    moves: bool = False

    def put_into(self, stats: RunStats) -> RunStats:
        """Return statistics in which these waits replace those of the edges to remote workers.

        The ports here ask for items ahead and buffer outputs, so their own waits say nothing.
        """
        remote = {stage.name for stage in stats.stages if stage.hosts}
        edges = []
        for edge in stats.edges:
            if edge.reader in remote:
                edge = dataclasses.replace(edge, waiting_readers=self.reading.get(edge.name, 0))
            if edge.writer in remote:
                writers = max(edge.waiting_writers, self.writing.get(edge.name, 0))
                edge = dataclasses.replace(edge, waiting_writers=writers)
            edges.append(edge)
        return dataclasses.replace(stats, edges=tuple(edges))


@dataclass(frozen=True, slots=True)
class Observation:
    """The facts about a run at one moment that decide whether a worker can move.

    Attributes:
        stats: Its statistics.
        unread: Results that the program has not begun to take.
        inputs: The stages that the program fills.
        outside: Whether something that no channel shows may move: see :attr:`Waits.moves`.
        counts: Numbers that change when something moves on another host.
    """

    stats: RunStats
    unread: frozenset[WorkerId] = frozenset()
    inputs: frozenset[str] = frozenset()
    outside: bool = False
    counts: tuple[int, ...] = ()


def judge(before: Observation | None, now: Observation) -> Stuck | frozenset[WorkerId] | None:
    """Compare two observations of a run, ``STILL`` seconds apart.

    Args:
        before: The earlier observation, or None if it is the first.
        now: The later observation.

    Returns:
        ``Stuck`` if no worker can ever move again. The unread results that must be taken in, if they are
        full. Otherwise None.
    """
    if before is None or _progress(before) != _progress(now):
        return None
    if full := _full(before) & _full(now):
        return full
    return Stuck(_failure(now.stats)) if _none_moves(before) and _none_moves(now) else None


def _progress(seen: Observation) -> tuple[int, ...]:
    """Return numbers that change when a run moves."""
    passed = [number for edge in seen.stats.edges for number in (edge.passed, edge.inside)]
    return *passed, *(stage.restarts for stage in seen.stats.stages), *seen.counts


def _none_moves(seen: Observation) -> bool:
    return not seen.unread and not seen.outside and all_wait(seen.stats)


def _full(seen: Observation) -> frozenset[WorkerId]:
    """Return the unread results that are full."""
    stages = {id.stage for id in seen.unread}
    full = {edge.reader for edge in seen.stats.edges if edge.reader in stages and edge.waiting_writers}
    return frozenset(id for id in seen.unread if id.stage in full)


class Deadlocks:
    """The search for a deadlock of one run. It stays cheap while the activity shows that the run moves."""

    def __init__(self, now: float) -> None:
        self.next_at = now + STILL
        """When the next check is due."""
        self._moved = -1  # items moved at the last check of the activity
        self._unread: frozenset[WorkerId] | None = None  # unread results of the observation in progress
        self._before: Observation | None = None  # last observation, if the run has not moved since

    def check(
        self,
        now: float,
        alive: frozenset[WorkerId],
        activity: Callable[[], Activity],
        observe: Callable[[frozenset[WorkerId]], Observation | None],
    ) -> Stuck | frozenset[WorkerId] | None:
        """Return the present verdict.

        ``observe`` takes the unread results of the workers that are ``alive``. It returns None while other
        hosts are being asked.
        """
        if now < self.next_at:
            return None
        if self._unread is None and not self._starts_observation(activity(), alive):
            self._before, self.next_at = None, now + STILL
            return None
        assert self._unread is not None
        found = observe(self._unread)
        if found is None:
            return None
        self._unread, self.next_at = None, now + STILL
        before, self._before = self._before, found
        return judge(before, found)

    def _starts_observation(self, seen: Activity, alive: frozenset[WorkerId]) -> bool:
        """Tell whether an observation may find a deadlock. If so, the observation begins."""
        moved, self._moved = seen.moved != self._moved, seen.moved
        waiting, unread = seen.reading + seen.writing, seen.unread & alive
        if moved or not (bool(seen.writing) if unread else waiting >= len(alive) and not seen.opened):
            return False
        self._unread = unread
        return True


def _failure(stats: RunStats) -> Failure:
    putting = [edge for edge in stats.edges if edge.waiting_writers]
    stages = [edge.writer for edge in putting]
    stages += [edge.reader or edge.writer for edge in stats.edges if edge.waiting_readers]
    remedy = (
        MORE_MEMORY if any(edge.short_of_bytes for edge in putting) else REMEDY if putting else NO_STAGE_PUTS
    )
    error = Deadlock(f"every worker waits and nothing is in flight; {remedy}\n{explain(stats)}")
    return Failure(WorkerId(stages[0], 1), error, None, os.getpid())
