"""Count a stage's restarts against its limit.

The limit applies to a period, like the intensity and period of an Erlang/OTP supervisor, or
``StartLimitBurst`` and ``StartLimitIntervalSec`` of systemd. A service can therefore run for years, but a
stage whose workers keep dying still ends the run.

A restart counts until the stage has worked for ``RESTART_PERIOD_S`` seconds after the death. Pauses before
replacements are not work. If pauses counted, long pauses would hide that workers of a stage die again and
again. A death that is blamed on an item does not use a restart, because ``max_deaths`` already limits such
deaths.
"""

from __future__ import annotations

import dataclasses

from flowchan.run.policy.actions import Warn
from flowchan.run.policy.events import Death
from flowchan.run.policy.transitions import Decision, PolicyState

RESTART_PERIOD_S = 60.0
"""Seconds of work after which a restart no longer counts."""


def uses_restart(death: Death) -> bool:
    """Return whether replacing the worker after this death uses up one of the stage's restarts."""
    return death.counts and not death.over_item


def restarts_used(state: PolicyState, stage: str, now: float) -> int:
    """Return the number of a stage's restarts that count against its limit at time ``now``."""
    return len(_counted(state, stage, now))


def has_restart(state: PolicyState, stage: str, now: float) -> bool:
    """Return whether a stage has a restart left."""
    return restarts_used(state, stage, now) < state.limits.get(stage, 0)


def use_restart(state: PolicyState, stage: str, now: float, pause: float = 0.0) -> Decision:
    """Count a restart that follows after ``pause`` seconds, and warn if the limit is near."""
    counted = _counted(state, stage, now)
    recent = (*(at + pause for at in counted), now + pause)
    state = dataclasses.replace(
        state,
        restarts={**state.restarts, stage: state.restarts.get(stage, 0) + 1},
        recent_restarts={**state.recent_restarts, stage: recent},
    )
    limit = state.limits.get(stage, 0)
    if not _is_near(len(recent), limit) or _is_near(len(counted), limit):
        return state, ()
    text = (
        f"stage {stage!r} has used {len(recent)} of {limit} restarts in {RESTART_PERIOD_S:g} s; "
        "once all are used, the next death ends the run"
    )
    return state, (Warn(stage, "restarts", text),)


def _counted(state: PolicyState, stage: str, now: float) -> tuple[float, ...]:
    return tuple(at for at in state.recent_restarts.get(stage, ()) if now - at < RESTART_PERIOD_S)


def _is_near(used: int, limit: int) -> bool:
    """Return whether at most one restart, or at most a fifth of the restarts, is left."""
    return used > 0 and limit - used <= max(1, limit // 5)
