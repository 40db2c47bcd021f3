"""What kind of thing a user's function is: what lies under a partial, what gives something to await, what is
built once per worker."""

from __future__ import annotations

import functools
import inspect
from typing import Any


def bare(function: Any) -> Any:
    """What a ``functools.partial`` calls, however many lie around it."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def is_async(function: Any) -> bool:
    """Whether calling ``function`` gives something to await: an ``async def``, an async generator, a partial
    or an instance or class whose ``__call__`` is one."""
    function = bare(function)
    if is_callable_class(function) or not (inspect.isroutine(function) or inspect.isclass(function)):
        function = getattr(function, "__call__", function)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def is_callable_class(function: Any) -> bool:
    """Whether ``function`` is a class whose *instances* are called per item (built once per worker), not a
    class such as ``int`` that is itself applied to each item. ``functools.partial`` of such a class counts
    too."""
    function = bare(function)
    # ``type`` and metaclasses make classes of items
    if not inspect.isclass(function) or issubclass(function, type):
        return False
    return any("__call__" in vars(base) for base in function.__mro__)


def name_of(function: Any) -> str:
    """The name that ``def`` or ``class`` gave it; for a callable object that of its class."""
    name = getattr(bare(function), "__name__", None)
    return name if isinstance(name, str) else type(bare(function)).__name__
