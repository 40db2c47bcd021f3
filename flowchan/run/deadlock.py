"""Whether a run can ever move again, found out by looking at its channels now and then."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from flowchan import _core
from flowchan.channel.awaiting import only_wait_for
from flowchan.errors import Deadlock
from flowchan.run.decisions import State, Stuck
from flowchan.run.events import Failure, WorkerId
from flowchan.run.explain import all_wait, explain
from flowchan.run.opening import Opened
from flowchan.run.plan import Plan
from flowchan.run.stats import RunStats

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


class Deadlocks:
    """The looks at one run. Two of them ``STILL`` seconds apart at which every worker waits and no count has
    changed: nobody can move. Unless somebody outside can: an input that is open, or a result that the user
    may still take."""

    def __init__(self, plan: Plan, opened: Opened, now: float) -> None:
        self.next_at = now + STILL
        """When the next look is due."""
        self._plan = plan
        self._opened = opened
        self._channels = list(opened.channels.values())
        self._moved = -1  # items put and taken, at the last look
        self._counts: object = None  # of the last look at which every worker waited

    def look(
        self, state: State, unread: frozenset[WorkerId], dying: bool, statistics: Callable[[], RunStats]
    ) -> Stuck | frozenset[WorkerId]:
        """What is told when nobody can move; or those of the ``unread`` results that must be taken in first.
        Usually neither, which one native look at all channels tells. ``dying``: a worker has died and is not
        yet replaced."""
        nothing: frozenset[WorkerId] = frozenset()
        now = time.monotonic()
        if now < self.next_at:
            return nothing
        self.next_at = now + STILL
        moved, reading, writing = _core._look_at(self._channels)
        before, self._moved = self._moved, moved
        if moved != before:
            self._counts = None
            return nothing
        if unread and writing:
            return self._full(unread)
        opened = any(not out.channel.closed for out in self._opened.inputs.values())
        # A worker that died while it waited counts as waiting until it is replaced.
        if unread or opened or dying or reading + writing < len(state.alive):
            self._counts = None
            return nothing
        stats = statistics()
        counts = (state.restarts, moved) if all_wait(stats) and only_wait_for(self._channels) else None
        again, self._counts = counts is not None and counts == self._counts, counts
        return Stuck(_told(stats)) if again else nothing

    def _full(self, unread: frozenset[WorkerId]) -> frozenset[WorkerId]:
        """Nothing moves because a result is full that nobody reads yet, and the program can't come to read
        it: it waits to put into an input, or for an item of another result. So that one is taken in."""
        stages = {id.stage for id in unread}
        links = [
            (link, self._opened.channels[link.name].stats())
            for link in self._plan.links
            if link.reader in stages or link.writer in self._plan.inputs
        ]
        full = {link.reader for link, stats in links if link.reader in stages and stats.waiting_writers}
        waits = any(
            stats.waiting_writers
            if link.writer in self._plan.inputs
            else stats.waiting_readers and link.reader in stages
            for link, stats in links
        )
        counts = self._moved if full and waits else None
        again, self._counts = counts is not None and counts == self._counts, counts
        return frozenset(id for id in unread if id.stage in full) if again else frozenset()


def _told(stats: RunStats) -> Failure:
    putting = [link for link in stats.links if link.waiting_writers]
    stages = [link.writer for link in putting]
    stages += [link.reader or link.writer for link in stats.links if link.waiting_readers]
    remedy = (
        MORE_MEMORY if any(link.short_of_bytes for link in putting) else REMEDY if putting else NOBODY_PUTS
    )
    error = Deadlock(f"every worker waits and nothing is in flight; {remedy}\n{explain(stats)}")
    return Failure(WorkerId(stages[0], 1), error, None, os.getpid())
