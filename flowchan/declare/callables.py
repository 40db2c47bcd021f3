"""Classify a user's function: partial or not, async or not, function or callable class."""

from __future__ import annotations

import functools
import inspect
from typing import Any


def bare(function: Any) -> Any:
    """Return the callable inside any number of nested ``functools.partial`` objects."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def is_async(function: Any) -> bool:
    """Return whether ``function`` returns something to await or to iterate over with ``async for``.

    This is the case for an ``async def`` function, an async generator function, a partial of one, and an
    instance or class whose ``__call__`` is one.
    """
    function = bare(function)
    if is_callable_class(function) or not (inspect.isroutine(function) or inspect.isclass(function)):
        function = getattr(function, "__call__", function)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def is_callable_class(function: Any) -> bool:
    """Return whether ``function`` is a class whose *instances* are called for each item.

    Each worker creates one instance. A class such as ``int`` does not count, because the class itself is
    called for each item. A ``functools.partial`` of a callable class counts.
    """
    function = bare(function)
    # ``type`` and metaclasses create a class from each item.
    if not inspect.isclass(function) or issubclass(function, type):
        return False
    return any("__call__" in vars(base) for base in function.__mro__)


def class_with_state(function: Any) -> str:
    """Return the name of the class whose instance is called for each item, if it can keep state.

    The name is empty for a function, a frozen dataclass, and a callable from native code or from flowchan.
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
    """Return the name in ``def`` or ``class``. For a callable object, return the name of its class."""
    name = getattr(bare(function), "__name__", None)
    return name if isinstance(name, str) else type(bare(function)).__name__
