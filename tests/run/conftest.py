"""Provide fixtures for the tests of runs."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker

import pytest

from flowchan.run import supervisor
from flowchan.run.policy import deadlock, decisions
from flowchan.run.supervisor import Supervisor


@pytest.fixture(params=["fork", "forkserver", "spawn"])
def _method(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test under each start method."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(request.param, force=True)
    yield request.param
    multiprocessing.set_start_method(before, force=True)
    # Python's helper processes would otherwise keep running until pytest exits.
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Count the checks for a deadlock, and let supervisors check without pauses."""
    count = itertools.count()
    seen = [0]
    real = Supervisor._check_deadlock

    def check(self: Supervisor) -> None:
        real(self)
        seen[0] = next(count)

    monkeypatch.setattr(Supervisor, "_check_deadlock", check)
    monkeypatch.setattr(supervisor, "POLL_INTERVAL_S", 0.001)
    monkeypatch.setattr(deadlock, "STILL", 0.001)
    return lambda: seen[0]


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the grace period, for tests with workers that must be terminated."""
    monkeypatch.setattr(decisions, "GRACE", 0.2)
