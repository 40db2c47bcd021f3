"""Calling a user's function for somebody else, who shall hear of whatever it raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flowchan.declare.callables import name_of as declared


class AskedToExit(Exception):
    """The function raised what is no ``Exception``: it asked its own worker to exit, say. That ends the call,
    and not the workers of others. ``args[0]`` is what it raised."""


def call(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """``fn(*args, **kwargs)``; what it raises is an ``Exception`` in any case."""
    try:
        return fn(*args, **kwargs)
    except Exception:
        raise
    except BaseException as error:
        raise AskedToExit(error) from error


def reason(error: BaseException) -> BaseException:
    """What the function raised, whatever :func:`call` made of it."""
    return error.args[0] if isinstance(error, AskedToExit) else error


def name_of(fn: Callable[..., Any]) -> str:
    """A name for what the function does, for messages."""
    return declared(fn).strip("<>")
