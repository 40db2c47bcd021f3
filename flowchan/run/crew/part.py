"""Define the interface through which the supervisor starts, watches, ends and replaces workers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from flowchan.run.policy.deadlock import Waits
from flowchan.run.policy.events import Ended, Event, Failure, WorkerId
from flowchan.run.policy.stats import HostStats

Report = Callable[[Event], None]
"""Function that reports an event, from any thread. It raises ``Closed`` once the run has ended."""


class CrewPart(Protocol):
    """Workers of a run in one place: on this machine, or on the hosts of one pool.

    ``CrewRouter`` combines all parts of a run behind the same methods. ``ScriptedCrew`` in the tests
    implements them without workers. All methods except ``stacks`` are called only by the supervisor's thread.
    """

    def start(self, report: Report) -> None:
        """Start all workers that have a process, or raise an error.

        ``report`` receives each event from a worker, in the order in which the worker reported them. When a
        worker's process has ended, ``ProcessEnded`` or ``Death`` is the last event.
        """

    def replace(
        self, ids: Sequence[WorkerId], blamed: WorkerId | None, later: bool = False
    ) -> tuple[Failure | Ended, ...]:
        """Return the items of these dead workers to the channels, and start replacements for the workers.

        Workers of a gang that is not elastic also get a new group.

        Args:
            ids: One worker, or all workers of a gang that must restart.
            blamed: Worker that may have died because of its item. The supervisor terminated the others.
            later: Do not start the replacements; a later call of :meth:`start_workers` does.

        Returns:
            Events for workers that could not be started.
        """

    def start_workers(self, ids: Sequence[WorkerId]) -> tuple[Failure, ...]:
        """Start the replacements that :meth:`replace` did not start, and return the failures."""

    def add(self, id: WorkerId) -> None:
        """Open the ports of an additional worker and start it. On an error, release everything and raise."""

    def remove(self, id: WorkerId) -> None:
        """Make a worker end after its current item."""

    def forget(self, id: WorkerId) -> None:
        """Forget a removed worker once its process has ended."""

    def release_ports(self, id: WorkerId) -> None:
        """Close the ports of a worker that has ended."""

    def terminate(self, id: WorkerId, force: bool) -> None:
        """Send SIGTERM to the process of a worker, or SIGKILL if ``force``."""

    def kill(self) -> None:
        """Kill every process."""

    def form_group(self, ids: Sequence[WorkerId]) -> None:
        """Form a group of these workers of an elastic gang, which are waiting for it.

        May raise ``OSError``.
        """

    def end_group(self, stage: str) -> None:
        """End the current group of an elastic gang."""

    def cancel_tasks(self, all_of_them: bool) -> None:
        """Cancel all coroutines, or only those of sources whose outputs have no readers."""

    def cancel_request(self, question: int) -> None:
        """Make workers drop the item of a request whose caller no longer waits."""

    def all_reported(self) -> bool:
        """Return whether every report of the workers so far has been passed to ``report``."""

    def waits(self, alive: frozenset[WorkerId]) -> Waits | None:
        """Return which of these workers wait for something that no channel in this process shows.

        Return None while remote workers are being asked; call again in that case.
        """

    def hosts(self) -> tuple[HostStats, ...]:
        """Return the statistics of the other hosts that run workers."""

    def stacks(self, ids: Collection[WorkerId]) -> dict[WorkerId, str]:
        """Return the Python stacks, as text, of those workers in ``ids`` that are running.

        Any thread may call this method. If a stack is unknown, its text is a single line with the reason.
        """

    def close(self, abandoned: frozenset[WorkerId], timeout: float | None) -> frozenset[WorkerId]:
        """End everything except threads that are stuck in user code.

        Args:
            abandoned: Workers whose threads may continue to run afterwards.
            timeout: Seconds to wait for the other threads; None means until they end.

        Returns:
            The workers whose threads are still running.
        """

    def warn_of(self, abandoned: frozenset[WorkerId]) -> None:
        """Warn about threads that are still running. This raises if warnings are turned into errors."""
