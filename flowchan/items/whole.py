"""What counts as a whole number, wherever an argument has to be one."""

from __future__ import annotations

from typing import Any, TypeGuard

from flowchan.items.text import shown


def is_whole(value: Any) -> TypeGuard[int]:
    """Whether it is an int; a bool is one by descent only."""
    return isinstance(value, int) and not isinstance(value, bool)


def whole(call: str, argument: str, value: Any, least: int, most: int | None = None) -> int:
    """The value, if it is an int within these bounds; else ``TypeError`` or ``ValueError``, which name the
    call, the argument, the value and what is allowed."""
    if not is_whole(value):
        raise TypeError(f"{call}: {argument} must be an int of at least {least}, not {shown(value)}")
    if value < least:
        raise ValueError(f"{call}: {argument} must be at least {least}, not {value}")
    if most is not None and value > most:
        raise ValueError(f"{call}: {argument} must be at most {most:,}, not {value}")
    return value
