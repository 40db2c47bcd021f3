"""Build the callable of a worker: the user's function, or an instance of a callable class.

Each worker builds one instance, and closes it when the worker ends. The workers of an async stage may share
an instance.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from flowchan.declare.callables import is_async, is_callable_class
from flowchan.errors import Broken, Closed

Function = Callable[..., Any]


def nothing() -> None:
    """Do nothing."""


def _made(function: Function | None) -> tuple[Function, Callable[[], Any]]:
    """Return the callable and a function that closes it."""
    if function is None or not is_callable_class(function):
        return function or nothing, nothing
    instance = function()
    close = getattr(instance, "close", None)
    return instance, close if callable(close) else nothing


def _made_to_call(function: Function | None) -> tuple[Function, Callable[[], Any]]:
    """Return the callable as a synchronous function, and a function that closes it.

    Only a worker with its own process can have an async function here.
    """
    call, close = _made(function)
    if not is_async(call):
        return call, close
    from flowchan.run.worker.async_calls import Driven  # imported late, because asyncio is slow to import

    driven = Driven()
    return driven.around(call), functools.partial(driven.close, close)


@contextlib.contextmanager
def built(function: Function | None) -> Iterator[Function]:
    """Build the callable of a worker for one run, and close it at the end."""
    call, close = _made_to_call(function)
    try:
        yield call
    finally:
        close()


class AsyncCallable:
    """Callable that async workers share. The first worker builds it, and the last worker closes it.

    Args:
        workers: Number of workers that use the callable.
        on_close: Called just before the callable is closed.
    """

    def __init__(self, workers: int, on_close: Callable[[], None]) -> None:
        self._workers = workers
        self._on_close = on_close
        self._made: tuple[Function, Callable[[], Any]] | None = None

    @contextlib.asynccontextmanager
    async def built(self, function: Function | None) -> AsyncIterator[Function]:
        """Build the callable, or reuse it, for one worker. Its ``close`` method may be async."""
        try:
            self._made = self._made or _made(function)
            yield self._made[0]
        finally:
            self._workers -= 1
            if self._workers == 0 and self._made is not None:
                self._on_close()
                if inspect.isawaitable(closing := self._made[1]()):
                    await closing


class PooledCallable:
    """Callable that a worker keeps for several runs. The first run builds it.

    It is closed after the last run, or after a failure.
    """

    def __init__(self) -> None:
        self._made: tuple[Function, Callable[[], Any]] | None = None

    @contextlib.contextmanager
    def built(self, function: Function | None) -> Iterator[Function]:
        """Build or reuse the callable for one run."""
        if self._made is None:
            self._made = _made_to_call(function)
        try:
            yield self._made[0]
        except (Closed, Broken):  # the run has ended
            raise
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        made, self._made = self._made, None
        if made is not None:
            made[1]()
