"""Which exceptions say nothing of what a call was at, an item that is being pickled or a connection that is
waited for: those that the handler of a signal raised meanwhile, as one does for a time limit."""

from __future__ import annotations

import contextlib
import functools
import signal
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any


def raised_by_a_handler(error: BaseException) -> bool:
    """Whether one of this process's handlers of signals raised it."""
    if not isinstance(error, Exception):
        return True  # KeyboardInterrupt, and what else ends a program
    called = list(_called(error))
    if not called:  # nothing of Python's was, as it is with most errors of pickling
        return False
    handlers = {_code(handler) for number in signal.valid_signals() if (handler := _handler(number))}
    return not handlers.isdisjoint(called)


def _called(error: BaseException) -> Iterator[CodeType]:
    """By who catches it."""
    trace = error.__traceback__ and error.__traceback__.tb_next
    while trace is not None:
        yield trace.tb_frame.f_code
        trace = trace.tb_next


def _handler(number: int) -> Any:
    with contextlib.suppress(ValueError):  # some systems keep a signal for themselves
        return signal.getsignal(number)
    return None


def _code(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    if isinstance(handler, MethodType):
        handler = handler.__func__
    elif callable(handler) and not isinstance(handler, FunctionType):
        handler = type(handler).__call__
    code: CodeType | None = getattr(handler, "__code__", None)
    return code
