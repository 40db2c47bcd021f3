"""The groups of gangs on this machine (``hosts/host_gangs.py`` has those on hosts).

A gang gets its group before it starts. An elastic gang gets further groups: a worker whose group has ended
reports that, and waits for its membership of the next one. Then its function is called again, first with the
item that it holds. A replacement also waits for a membership.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowchan.channel.channel import Channel
from flowchan.declare.values import Stage
from flowchan.run.policy.events import WorkerId


class Gangs:
    """The gangs of one run."""

    def __init__(self) -> None:
        self._memberships: dict[WorkerId, Any] = {}
        self._next: dict[WorkerId, Channel[Any]] = {}  # channels of later memberships in elastic gangs
        # The overseer of an elastic gang's present group, and the ranks of its members.
        self._groups: dict[str, tuple[Any, dict[WorkerId, int]]] = {}

    def form(self, stage: Stage, ids: Sequence[WorkerId]) -> None:
        """Make a group of these workers before they start."""
        assert stage.gang is not None
        members = stage.gang.group._make_all(len(ids), stage.name)
        if stage.gang.elastic:
            ranks = {id: rank for rank, id in enumerate(ids)}
            self._groups[stage.name] = members[0]._overseer(), ranks
        self._memberships.update(zip(ids, members, strict=True))

    def membership(self, id: WorkerId) -> Any:
        """Return and remove the membership of a worker that is being started, or None if it has none."""
        return self._memberships.pop(id, None)

    def next_memberships(self, id: WorkerId, stage: Stage) -> Channel[Any] | None:
        """Open the channel of later memberships for a worker that is being started."""
        if stage.gang is None or not stage.gang.elastic:
            return None
        self._next[id] = Channel(1, across="processes")
        return self._next[id]

    def meet(self, stage: Stage, ids: Sequence[WorkerId]) -> None:
        """Make a group of these workers, which wait for it."""
        self.form(stage, ids)
        for id in ids:
            self._next[id].put(self._memberships.pop(id))

    def disband(self, stage: str) -> None:
        """End the group of an elastic gang."""
        self._groups[stage][0].disband()

    def count_out(self, id: WorkerId) -> None:
        """Note that a worker has died. Its peers no longer wait for it, even if it has not joined yet."""
        overseer, ranks = self._groups.get(id.stage, (None, {}))
        if id in ranks:
            overseer.count_out(ranks[id])

    def clear(self) -> None:
        """Release everything."""
        self._memberships.clear()
        self._next.clear()
        self._groups.clear()
