"""Check arguments inside the user's call, so that the traceback ends at the user's line.

Each function returns the checked value. A wrong type raises ``TypeError``, and a value out of range raises
``ValueError``. The message names the call, the argument, the allowed values and the given value.
"""

from __future__ import annotations

import functools
import inspect
import math
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeGuard, TypeVar, cast

from flowchan.items.text import shown
from flowchan.items.tracebacks import shortened

Function = TypeVar("Function", bound=Callable[..., Any])


def is_whole(value: Any) -> TypeGuard[int]:
    """Return whether the value is an int, but not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def whole(call: str, argument: str, value: Any, least: int, most: int | None = None) -> int:
    """Check that the value is an int within the bounds."""
    if not is_whole(value):
        raise TypeError(f"{call}: {argument} must be an int of at least {least}, got {shown(value)}")
    if value < least:
        raise ValueError(f"{call}: {argument} must be at least {least}, got {value}")
    if most is not None and value > most:
        raise ValueError(f"{call}: {argument} must be at most {most:,}, got {value}")
    return value


def seconds(call: str, argument: str, value: Any) -> float | None:
    """Check that the value is a positive number of seconds, or ``None`` for no limit."""
    return None if value is None else _seconds(call, argument, value, " or None", " (None: no limit)")


def finite_seconds(call: str, argument: str, value: Any) -> float:
    """Check that the value is a positive number of seconds."""
    return _seconds(call, argument, value, "", "")


def pause(call: str, argument: str, value: Any) -> float | None:
    """Check that the value is a non-negative number of seconds, or ``None`` for no pause."""
    return None if value is None else _pause(call, argument, value, " or None")


def finite_pause(call: str, argument: str, value: Any) -> float:
    """Check that the value is a non-negative number of seconds."""
    return _pause(call, argument, value, "")


def _pause(call: str, argument: str, value: Any, or_none: str) -> float:
    length = _number(call, argument, value, or_none)
    if not length >= 0:
        raise ValueError(f"{call}: {argument} must be at least 0 seconds, got {value}")
    return length


def _seconds(call: str, argument: str, value: Any, or_none: str, no_limit: str) -> float:
    length = _number(call, argument, value, or_none)
    if not length > 0:
        raise ValueError(f"{call}: {argument} must be greater than 0 seconds{no_limit}, got {value}")
    return length


def _number(call: str, argument: str, value: Any, or_none: str) -> float:
    """Convert a number of seconds to a float, limited to the longest time that Python can wait."""
    length = _as_float(value)
    if length is None:
        raise TypeError(f"{call}: {argument} must be a number of seconds{or_none}, got {shown(value)}")
    return min(length, threading.TIMEOUT_MAX)


def _as_float(value: Any) -> float | None:
    """Return a real number as a float, which may be infinite, or ``None`` if the value is not a number."""
    if type(value) not in (int, float):
        from decimal import Decimal  # both imported late, because few programs pass such a number
        from numbers import Real

        if isinstance(value, bool) or not isinstance(value, (Real, Decimal)):
            return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def per_second(call: str, argument: str, value: Any) -> float | None:
    """Check that the value is a positive number of items per second, or ``None`` for no limit."""
    if value is None:
        return None
    number = _as_float(value)
    if number is None:
        raise TypeError(
            f"{call}: {argument} must be a number of items per second or None, got {shown(value)}"
        )
    if not 0 < number < math.inf:
        raise ValueError(
            f"{call}: {argument} must be greater than 0 and finite, or None for no limit, got {value}"
        )
    return number


def flag(call: str, argument: str, value: Any) -> bool:
    """Check that the value is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{call}: {argument} must be True or False, got {shown(value)}")
    return value


def text(call: str, argument: str, value: Any) -> str:
    """Check that the value is a string that is neither empty nor blank."""
    if not isinstance(value, str):
        raise TypeError(f"{call}: {argument} must be a string, got {shown(value)}")
    if not value.strip():
        raise ValueError(f"{call}: {argument} must not be empty, got {value!r}")
    return value


