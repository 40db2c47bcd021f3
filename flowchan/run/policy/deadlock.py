"""Judges by two observations whether a run can ever move again."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from flowchan.errors import Deadlock
from flowchan.run.policy.decisions import Stuck
from flowchan.run.policy.events import Failure, WorkerId
from flowchan.run.policy.explain import all_wait, explain
from flowchan.run.policy.stats import EdgeStats, RunStats

STILL = 0.5
"""Seconds for which nothing must move before a run counts as stuck."""
REMEDY = (
    "raise the capacity of a channel with a blocked writer (`stream.buffer(n)`), or read its "
    "branches independently"
)
NO_STAGE_PUTS = "no stage puts: let one stage of the loop put before it gets, or end by returning"
MORE_MEMORY = (
    "give the run more memory (`graph.run(memory=…)`): a channel with a blocked writer "
    "has places, but no bytes"
)
"""The remedy when a worker waits to put; when all wait to get; and when bytes are short."""


@dataclass(frozen=True, slots=True)
class Activity:
    """The result of one cheap look at all channels.

    Attributes:
        moved: The items put and taken so far.
        reading, writing: How many workers wait now.
        opened: The program may still fill an input.
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

    Each host is asked over the connection that carries the items, and answers over it. So an item that was on
    its way at one observation has arrived before the next one and shows in the counts, however slow the
    connection is.

    Attributes:
        reading, writing: How many workers on other hosts wait for an item of each channel, and to put one.
        counts: Change when one of these workers has taken or put an item, or a connection has broken.
        moves: Something goes on: not all of these workers wait, a dead worker is not yet replaced, or an
            event loop has other work than its channels.
    """

    reading: Mapping[str, int] = field(default_factory=dict)
    writing: Mapping[str, int] = field(default_factory=dict)
    counts: tuple[int, ...] = ()
    moves: bool = False

    def put_into(self, stats: RunStats) -> RunStats:
        """Give the statistics of a run with the waits of these workers in place of those of their edges,
        which ask for items ahead, and wait for room for outputs."""
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
    """A run at one moment, as far as it matters for whether a worker can move.

    Attributes:
        stats: Its statistics.
        unread: Results that the program has not begun to take.
        inputs: The stages that the program fills.
        outside: Something that no channel shows may go on: see :attr:`Waits.moves`.
        counts: Change when something moves on another host.
    """

    stats: RunStats
    unread: frozenset[WorkerId] = frozenset()
    inputs: frozenset[str] = frozenset()
    outside: bool = False
    counts: tuple[int, ...] = ()


def judge(before: Observation | None, now: Observation) -> Stuck | frozenset[WorkerId] | None:
    """Compare two observations of a run, ``STILL`` seconds apart.

    Returns:
        ``Stuck`` if no worker can ever move again; the unread results that must be taken in, because they are
        full and the program waits for something else; or None.
    """
    if before is None or _progress(before) != _progress(now):
        return None
    if full := _full(before) & _full(now):
        return full
    return Stuck(_failure(now.stats)) if _none_moves(before) and _none_moves(now) else None


def _progress(seen: Observation) -> tuple[int, ...]:
    """Give numbers that change when a run moves."""
    passed = [number for edge in seen.stats.edges for number in (edge.passed, edge.inside)]
    return *passed, *(stage.restarts for stage in seen.stats.stages), *seen.counts


def _none_moves(seen: Observation) -> bool:
    return not seen.unread and not seen.outside and all_wait(seen.stats)


def _full(seen: Observation) -> frozenset[WorkerId]:
    """The unread results that are full, if the program waits elsewhere: to put into an input, or for an item
    of another result."""

    def waits(edge: EdgeStats) -> bool:
        return bool(edge.waiting_writers if edge.writer in seen.inputs else edge.waiting_readers)

    stages = {id.stage for id in seen.unread}
    full = {edge.reader for edge in seen.stats.edges if edge.reader in stages and edge.waiting_writers}
    ends = [edge for edge in seen.stats.edges if edge.reader in stages or edge.writer in seen.inputs]
    return frozenset(id for id in seen.unread if id.stage in full) if any(map(waits, ends)) else frozenset()


class Deadlocks:
    """Looks for a deadlock of one run. Usually its activity shows that it moves."""

    def __init__(self, now: float) -> None:
        self.next_at = now + STILL
        """When the next look is due."""
        self._moved = -1  # at the last look at the activity
        self._unread: frozenset[WorkerId] | None = None  # an observation with these has begun
        self._before: Observation | None = None  # the last one at which the run had not moved

    def look(
        self,
        now: float,
        alive: frozenset[WorkerId],
        activity: Callable[[], Activity],
        observe: Callable[[frozenset[WorkerId]], Observation | None],
    ) -> Stuck | frozenset[WorkerId] | None:
        """Give what is found now. ``observe`` takes the unread results of the workers that are ``alive``;
        while it gives None, other hosts are being asked."""
        if now < self.next_at:
            return None
        if self._unread is None and not self._is_worth_it(activity(), alive):
            self._before, self.next_at = None, now + STILL
            return None
        assert self._unread is not None
        found = observe(self._unread)
        if found is None:
            return None
        self._unread, self.next_at = None, now + STILL
        before, self._before = self._before, found
        return judge(before, found)

    def _is_worth_it(self, seen: Activity, alive: frozenset[WorkerId]) -> bool:
        """Tell whether an observation may find something, which begins then."""
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
