"""Call a user's function for a remote caller, and pass any exception back to the caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flowchan.declare.callables import name_of as declared


class ExitRequested(Exception):
    """Wrapper for a ``BaseException`` that is not an ``Exception``, such as ``SystemExit``.

    The wrapped exception ends only the call that raised it. The worker continues, because it also serves
    other calls. ``args[0]`` is the wrapped exception.
    """


def call(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return ``fn(*args, **kwargs)``, but wrap exceptions such as ``SystemExit`` in ``ExitRequested``."""
    try:
        return fn(*args, **kwargs)
    except Exception:
        raise
    except BaseException as error:
        raise ExitRequested(error) from error


def reason(error: BaseException) -> BaseException:
    """Return the exception that the user's function raised, given the ``error`` that :func:`call` raised."""
    return error.args[0] if isinstance(error, ExitRequested) else error


def name_of(fn: Callable[..., Any]) -> str:
    """Return the function's name for use in messages."""
    return declared(fn).strip("<>")
