"""The checks that every declaring call makes on its arguments, at once, so that the error stands at the user's line.

Each function returns the value it was given, and raises ``TypeError`` (wrong kind) or ``ValueError`` (not allowed)
with the name of the call, the argument, the value and what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

from flowchan.stage import Placement

PLACEMENTS: tuple[str, ...] = get_args(Placement)


def whole(call: str, argument: str, value: Any, least: int) -> int:
    """An int of at least ``least``; a bool is not one."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{call}: {argument} must be an int of at least {least}, not {shown(value)}")
    if value < least:
        raise ValueError(f"{call}: {argument} must be at least {least}, not {value}")
    return value


def seconds(call: str, argument: str, value: Any) -> float | None:
    """A number of seconds greater than zero, or ``None`` for no limit."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{call}: {argument} must be a number of seconds or None, not {shown(value)}")
    if math.isnan(value) or value <= 0:
        raise ValueError(f"{call}: {argument} must be greater than 0 seconds (None: no limit), not {value}")
    return value


def placement(call: str, value: Any) -> Placement:
    """One of the words that ``on=`` takes."""
    if value not in PLACEMENTS:
        error = ValueError if isinstance(value, str) else TypeError
        allowed = " or ".join(f'"{word}"' for word in PLACEMENTS)
        raise error(f"{call}: on must be {allowed}, not {shown(value)}")
    return "process" if value == "process" else "thread"


def flag(call: str, argument: str, value: Any) -> bool:
    """A bool, and nothing that merely is true or false."""
    if not isinstance(value, bool):
        raise TypeError(f"{call}: {argument} must be True or False, not {shown(value)}")
    return value


def text(call: str, argument: str, value: Any) -> str:
    """A string that is not empty."""
    if not isinstance(value, str):
        raise TypeError(f"{call}: {argument} must be a string, not {shown(value)}")
    if not value.strip():
        raise ValueError(f"{call}: {argument} must not be empty")
    return value


def callable_argument(call: str, argument: str, value: Any) -> Callable[..., Any]:
    """Anything that can be called: a function, a class, a callable object."""
    if not callable(value):
        raise TypeError(f"{call}: {argument} must be a function or a callable class, not {shown(value)}")
    called: Callable[..., Any] = value
    return called


def shown(value: Any) -> str:
    """The value with its type, short enough for one line; the repr of a user's object may be long, or fail."""
    kind = type(value).__name__
    try:
        shown = repr(value)
    except Exception:
        return f"a {kind}"
    return f"{shown if len(shown) <= 60 else shown[:57] + '...'} ({kind})"
