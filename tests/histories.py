"""Random histories of state machines that are compared with a model."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings


def histories(config: pytest.Config, quick: int, long: int) -> settings:
    """How many there are, of 60 steps at most: `quick`, or `long` with the option --long."""
    return settings(
        max_examples=long if config.getoption("--long") else quick,
        stateful_step_count=60,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],  # of the machine it tells, not of the test
    )
