"""Call ``async def`` functions in worker processes.

Each worker process has its own event loop, which runs only during calls of the function.
"""

from __future__ import annotations

import asyncio
import inspect
import weakref
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Generator
from typing import Any

from flowchan.channel.awaiting import end_waits

_END = object()


class Driven:
    """Runs the async functions of one worker process in a private event loop."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._begun: weakref.WeakSet[Generator[Any, None, None]] = weakref.WeakSet()

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a synchronous version of ``function`` that runs the coroutine and returns its result.

        For an async generator, it returns an iterator over the elements.
        """

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
            # The generator must be advanced inside the event loop, which then tracks it.
            return await anext(elements, _END)

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
        """Run ``close``, which may be async, then close unfinished generators and the event loop."""

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
