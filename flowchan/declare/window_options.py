"""Check the options of windows and joins, and convert them for the stage."""

from __future__ import annotations

import math
from typing import Any

from flowchan.declare.callables import is_async, is_callable_class
from flowchan.declare.options import PlainOptions
from flowchan.items.arguments import callable_argument, finite_pause, finite_seconds, known_options, whole
from flowchan.items.text import shown

WINDOW_ARGUMENTS = ("size", "seconds", "every", "key", "time", "allowed_lateness")
JOIN_ARGUMENTS = ("key", "within", "time", "other_key", "other_time", "allowed_lateness")


def window_options(
    options: PlainOptions, size: Any, length: Any, every: Any, key: Any, time: Any, allowed_lateness: Any
) -> dict[str, Any]:
    """Check the options of ``window``, and return the options of its stage."""
    kind = "window"
    known_options(kind, options, (*WINDOW_ARGUMENTS, *PlainOptions.__annotations__))
    if (size is None) == (length is None):
        given = "both" if size is not None else "neither"
        raise TypeError(f"{kind}: either size (items) or seconds must be passed, got {given}")
    if size is not None:
        own: dict[str, Any] = {"size": whole(kind, "size", size, 1), "seconds": None}
        step = size if every is None else whole(kind, "every", every, 1)
        if time is not None or allowed_lateness != 0:
            raise TypeError(f"{kind}: time and allowed_lateness require seconds=, the length of a window")
    else:
        own = {"size": None, "seconds": finite_seconds(kind, "seconds", length)}
        step = own["seconds"] if every is None else finite_seconds(kind, "every", every)
    if step > (size if length is None else length):
        raise ValueError(
            f"{kind}: every must be at most the length of a window, got {step}; otherwise items between two "
            "windows would be lost"
        )
    return {**own, "every": step, **_by_time(kind, key, time, allowed_lateness)}


def group_options(options: PlainOptions, key: Any) -> dict[str, Any]:
    """Check the key of ``group_by``, and return options for windows that last until the stream ends."""
    known_options("group_by", options, ("key", *PlainOptions.__annotations__))
    _function("group_by", "key", key)
    return {"size": math.inf, "seconds": None, "every": math.inf, "key": key}


def join_options(
    options: PlainOptions,
    within: Any,
    key: Any,
    other_key: Any,
    time: Any,
    other_time: Any,
    allowed_lateness: Any,
) -> dict[str, Any]:
    """Check the options of ``join``, and return the options of its stage."""
    known_options("join", options, (*JOIN_ARGUMENTS, *PlainOptions.__annotations__))
    _function("join", "key", key)
    for name, function in (("other_key", other_key), ("other_time", other_time)):
        if function is not None:
            _function("join", name, function)
    if other_time is not None and time is None:
        raise TypeError(
            "join: other_time also requires time=, a function that returns the time of an item of this stream"
        )
    return {
        "within": finite_seconds("join", "within", within),
        "other_key": key if other_key is None else other_key,
        "other_time": time if other_time is None else other_time,
        **_by_time("join", key, time, allowed_lateness),
    }


def _by_time(kind: str, key: Any, time: Any, allowed_lateness: Any) -> dict[str, Any]:
    for name, function in (("key", key), ("time", time)):
        if function is not None:
            _function(kind, name, function)
    lateness = finite_pause(kind, "allowed_lateness", allowed_lateness)
    if lateness and time is None:
        raise TypeError(
            f"{kind}: allowed_lateness requires time=; without time=, windows use the times of arrival, "
            "and no item is late"
        )
    return {"key": key, "time": time, "allowed_lateness": lateness}


def _function(kind: str, name: str, function: Any) -> None:
    callable_argument(kind, name, function)
    if is_async(function) or is_callable_class(function):
        raise TypeError(f"{kind}: {name} must be a function that is not async, got {shown(function)}")
