"""The groups of gangs on hosts, as the driver has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowchan.hosts.driver_listener import DriverListener
from flowchan.run.policy.events import WorkerId
from flowchan.run.policy.plan import PlannedWorker


class HostGangs:
    """Groups whose members meet at the driver's listener.

    Attributes:
        listener: Where they meet, once the run starts.
    """

    def __init__(self) -> None:
        self.listener: DriverListener | None = None
        # The group's number, rank and size. A worker of an elastic gang may have none for a while.
        self._members: dict[WorkerId, tuple[int, int, int]] = {}

    def form(self, ids: Sequence[WorkerId]) -> None:
        """Let these workers form a group instead of those that they were in."""
        assert self.listener is not None
        self.dismiss(ids)
        group = self.listener.expect(len(ids))
        self._members.update({id: (group, rank, len(ids)) for rank, id in enumerate(ids)})

    def dismiss(self, ids: Sequence[WorkerId], if_meeting: bool = False) -> None:
        """End the groups of these workers, or only those whose members still meet."""
        for group in {self._members[id][0] for id in ids if id in self._members}:
            assert self.listener is not None
            self.listener.dismiss(group, if_meeting)

    def leave(self, id: WorkerId) -> None:
        """End the group of a worker, which is in none from now on."""
        self.dismiss([id])
        self._members.pop(id, None)

    def membership(self, worker: PlannedWorker, host: str) -> Any:
        """Give what a worker on a host needs to join its group, or None if it has none."""
        gang, member = worker.stage.gang, self._members.get(worker.id)
        if gang is None or member is None:
            return None
        number, rank, size = member
        return gang.group._seat(number, rank, size, worker.stage.name, host, gang.elastic)
