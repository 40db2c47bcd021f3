"""An ``async def`` function as the worker of a process calls it: there it has an event loop of its own, which
runs while the function does."""

from __future__ import annotations

import asyncio
import inspect
import weakref
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Generator
from typing import Any

from flowchan.channel.awaiting import end_waits

_END = object()


class Driven:
    """The functions of one worker."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._begun: weakref.WeakSet[Generator[Any, None, None]] = weakref.WeakSet()

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Gives what is awaited in ``function``; of an async generator, an iterator over its elements."""

        def call(*args: Any, **kwargs: Any) -> Any:
            called = function(*args, **kwargs)
            if not isinstance(called, AsyncIterable):
                return self._result(called)
            elements = self._each(aiter(called))
            self._begun.add(elements)
            return elements

        return call

    def _result(self, awaitable: Any) -> Any:
        async def wait() -> Any:
            return await awaitable

        return self._runner.run(wait())

    def _next(self, elements: AsyncIterator[Any]) -> Any:
        async def wait() -> Any:
            return await anext(elements, _END)  # within the loop, for a generator belongs to that

        return self._runner.run(wait())

    def _each(self, elements: AsyncIterator[Any]) -> Generator[Any, None, None]:
        try:
            while (element := self._next(elements)) is not _END:
                yield element
                del element
        finally:
            if isinstance(elements, AsyncGenerator):
                self._result(elements.aclose())

    def close(self, close: Callable[[], Any]) -> None:
        """Closes what was called, which may be async too, and what is not wanted to its end; and ends the
        loop."""

        async def end() -> None:
            try:
                if inspect.isawaitable(closing := close()):
                    await closing
            finally:
                end_waits()

        with self._runner:
            for elements in list(self._begun):
                elements.close()
            self._runner.run(end())
