"""Fixtures of the tests of runs."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker

import pytest


@pytest.fixture(params=["fork", "forkserver", "spawn"])
def _method(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test under each start method."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(request.param, force=True)
    yield request.param
    multiprocessing.set_start_method(before, force=True)
    # Python's own helpers would stay until the end of pytest.
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]
