"""Protocol of a part of a crew, which the supervisor uses to start, watch, end and replace workers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from flowchan.run.policy.deadlock import Waits
from flowchan.run.policy.events import Ended, Event, Failure, WorkerId
from flowchan.run.policy.stats import HostStats

Report = Callable[[Event], None]
"""Function that reports an event, on any thread. It raises ``Closed`` after the run has ended."""


class CrewPart(Protocol):
    """The workers of a run in one place: on this machine, or on the hosts of one pool.

    ``CrewRouter`` has the same methods for all parts of a run together. ``ScriptedCrew`` in the tests
    implements them without any workers. Only the supervisor's thread calls these methods, except ``stacks``.
    """

    def start(self, report: Report) -> None:
        """Start all workers that have a process, or raise an error.

        ``report`` is called with each event from a worker, in the order in which the worker reported them.
        When the process of a worker has ended, ``ProcessEnded`` or ``Death`` follows as its last event.
        """

    def replace(
        self, ids: Sequence[WorkerId], blamed: WorkerId | None, later: bool = False
    ) -> tuple[Failure | Ended, ...]:
        """Give the items of these dead workers back to the channels, and start replacements.

        If the workers form a gang that is not elastic, they also get a new group.

        Args:
            ids: One worker, or all workers of a gang that is to restart.
            blamed: The worker that may have died because of its item. The supervisor terminated the others.
            later: Do not start the replacements. A later call to :meth:`start_workers` does.

        Returns:
            Events for the workers that could not be started.
        """

    def start_workers(self, ids: Sequence[WorkerId]) -> tuple[Failure, ...]:
        """Start the replacements that :meth:`replace` did not start, and return the failures."""

    def add(self, id: WorkerId) -> None:
        """Open the ports of an additional worker and start it. On an error, release everything and raise."""

    def remove(self, id: WorkerId) -> None:
        """Let a worker end after its current item."""

    def forget(self, id: WorkerId) -> None:
        """Forget a worker that was removed, after its process has ended."""

    def release_ports(self, id: WorkerId) -> None:
        """Close the ports of a worker that has ended."""

    def terminate(self, id: WorkerId, force: bool) -> None:
        """Send SIGTERM to the process of a worker, or SIGKILL if ``force``."""

    def kill(self) -> None:
        """Kill every process."""

    def form_group(self, ids: Sequence[WorkerId]) -> None:
        """Form a group of these waiting workers of an elastic gang. May raise ``OSError``."""

    def end_group(self, stage: str) -> None:
        """End the current group of an elastic gang."""

    def cancel_tasks(self, all_of_them: bool) -> None:
        """Cancel all coroutines, or only those of sources whose outputs have no readers left."""

    def cancel_request(self, question: int) -> None:
        """Let workers drop the item of a request whose caller has stopped waiting."""

    def all_reported(self) -> bool:
        """Return whether everything that workers have reported so far has been passed to ``report``."""

    def waits(self, alive: frozenset[WorkerId]) -> Waits | None:
        """Return which of these workers are waiting although no channel in this process shows it.

        The result is None while remote workers are being asked; the call must then be repeated.
        """

    def hosts(self) -> tuple[HostStats, ...]:
        """Return the statistics of the other hosts on which workers run."""

    def stacks(self, ids: Collection[WorkerId]) -> dict[WorkerId, str]:
        """Return the Python stacks of the running workers among ``ids``, as text.

        Any thread may call this method. If a stack is unknown, its text is one line with the reason.
        """

    def close(self, abandoned: frozenset[WorkerId], timeout: float | None) -> frozenset[WorkerId]:
        """End everything except threads that are stuck in the user's code.

        Args:
            abandoned: Workers whose threads may still be running afterwards.
            timeout: Seconds to wait for other threads; None waits until they end.

        Returns:
            The workers whose threads are still running.
        """

    def warn_of(self, abandoned: frozenset[WorkerId]) -> None:
        """Warn about threads that are still running. This raises if warnings are turned into errors."""