def callable_argument(call: str, argument: str, value: Any) -> Callable[..., Any]:
    """Check that the value is callable, such as a function or a class."""
    if not callable(value):
        raise TypeError(f"{call}: {argument} must be a function or a callable class, got {shown(value)}")
    called: Callable[..., Any] = value
    return called


def errors_argument(call: str, argument: str, value: Any) -> tuple[type[Exception], ...]:
    """Check that the value is an exception class or a tuple of exception classes, and return a tuple."""
    classes = value if isinstance(value, tuple) else (value,)
    for one in classes:
        if not isinstance(one, type) or not issubclass(one, Exception):
            raise TypeError(
                f"{call}: {argument} must be a subclass of Exception, or a tuple of such classes, got "
                f"{shown(one)}"
            )
    return classes


def secret_bytes(call: str, secret: Any, advice: str = "for example secrets.token_bytes(16)") -> bytes:
    """Check the secret with which peers authenticate each other."""
    from flowchan.transport.authentication import SECRET  # imported late, because few programs need it

    if not isinstance(secret, bytes):
        raise TypeError(
            f"{call}: secret must be a bytes object of length {SECRET} or more, got "
            f"{type(secret).__name__}; {advice}"
        )
    if len(secret) < SECRET:
        raise ValueError(f"{call}: secret must have at least {SECRET} bytes, got {len(secret)}; {advice}")
    return secret


# --- options that a call does not have ---


def known_options(call: str, options: Iterable[str], known: Iterable[str]) -> None:
    """Raise ``TypeError`` for an unknown option, with the most similar known option as a suggestion."""
    known = tuple(known)
    for name in options:
        if name not in known:
            near = near_misses(name, known)
            rest = f"did you mean {near[0]!r}?" if near else f"the options are {', '.join(known)}"
            raise TypeError(f"{call}: unknown option {name!r}; {rest}")


def near_misses(name: str, known: Iterable[str]) -> list[str]:
    """Return a list with the most similar known name, or an empty list if no known name is similar."""
    from difflib import get_close_matches  # imported late, because only misspelt names need it

    return get_close_matches(name, list(known), 1)


def refuses_misspelt(call: str, options: Iterable[str] = ()) -> Callable[[Function], Function]:
    """Let a function suggest the right name when a caller misspells an option.

    The message begins with ``call``, the name of the call that users know. Python 3.13 and later also make
    suggestions, but with the name in the function's definition. The check costs an extra Python call, so
    functions that run for each item do not use it. ``options`` lists what the function accepts as
    ``**options``. Like :func:`~flowchan.items.tracebacks.ends_at_caller`, the decorator also shortens
    tracebacks.
    """

    def refusing(function: Function) -> Function:
        code = function.__code__
        taken = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        known = (*(name for name in taken if name != "self"), *options)

        @functools.wraps(function)
        def checked(*args: Any, **given: Any) -> Any:
            try:
                if given:
                    known_options(call, given, known)
                return function(*args, **given)
            except Exception as error:
                error.__traceback__ = shortened(error.__traceback__)
                raise  # a bare raise adds no traceback entry for this frame

        return cast(Function, checked)

    return refusing


def no_misspelt_option(
    call: str, function: Callable[..., Any], passed: Iterable[str], known: Iterable[str]
) -> None:
    """Raise ``TypeError`` for a misspelt option, in a call that passes other options to a user's function.

    An option is rejected only if it resembles an option of the call and the function does not accept it.
    ``check`` reports other unknown options, with the line of the function.
    """
    known = tuple(known)
    try:
        takes = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes):
        return
    names = {parameter.name for parameter in takes}
    known_options(
        call,
        (name for name in passed if name not in names and near_misses(name, known)),
        known,
    )
