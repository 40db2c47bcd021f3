"""Define the interface through which the supervisor starts, watches, ends and replaces workers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from flowchan.run.policy.deadlock import Waits
from flowchan.run.policy.events import Ended, Event, Failure, WorkerId
from flowchan.run.policy.stats import HostStats

Report = Callable[[Event], None]
"""Function that reports an event from any thread. It raises ``Closed`` once the run has ended."""


class CrewPart(Protocol):
    """Manages the workers of a run on this machine, or on the hosts of one pool.

    ``CrewRouter`` offers the same methods for all parts of a run. In the tests, ``ScriptedCrew`` implements
    them without workers. All methods except ``stacks`` are called only by the supervisor's thread.
    """

    def start(self, report: Report) -> None:
        """Start all workers that have a process, or raise an error.

        ``report`` receives each worker's events in the order in which the worker reported them. When the
        worker's process has ended, ``ProcessEnded`` or ``Death`` is the last event.
        """

    def replace(
        self, ids: Sequence[WorkerId], blamed: WorkerId | None, later: bool = False
    ) -> tuple[Failure | Ended, ...]:
        """Return the items of dead workers to the channels, and start replacements for the workers.

        The workers of a gang that is not elastic also get a new group.

        Args:
            ids: One worker, or all workers of a gang that must restart.
            blamed: Worker whose item may have killed it. The supervisor has terminated the other workers.
            later: If True, leave the start of the replacements to a later call of :meth:`start_workers`.

        Returns:
            Events for the workers that could not be started.
        """

    def start_workers(self, ids: Sequence[WorkerId]) -> tuple[Failure, ...]:
        """Start replacements that :meth:`replace` left for later, and return the failures."""

    def add(self, id: WorkerId) -> None:
        """Open the ports of an additional worker and start the worker. On failure, undo both and raise."""

    def remove(self, id: WorkerId) -> None:
        """Let a worker end after its current item."""

    def forget(self, id: WorkerId) -> None:
        """Forget a removed worker once its process has ended."""

    def release_ports(self, id: WorkerId) -> None:
        """Close the ports of a worker that has ended."""

    def terminate(self, id: WorkerId, force: bool) -> None:
        """Send SIGTERM to the process of a worker, or SIGKILL if ``force``."""

    def kill(self) -> None:
        """Kill every process."""

    def form_group(self, ids: Sequence[WorkerId]) -> None:
        """Form a group of workers of an elastic gang that are waiting for one.

        May raise ``OSError``.
        """

    def end_group(self, stage: str) -> None:
        """End the current group of an elastic gang."""

    def cancel_tasks(self, all_of_them: bool) -> None:
        """Cancel all coroutines, or only the coroutines of sources whose outputs have no readers."""

    def cancel_request(self, question: int) -> None:
        """Let workers drop the item of a request, because the request's caller no longer waits."""

    def all_reported(self) -> bool:
        """Return whether all reports that workers have sent so far have been passed to ``report``."""

    def waits(self, alive: frozenset[WorkerId]) -> Waits | None:
        """Return what these workers wait for, as far as no channel in this process shows it.

        Return None until all remote workers have answered; the caller must then ask again.
        """

    def hosts(self) -> tuple[HostStats, ...]:
        """Return the statistics of the other hosts that run workers."""

    def stacks(self, ids: Collection[WorkerId]) -> dict[WorkerId, str]:
        """Return the Python stacks of the running workers among ``ids``, as text.

        Any thread may call this method. If a stack is unknown, its text is a single line with the reason.
        """

    def close(self, abandoned: frozenset[WorkerId], timeout: float | None) -> frozenset[WorkerId]:
        """End all workers and helpers, except threads that do not return from user code.

        Args:
            abandoned: Workers whose threads may continue to run afterwards.
            timeout: Seconds to wait for the other threads, or None to wait until they end.

        Returns:
            The workers whose threads are still running.
        """

    def warn_of(self, abandoned: frozenset[WorkerId]) -> None:
        """Warn about threads that are still running. This raises an error if warnings count as errors."""
