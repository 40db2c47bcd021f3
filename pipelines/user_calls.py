"""Call a user's function for another caller, who receives whatever it raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flowchan.declare.callables import name_of as declared


class ExitRequested(Exception):
    """The function raised a ``BaseException`` that is not an ``Exception``, such as ``SystemExit``.

    This ends the call, but not the shared worker. ``args[0]`` is the original exception.
    """


def call(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return ``fn(*args, **kwargs)``, and turn any ``BaseException`` into an ``Exception``."""
    try:
        return fn(*args, **kwargs)
    except Exception:
        raise
    except BaseException as error:
        raise ExitRequested(error) from error


def reason(error: BaseException) -> BaseException:
    """Return the original exception of an error from :func:`call`."""
    return error.args[0] if isinstance(error, ExitRequested) else error


def name_of(fn: Callable[..., Any]) -> str:
    """Return a name of the function for messages."""
    return declared(fn).strip("<>")
