"""Form the groups of gangs on this machine; ``hosts/host_gangs.py`` does so for gangs on hosts.

A gang gets its group before its workers start. An elastic gang can get further groups. A worker whose group
has ended reports this, and waits for its membership in the next group. A replacement begins with this wait.
The worker then calls its function again, with the unfinished item first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowchan.channel.channel import Channel
from flowchan.declare.values import Stage
from flowchan.run.policy.events import WorkerId


class Gangs:
    """Keeps the groups of the gangs of one run."""

    def __init__(self) -> None:
        self._memberships: dict[WorkerId, Any] = {}
        # Channels through which workers of elastic gangs get their later memberships.
        self._next: dict[WorkerId, Channel[Any]] = {}
        # For each elastic gang: the overseer of its current group, and the ranks of the members.
        self._groups: dict[str, tuple[Any, dict[WorkerId, int]]] = {}

    def form(self, stage: Stage, ids: Sequence[WorkerId]) -> None:
        """Form a group of workers that are about to start."""
        assert stage.gang is not None
        members = stage.gang.group._make_all(len(ids), stage.name)
        if stage.gang.elastic:
            ranks = {id: rank for rank, id in enumerate(ids)}
            self._groups[stage.name] = members[0]._overseer(), ranks
        self._memberships.update(zip(ids, members, strict=True))

    def membership(self, id: WorkerId) -> Any:
        """Remove and return the membership of a worker that is about to start, or None if it has none."""
        return self._memberships.pop(id, None)

    def next_memberships(self, id: WorkerId, stage: Stage) -> Channel[Any] | None:
        """Open the channel that will deliver a worker's later memberships, if its gang is elastic."""
        if stage.gang is None or not stage.gang.elastic:
            return None
        self._next[id] = Channel(1, across="processes")
        return self._next[id]

    def meet(self, stage: Stage, ids: Sequence[WorkerId]) -> None:
        """Form a group of running workers that are waiting for one."""
        self.form(stage, ids)
        for id in ids:
            self._next[id].put(self._memberships.pop(id))

    def disband(self, stage: str) -> None:
        """End the current group of an elastic gang."""
        self._groups[stage][0].disband()

    def count_out(self, id: WorkerId) -> None:
        """Report a worker's death to its group, so that peers stop waiting for a worker that never joined."""
        overseer, ranks = self._groups.get(id.stage, (None, {}))
        if id in ranks:
            overseer.count_out(ranks[id])

    def clear(self) -> None:
        """Forget all groups."""
        self._memberships.clear()
        self._next.clear()
        self._groups.clear()
