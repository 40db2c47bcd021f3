"""Detect that a run is deadlocked, by comparing two observations of the run."""

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
"""Seconds between two observations. If nothing has moved in between, the run may be stuck."""
REMEDY = (
    "raise the capacity of a channel with a blocked writer (`stream.buffer(n)`), or read the branches "
    "of the graph independently"
)
NO_STAGE_PUTS = "no stage puts an item; one stage in the loop must put an item before it gets one, or return"
MORE_MEMORY = (
    "give the run more memory (`graph.run(memory=…)`), because a channel with a blocked "
    "writer has room for more items, but not for their bytes"
)
"""Remedies for three cases: some worker waits to put, all workers wait to get, or memory is short."""


@dataclass(frozen=True, slots=True)
class Activity:
    """Counts that are cheap to read from all channels.

    Attributes:
        moved: Number of items put and taken so far.
        reading, writing: Numbers of workers that wait to take an item and to put one.
        opened: True if the program may still put items into an input.
        unread: Workers whose results the program has not begun to read.
    """

    moved: int
    reading: int
    writing: int
    opened: bool = False
    unread: frozenset[WorkerId] = frozenset()


@dataclass(frozen=True, slots=True)
class Waits:
    """Waits of workers on other hosts, which no channel in this process shows.

    The question to a host and its answer travel over the same connection as the host's items. An item in
    transit during one observation has therefore arrived before the next observation, however slow the
    connection is. The counts then include the item.

    Attributes:
        reading, writing: For each channel, the number of remote workers that wait to take an item or to put
            one.
        counts: Numbers that change if one of these workers takes or puts an item, or if a connection breaks.
        moves: True if the run may still make progress: a worker does not wait, a dead worker awaits its
            replacement, or an event loop is busy.
    """

    reading: Mapping[str, int] = field(default_factory=dict)
    writing: Mapping[str, int] = field(default_factory=dict)
    counts: tuple[int, ...] = ()
    moves: bool = False

    def put_into(self, stats: RunStats) -> RunStats:
        """Return the statistics, with these waits filled in for the edges of remote workers.

        In this process, the ports of these edges prefetch items and buffer outputs. Their waits therefore do
        not show whether the remote workers wait.
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
    """State of a run at one moment, from which a deadlock can be recognised.

    Attributes:
        stats: Statistics of the run.
        unread: Workers whose results the program has not begun to read.
        inputs: Stages into which the program puts items.
        outside: True if the run may make progress that no channel shows; see :attr:`Waits.moves`.
        counts: Numbers that change whenever an item on another host makes progress.
    """

    stats: RunStats
    unread: frozenset[WorkerId] = frozenset()
    inputs: frozenset[str] = frozenset()
    outside: bool = False
    counts: tuple[int, ...] = ()


def judge(before: Observation | None, now: Observation) -> Stuck | frozenset[WorkerId] | None:
    """Compare two observations that were made ``STILL`` seconds apart.

    Args:
        before: The earlier observation, or None if ``now`` is the first one.
        now: The later observation.

    Returns:
        The workers whose unread results fill their channels, if any; the run must then collect these results.
        Otherwise, ``Stuck`` if no worker can ever continue, or None if a worker can.
    """
    if before is None or _progress(before) != _progress(now):
        return None
    if full := _full(before) & _full(now):
        return full
    return Stuck(_failure(now.stats)) if _none_moves(before) and _none_moves(now) else None


def _progress(seen: Observation) -> tuple[int, ...]:
    """Return counts that change if the run makes progress."""
    passed = [number for edge in seen.stats.edges for number in (edge.passed, edge.inside)]
    return *passed, *(stage.restarts for stage in seen.stats.stages), *seen.counts


def _none_moves(seen: Observation) -> bool:
    return not seen.unread and not seen.outside and all_wait(seen.stats)


def _full(seen: Observation) -> frozenset[WorkerId]:
    """Return the workers that collect results which the program does not read and whose channels are full."""
    stages = {id.stage for id in seen.unread}
    full = {edge.reader for edge in seen.stats.edges if edge.reader in stages and edge.waiting_writers}
    return frozenset(id for id in seen.unread if id.stage in full)


class Deadlocks:
    """Detects deadlocks of one run. While items move, only counts that are cheap to read are read."""

    def __init__(self, now: float) -> None:
        self.next_at = now + STILL
        """Time of the next check."""
        self._moved = -1  # total number of items moved, as of the last check
        self._unread: frozenset[WorkerId] | None = None  # unread results, while an observation is being made
        self._before: Observation | None = None  # previous observation, if nothing has moved since then

    def check(
        self,
        now: float,
        alive: frozenset[WorkerId],
        activity: Callable[[], Activity],
        observe: Callable[[frozenset[WorkerId]], Observation | None],
    ) -> Stuck | frozenset[WorkerId] | None:
        """Return the result of :func:`judge`, or None if no check is due or an answer is missing.

        ``observe`` receives the workers in ``alive`` that have unread results, and returns an observation.
        ``observe`` returns None while answers from other hosts are missing.
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
        """Start an observation if it could reveal a deadlock, and return whether one was started."""
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
    error = Deadlock(f"every worker is waiting, so no item can move on; {remedy}\n{explain(stats)}")
    return Failure(WorkerId(stages[0], 1), error, None, os.getpid())
