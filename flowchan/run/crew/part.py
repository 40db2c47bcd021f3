"""The protocol of a part of a crew. The supervisor uses it to start, watch, end and replace workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from flowchan.run.policy.deadlock import Waits
from flowchan.run.policy.events import Ended, Event, Failure, WorkerId
from flowchan.run.policy.stats import HostStats

Report = Callable[[Event], None]
"""Takes an event, on any thread. Raises ``Closed`` once the run is over."""


class CrewPart(Protocol):
    """The workers of a run in one place: on this machine, or on the hosts of one pool.

    ``CrewRouter`` has the same methods and covers all parts of a run. ``ScriptedCrew`` in the tests has no
    workers at all. Only the supervisor's thread calls a part.
    """

    def start(self, report: Report) -> None:
        """Start all workers that have a process, or raise.

        ``report`` receives each event of a worker in the worker's order. When its process has ended,
        ``ProcessEnded`` or ``Death`` follows everything that the worker reported.
        """

    def replace(
        self, ids: Sequence[WorkerId], blamed: WorkerId | None, later: bool = False
    ) -> tuple[Failure | Ended, ...]:
        """Give back the items that these dead workers held, and start their replacements.

        The workers of a gang that is not elastic get a new group.

        Args:
            ids: One worker, or all workers of a gang that are to restart.
            blamed: The worker whose item may have killed it. The supervisor has ended the others.
            later: Do not start them; :meth:`start_workers` follows.

        Returns:
            The ends of those that could not be started.
        """

    def start_workers(self, ids: Sequence[WorkerId]) -> tuple[Failure, ...]:
        """Start the replacements that were put off by ``later``. Return the failed ones."""

    def add(self, id: WorkerId) -> None:
        """Open the ports of an additional worker and start it, or release everything of it and raise."""

    def remove(self, id: WorkerId) -> None:
        """Let a worker end after its item."""

    def forget(self, id: WorkerId) -> None:
        """Forget a worker that was removed and whose process has ended."""

    def release_ports(self, id: WorkerId) -> None:
        """Close the ports of a worker that has ended."""

    def terminate(self, id: WorkerId, force: bool) -> None:
        """Send SIGTERM to the process of a worker, or SIGKILL if ``force``."""

    def kill(self) -> None:
        """Kill every process."""

    def form_group(self, ids: Sequence[WorkerId]) -> None:
        """Make a group of these workers of an elastic gang, which wait for it. Raises ``OSError``."""

    def end_group(self, stage: str) -> None:
        """End the group of an elastic gang."""

    def cancel_tasks(self, all_of_them: bool) -> None:
        """Cancel coroutines: all, or only those of sources whose outputs have no readers any more."""

    def cancel_request(self, question: int) -> None:
        """Let workers drop the item of a request whose caller has left."""

    def all_reported(self) -> bool:
        """Tell whether everything that workers have reported so far has reached ``report``."""

    def waits(self, alive: frozenset[WorkerId]) -> Waits | None:
        """Report the waits of these workers that no channel of this process shows.

        None: they are being asked, and the call has to be repeated.
        """

    def hosts(self) -> tuple[HostStats, ...]:
        """Return the statistics of the hosts on which workers run, without this machine."""

    def close(self, abandoned: frozenset[WorkerId], timeout: float | None) -> frozenset[WorkerId]:
        """End everything except threads that are stuck in the user's code.

        Args:
            abandoned: Workers that are given up.
            timeout: Seconds to wait for the threads of other workers; None waits until they end.

        Returns:
            The workers whose threads still run.
        """

    def warn_of(self, abandoned: frozenset[WorkerId]) -> None:
        """Warn of threads that still run. Raises if warnings are turned into errors."""
