"""Classify a user function: partial or not, async or not, function or callable class."""

from __future__ import annotations

import functools
import inspect
from typing import Any


def bare(function: Any) -> Any:
    """Return the callable inside nested ``functools.partial`` objects."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def is_async(function: Any) -> bool:
    """Return whether the result of ``function`` must be awaited or iterated over with ``async for``.

    This holds for an ``async def`` function, an async generator function, a partial of either, and a class or
    instance with such a ``__call__``.
    """
    function = bare(function)
    if is_callable_class(function) or not (inspect.isroutine(function) or inspect.isclass(function)):
        function = getattr(function, "__call__", function)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def is_callable_class(function: Any) -> bool:
    """Return whether ``function`` is a class whose *instances* are called with each item.

    Each worker creates one instance. A class such as ``int`` does not count, because the class itself is
    called with each item. A ``functools.partial`` of a callable class counts.
    """
    function = bare(function)
    # A metaclass is itself called with each item, to make a class from it.
    if not inspect.isclass(function) or issubclass(function, type):
        return False
    return any("__call__" in vars(base) for base in function.__mro__)


def class_with_state(function: Any) -> str:
    """Return the name of the class whose instance is called for each item, if the instance can hold state.

    Return an empty string for a function, a frozen dataclass, or a callable from native code or flowchan.
    """
    function = bare(function)
    if not is_callable_class(function):
        function = getattr(function, "__self__", function) if inspect.ismethod(function) else function
        if inspect.isroutine(function) or inspect.isclass(function):
            return ""
        function = type(function)
    settings = getattr(function, "__dataclass_params__", None)
    if settings is not None and settings.frozen:
        return ""
    native = not inspect.isfunction(getattr(function, "__call__", None))  # noqa: B004
    return "" if native or function.__module__.split(".")[0] == "flowchan" else function.__name__


def name_of(function: Any) -> str:
    """Return the name in the ``def`` or ``class`` statement.

    For a callable object, return the name of its class.
    """
    name = getattr(bare(function), "__name__", None)
    return name if isinstance(name, str) else type(bare(function)).__name__
