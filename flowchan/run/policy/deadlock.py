"""Whether a run can ever move again, judged by two looks at it."""

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
NOBODY_PUTS = "nobody puts: let one stage of the loop put before it gets, or end by returning"
MORE_MEMORY = (
    "give the run more memory (`graph.run(memory=…)`): a channel with a blocked writer "
    "has places, but no bytes"
)
"""What to do when everybody waits, and somebody of them to put; when all wait to get; and when bytes are what
is short."""


@dataclass(frozen=True, slots=True)
class Glance:
    """What one cheap look at all channels tells: the items put and taken so far, how many wait now, whether
    the program may still fill an input, and which results it has not begun to take."""

    moved: int
    reading: int
    writing: int
    opened: bool = False
    unread: frozenset[WorkerId] = frozenset()


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """What the workers on other hosts do: how many wait for an item of each channel, and how many to put one
    into it. ``counts`` change when one of them has taken or put an item, or a connection has broken.
    ``moves``: not all of them wait.

    Each host has been asked over the connection that carries the items, and answers over it. So what was on
    its way when one look was made has arrived before the next one, however slow the connection is, and
    shows in the counts."""

    reading: Mapping[str, int] = field(default_factory=dict)
    writing: Mapping[str, int] = field(default_factory=dict)
    counts: tuple[int, ...] = ()
    moves: bool = False

    def put_into(self, stats: RunStats) -> RunStats:
        """The statistics of a run with the waits of these workers instead of those of the edges that have
        their ports here: an edge asks for items ahead, and waits for room for what is done already."""
        away = {stage.name for stage in stats.stages if stage.hosts}
        edges = []
        for edge in stats.edges:
            if edge.reader in away:
                edge = dataclasses.replace(edge, waiting_readers=self.reading.get(edge.name, 0))
            if edge.writer in away:
                writers = max(edge.waiting_writers, self.writing.get(edge.name, 0))
                edge = dataclasses.replace(edge, waiting_writers=writers)
            edges.append(edge)
        return dataclasses.replace(stats, edges=tuple(edges))


@dataclass(frozen=True, slots=True)
class Look:
    """A run at one moment, as far as it matters for whether anybody can move. ``unread`` results are those
    that the program has not begun to take, ``inputs`` the stages that it fills. ``outside``: something that
    no channel shows may go on, such as an event loop with other work, a worker that has died and is not
    yet replaced, or one on another host. ``counts`` change when something moves there."""

    stats: RunStats
    unread: frozenset[WorkerId] = frozenset()
    inputs: frozenset[str] = frozenset()
    outside: bool = False
    counts: tuple[int, ...] = ()


def judge(before: Look | None, now: Look) -> Stuck | frozenset[WorkerId] | None:
    """What two looks, ``STILL`` seconds apart, say of a run: that nobody can ever move again, and why; or
    which of the unread results must be taken in first, for they are full and the program can't come to read
    them; or nothing."""
    if before is None or _progress(before) != _progress(now):
        return None
    if full := _full(before) & _full(now):
        return full
    return Stuck(_told(now.stats)) if _nobody_moves(before) and _nobody_moves(now) else None


def _progress(look: Look) -> tuple[int, ...]:
    """What changes when a run moves."""
    passed = [number for edge in look.stats.edges for number in (edge.passed, edge.inside)]
    return *passed, *(stage.restarts for stage in look.stats.stages), *look.counts


def _nobody_moves(look: Look) -> bool:
    return not look.unread and not look.outside and all_wait(look.stats)


def _full(look: Look) -> frozenset[WorkerId]:
    """The unread results that are full, if the program waits elsewhere: to put into an input, or for an item
    of another result."""

    def waits(edge: EdgeStats) -> bool:
        return bool(edge.waiting_writers if edge.writer in look.inputs else edge.waiting_readers)

    stages = {id.stage for id in look.unread}
    full = {edge.reader for edge in look.stats.edges if edge.reader in stages and edge.waiting_writers}
    ends = [edge for edge in look.stats.edges if edge.reader in stages or edge.writer in look.inputs]
    return frozenset(id for id in look.unread if id.stage in full) if any(map(waits, ends)) else frozenset()


class Deadlocks:
    """When to look at one run, and how closely. Usually a glance tells that it moves."""

    def __init__(self, now: float) -> None:
        self.next_at = now + STILL
        """When the next look is due."""
        self._moved = -1  # at the last glance
        self._unread: frozenset[WorkerId] | None = None  # a look at these has begun
        self._before: Look | None = None  # the last look at which it had not moved

    def look(
        self,
        now: float,
        alive: frozenset[WorkerId],
        glance: Callable[[], Glance],
        look: Callable[[frozenset[WorkerId]], Look | None],
    ) -> Stuck | frozenset[WorkerId] | None:
        """What is found now. ``look`` takes the unread results of the workers that are ``alive``; while it
        gives ``None``, other hosts are being asked."""
        if now < self.next_at:
            return None
        if self._unread is None and not self._is_worth_it(glance(), alive):
            self._before, self.next_at = None, now + STILL
            return None
        assert self._unread is not None
        found = look(self._unread)
        if found is None:
            return None
        self._unread, self.next_at = None, now + STILL
        before, self._before = self._before, found
        return judge(before, found)

    def _is_worth_it(self, seen: Glance, alive: frozenset[WorkerId]) -> bool:
        """Whether a closer look may find something, which begins then."""
        moved, self._moved = seen.moved != self._moved, seen.moved
        waiting, unread = seen.reading + seen.writing, seen.unread & alive
        if moved or not (bool(seen.writing) if unread else waiting >= len(alive) and not seen.opened):
            return False
        self._unread = unread
        return True


def _told(stats: RunStats) -> Failure:
    putting = [edge for edge in stats.edges if edge.waiting_writers]
    stages = [edge.writer for edge in putting]
    stages += [edge.reader or edge.writer for edge in stats.edges if edge.waiting_readers]
    remedy = (
        MORE_MEMORY if any(edge.short_of_bytes for edge in putting) else REMEDY if putting else NOBODY_PUTS
    )
    error = Deadlock(f"every worker waits and nothing is in flight; {remedy}\n{explain(stats)}")
    return Failure(WorkerId(stages[0], 1), error, None, os.getpid())
