"""Test which restarts count towards the limit of a stage, and when a stage is near its limit."""

from __future__ import annotations

import pytest

from flowchan.run.policy.events import Death, WorkerId
from flowchan.run.policy.restart_limit import (
    RESTART_PERIOD_S,
    has_restart,
    restarts_used,
    use_restart,
    uses_restart,
)
from flowchan.run.policy.transitions import PolicyState


def limited(limit: int, *recent: float) -> PolicyState:
    """Return a state after the stage ``map`` was restarted at the times ``recent``."""
    return PolicyState(
        alive=frozenset(), processes=frozenset(), sources=frozenset(), ends=frozenset(),
        limits={"map": limit}, recent_restarts={"map": recent},
    )  # fmt: skip


def test_period_begins_when_the_replacement_starts() -> None:
    state, _ = use_restart(limited(9), "map", now=100.0, pause=5.0)
    end = 105.0 + RESTART_PERIOD_S
    assert restarts_used(state, "map", end - 0.5) == 1
    assert restarts_used(state, "map", end) == 0


def test_each_restart_is_counted_over_the_life_of_the_stage() -> None:
    state = limited(9)
    for number in range(1, 4):
        state, _ = use_restart(state, "map", now=100.0 * number)
        assert state.restarts == {"map": number}
        assert state.recent_restarts["map"][-1] == 100.0 * number


@pytest.mark.parametrize(
    ("counts", "over_item", "uses"), [(True, 0, True), (True, 1, False), (False, 0, False)]
)
def test_death_over_an_item_or_with_its_host_is_free(counts: bool, over_item: int, uses: bool) -> None:
    death = Death(WorkerId("map", 1), "was killed", 1, counts=counts, over_item=over_item)
    assert uses_restart(death) == uses


def test_pause_extends_the_period_of_earlier_restarts() -> None:
    """A restart is dropped from the list when it stops counting."""
    now = 100.0 + RESTART_PERIOD_S
    state, _ = use_restart(limited(9, 100.0, 110.0), "map", now, pause=5.0)
    assert state.recent_restarts == {"map": (115.0, now + 5.0)}


@pytest.mark.parametrize(("used", "has_another"), [(0, True), (1, True), (2, False), (3, False)])
def test_stage_has_no_restart_at_or_above_its_limit(used: int, has_another: bool) -> None:
    assert has_restart(limited(2, *[0.0] * used), "map", 1.0) == has_another


def test_stage_without_limit_is_never_restarted() -> None:
    assert not has_restart(limited(2), "other", 0.0)


@pytest.mark.parametrize(
    ("limit", "used", "warns"),
    [(1, 1, True), (3, 1, False), (3, 2, True), (3, 3, False), (9, 7, False), (9, 8, True), (10, 8, True)],
)
def test_warning_comes_with_the_last_fifth_of_restarts(limit: int, used: int, warns: bool) -> None:
    _, warnings = use_restart(limited(limit, *[0.0] * (used - 1)), "map", 1.0)
    assert bool(warnings) == warns
