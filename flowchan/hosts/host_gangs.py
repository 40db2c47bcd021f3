"""Manage the groups of gangs on hosts, in the driver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowchan.hosts.driver_listener import DriverListener
from flowchan.run.policy.events import WorkerId
from flowchan.run.policy.plan import PlannedWorker


class HostGangs:
    """Forms and ends the groups whose rendezvous uses the driver's listener.

    Attributes:
        listener: Driver's listener, set when the run starts.
    """

    def __init__(self) -> None:
        self.listener: DriverListener | None = None
        # Each worker's group number, rank and group size. While an elastic gang forms a new group, its
        # workers have no entry.
        self._members: dict[WorkerId, tuple[int, int, int]] = {}

    def form(self, ids: Sequence[WorkerId]) -> None:
        """Form a new group of these workers, which replaces their previous groups."""
        assert self.listener is not None
        self.dismiss(ids)
        group = self.listener.expect(len(ids))
        self._members.update({id: (group, rank, len(ids)) for rank, id in enumerate(ids)})

    def dismiss(self, ids: Sequence[WorkerId], if_meeting: bool = False) -> None:
        """End these workers' groups; with ``if_meeting``, only those with an incomplete rendezvous."""
        for group in {self._members[id][0] for id in ids if id in self._members}:
            assert self.listener is not None
            self.listener.dismiss(group, if_meeting)

    def leave(self, id: WorkerId) -> None:
        """End the group of a worker, without a new group for the worker."""
        self.dismiss([id])
        self._members.pop(id, None)

    def membership(self, worker: PlannedWorker, host: str) -> Any:
        """Create the membership with which a worker on a host joins its group.

        Return None if the worker has no group.
        """
        gang, member = worker.stage.gang, self._members.get(worker.id)
        if gang is None or member is None:
            return None
        number, rank, size = member
        return gang.group._membership(number, rank, size, worker.stage.name, host, gang.elastic)
