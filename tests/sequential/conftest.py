"""One compute thread, as on a machine where every part has a core: then the results of parts and of the plain
module can be compared bit for bit."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def _one_compute_thread(one_compute_thread: None) -> None:
    """For every test here."""
