"""What a worker calls: the user's function or, of a callable class, an instance of its own, which is built
once and closed at the end."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from flowchan.declare.callables import is_async, is_callable_class
from flowchan.errors import Broken, Closed

Function = Callable[..., Any]


def nothing() -> None: ...


def _made(function: Function | None) -> tuple[Function, Callable[[], Any]]:
    """What is to be called, and what closes it."""
    if function is None or not is_callable_class(function):
        return function or nothing, nothing
    instance = function()
    close = getattr(instance, "close", None)
    return instance, close if callable(close) else nothing


def _made_to_call(function: Function | None) -> tuple[Function, Callable[[], Any]]:
    """The same for who waits for each call. Only in processes a worker of its own has an async function."""
    call, close = _made(function)
    if not is_async(call):
        return call, close
    from flowchan.run.worker.async_calls import Driven  # asyncio is slow to import

    driven = Driven()
    return driven.around(call), functools.partial(driven.close, close)


@contextlib.contextmanager
def built(function: Function | None) -> Iterator[Function]:
    """What a worker calls in one run."""
    call, close = _made_to_call(function)
    try:
        yield call
    finally:
        close()


@contextlib.asynccontextmanager
async def built_async(function: Function | None) -> AsyncIterator[Function]:
    """The same, of which ``close`` may be async too."""
    call, close = _made(function)
    try:
        yield call
    finally:
        if inspect.isawaitable(closing := close()):
            await closing


class Lasting:
    """What a worker calls in run after run: built in the first, closed after the last, or when it fails."""

    def __init__(self) -> None:
        self._made: tuple[Function, Callable[[], Any]] | None = None

    @contextlib.contextmanager
    def built(self, function: Function | None) -> Iterator[Function]:
        """For one run."""
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
