"""Shorten the tracebacks of flowchan's own errors, so that they end near the user's call."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type)

_PACKAGE = __name__.partition(".")[0]
_RAISE = dis.opmap["RAISE_VARARGS"]


def ends_at_caller(function: Function) -> Function:
    """Shorten the tracebacks of errors that flowchan raises in a public function.

    A shortened traceback contains only the caller's line and the ``raise`` statement.
    """

    @functools.wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except Exception as error:
            error.__traceback__ = shortened(error.__traceback__)
            raise  # a bare raise adds no traceback entry for this frame

    return cast(Function, called)


def methods_end_at_caller(cls: Class) -> Class:
    """Apply :func:`ends_at_caller` to the public methods of a class that have no other decorator."""
    for name, value in list(vars(cls).items()):
        if (
            inspect.isfunction(value)
            and not name.startswith("_")
            and not hasattr(value, "__wrapped__")
            and not inspect.iscoroutinefunction(value)
        ):
            setattr(cls, name, ends_at_caller(value))
    return cls


def from_users_code(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback from its first entry in user code on. Without such an entry, return all of it."""
    step = trace
    while step is not None:
        module = step.tb_frame.f_globals.get("__name__", "")
        if not _is_of_flowchan(module) and module != "contextlib":
            return step
        step = step.tb_next
    return trace


def _is_of_flowchan(module: str) -> bool:
    return module == _PACKAGE or module.startswith(f"{_PACKAGE}.")


def shortened(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without its first entry, which is that of a decorator.

    If all other entries are in flowchan and the last is a ``raise`` statement, return only the last. All
    entries remain if the error comes from user code or reveals a defect in flowchan.
    """
    first = last = trace and trace.tb_next
    while last is not None:
        if not _is_of_flowchan(last.tb_frame.f_globals.get("__name__", "")):
            return first
        if last.tb_next is None:
            code = last.tb_frame.f_code.co_code
            return last if code[last.tb_lasti] == _RAISE else first
        last = last.tb_next
    return first
