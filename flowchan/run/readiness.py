"""Wait until all workers of a run have built their callables, and tell the health of the run."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from typing import NoReturn

from flowchan.items.arguments import pause, refuses_misspelt
from flowchan.items.tracebacks import methods_end_at_caller
from flowchan.run.policy.health import Health, health_of
from flowchan.run.results import Results
from flowchan.run.supervisor import Supervisor
from flowchan.transport.interrupts import signal_of

POLL_INTERVAL_S = 0.02
"""Seconds between two checks of whether all workers have begun."""


def wait_until_ready(supervisor: Supervisor, timeout: float | None) -> bool:
    """Wait until all workers have begun, the run was stopped or has ended, or ``timeout`` seconds are over.

    Return whether all workers work. A run that fails has ended when this returns.
    """
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    while True:
        stats = supervisor.stats()
        if stats.state == "running" and not any(stage.starting for stage in stats.stages):
            return True
        remaining = deadline - time.monotonic()
        goes_on = stats.state in ("running", "failed") and not supervisor.ended.is_set()
        if remaining <= 0 or not goes_on:
            return False
        supervisor.ended.wait(min(remaining, POLL_INTERVAL_S))


def _health(supervisor: Supervisor) -> Health:
    state, stats = supervisor.state, supervisor.stats()
    waiting = 0 if supervisor.asking is None else supervisor.asking.waiting
    failed = bool(state.failures) or supervisor.crashed is not None
    return health_of(stats, state, failed, waiting, time.monotonic())


@methods_end_at_caller
class Probed(ABC):
    """Part of a run that the probes of a service manager call."""

    _supervisor: Supervisor

    @abstractmethod
    def wait(self, timeout: float | None = None) -> Results: ...

    @abstractmethod
    def _failure(self) -> Exception | None: ...

    @abstractmethod
    def _end_interrupted(self, number: int, again: bool = False) -> NoReturn: ...

    @refuses_misspelt("ready")
    def ready(self, timeout: float | None = None) -> bool:
        """Wait until all workers of all stages have built their callables.

        Args:
            timeout: Seconds to wait; 0 does not wait (default: no limit).

        Returns:
            True if all workers can take items. False if some can't after ``timeout`` seconds, or if the run
            was stopped or has ended.

        Raises:
            RunError: A stage failed.
            Interrupted: Ctrl-C or SIGTERM came; it holds the results.

        Example:
            >>> from flowchan import Graph
            >>> class Model:
            ...     def __init__(self) -> None:
            ...         self.weights = 2  # loads for a minute
            ...     def __call__(self, number: int) -> int:
            ...         return self.weights * number
            >>> graph = Graph()
            >>> numbers = graph.input()
            >>> numbers.map(Model).sink(print)
            >>> with graph.start() as run:
            ...     run.ready(timeout=60)
            True
        """
        limit = pause("ready", "timeout", timeout)
        try:
            ready = wait_until_ready(self._supervisor, limit)
        except KeyboardInterrupt as interrupt:
            self._end_interrupted(signal_of(interrupt))
        if self._supervisor.ended.is_set() and self._failure() is not None:
            self.wait()
        return ready

    def health(self) -> Health:
        """Return the present health of the run: whether it is ready, its stages, and its waiting requests.

        Returns:
            The health, for the probes of a service manager.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> graph.input().sink(print, name="show")
            >>> with graph.start() as run:
            ...     failed = run.health().failed
            >>> failed, run.health().ready, run.health().stages
            (False, False, {'show': 'ended'})
        """
        return _health(self._supervisor)
