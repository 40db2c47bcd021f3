"""Random histories of state machines that are compared with a model."""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def histories(longer: bool, quick: int, long: int) -> settings:
    """How many there are, of 60 steps at most: `quick`, or `long` if they are to be ``longer``."""
    return settings(
        max_examples=long if longer else quick,
        stateful_step_count=60,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],  # of the machine it tells, not of the test
    )
