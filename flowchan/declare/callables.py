"""Classify user functions: partials, async functions and callable classes."""

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
    """Return whether ``function`` is a class whose instances, one per worker, are called with each item.

    The class may be wrapped in ``functools.partial``. A class without a ``__call__`` method, such as ``int``,
    does not count, because the stage calls the class itself with each item.
    """
    function = bare(function)
    # If the callable is a metaclass, the stage calls it directly with each item, to create a class.
    if not inspect.isclass(function) or issubclass(function, type):
        return False
    return any("__call__" in vars(base) for base in function.__mro__)


def class_with_state(function: Any) -> str:
    """Return the name of a callable object's class if the object can hold state between items.

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
    """Return the name of a function or class, or the name of a callable object's class."""
    name = getattr(bare(function), "__name__", None)
    return name if isinstance(name, str) else type(bare(function)).__name__
