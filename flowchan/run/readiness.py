"""Wait until all workers of a run have built their callables, and report the health of the run."""

from __future__ import annotations

import math
import time

from flowchan.run.policy.health import Health, health_of
from flowchan.run.supervisor import Supervisor

POLL_INTERVAL_S = 0.02
"""Seconds between checks whether all workers have begun."""


def wait_until_ready(supervisor: Supervisor, timeout: float | None) -> bool:
    """Wait until all workers have begun, the run stops or ends, or ``timeout`` seconds have passed.

    Return whether all workers have begun. If the run fails, return only after its end, when the error is
    known.
    """
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    while True:
        asked = time.monotonic()
        stats = supervisor.stats()
        if stats.state == "running" and not any(stage.starting for stage in stats.stages):
            return True
        now = time.monotonic()
        remaining = deadline - now
        goes_on = stats.state in ("running", "failed") and not supervisor.ended.is_set()
        if remaining <= 0 or not goes_on:
            return False
        # Collecting the statistics of many workers takes a long time. Wait at least as long, so that the
        # workers can start in the meantime.
        supervisor.ended.wait(min(remaining, max(POLL_INTERVAL_S, now - asked)))


def health(supervisor: Supervisor) -> Health:
    """Return the current health of a run."""
    state, stats = supervisor.state, supervisor.stats()
    waiting = 0 if supervisor.asking is None else supervisor.asking.waiting
    failed = bool(state.failures) or supervisor.crashed is not None
    return health_of(stats, state, failed, waiting, time.monotonic())
