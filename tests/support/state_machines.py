"""Hypothesis settings for state machines that are compared with a model."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings


def histories(longer: bool, quick: int, long: int) -> settings:
    """Return settings for ``quick`` histories, or for ``long`` if ``longer``, with at most 60 steps each."""
    return settings(
        max_examples=long if longer else quick,
        stateful_step_count=60,
        deadline=None,
        database=None,
        # Shrinking a failing history could exceed the time limit of the test, and the history would be lost.
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow],  # the speed depends on the machine, not on the test
    )
