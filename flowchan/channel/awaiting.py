"""Make channels and ports awaitable for asyncio (C9).

A coroutine that cannot continue enters the channel's wait queue, as a thread would. The coroutine registers
this wait with a :class:`Watcher` of its event loop. The watcher's thread sleeps until one of many waits is
woken, and tells the loop which coroutines to wake. These coroutines then try their operations again. The
loop's thread takes an item and returns it in one step. Therefore, no item is lost when a call is cancelled.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from flowchan._core import Await, Watch
from flowchan.channel.sides import Readable, Writable
from flowchan.errors import Drained, Empty, Full

if TYPE_CHECKING:
    import asyncio  # imported only where needed, because it is slow to import

T = TypeVar("T")

MOST = 127  # waits per thread: futex_waitv allows 128 words, and one of them wakes the watcher
SLICE = 0.1
"""Seconds between checks whether the watcher's loop has ended, or a process has died that should have woken a
waiter."""
LONG = 1.0
"""Replaces ``SLICE`` if only this process uses the channels, because no other process can then die."""


class Watcher:
    """Thread that sleeps until any of up to ``MOST`` waits of one event loop is woken.

    The thread ends when it has had no waits for ``IDLE`` seconds, when the loop is closed, or when
    :meth:`end` is called.
    """

    IDLE = 1.0

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # A weak reference, because an idle watcher must not keep the loop alive. During a wait, the future
        # keeps the loop alive.
        self._loop = weakref.ref(loop)
        self._lock = threading.Lock()
        self._waits: dict[asyncio.Future[None], tuple[Await, asyncio.Task[Any] | None]] = {}
        self._watch = Watch()
        self._thread: threading.Thread | None = None
        self._over = False

    def has_room(self) -> bool:
        """Return whether this watcher can take another wait."""
        return len(self._waits) < MOST

    def add(self, future: asyncio.Future[None], wait: Await) -> None:
        """Set the result of ``future`` when ``wait`` is woken."""
        from asyncio import current_task

        with self._lock:
            self._waits[future] = wait, current_task()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="flowchan async")
                thread.start()
                self._thread = thread  # only now, because start() may fail
        self._watch.ring()

    def remove(self, future: asyncio.Future[None]) -> None:
        """Forget the wait for ``future``."""
        with self._lock:
            self._waits.pop(future, None)
        self._watch.ring()

    def end(self) -> None:
        """End the thread now. The caller ensures that no coroutine is still waiting."""
        self._over = True
        self._watch.ring()
        thread = self._thread
        if thread is not None:
            thread.join()

    def waits(self) -> list[tuple[asyncio.Task[Any] | None, Any]]:
        """Return the task, if any, and the channel of each wait."""
        with self._lock:
            return [(task, wait.channel) for wait, task in self._waits.values()]

    def _run(self) -> None:
        idle_since = time.monotonic()
        while True:
            loop = self._loop()
            if loop is None or loop.is_closed() or self._over:
                break
            with self._lock:
                heard = self._watch.heard
                waits = [(future, wait) for future, (wait, _) in self._waits.items()]
                if not waits and time.monotonic() - idle_since > self.IDLE:
                    self._thread = None
                    return
            if waits:
                idle_since = time.monotonic()
            alone = waits and all(not wait.channel.transport.copies for _, wait in waits)
            changed = self._watch.sleep(heard, [wait for _, wait in waits], LONG if alone else SLICE)
            if futures := self._take([waits[index] for index in changed]):
                try:
                    loop.call_soon_threadsafe(_tell, futures)
                except RuntimeError:
                    break  # the event loop has been closed
            del loop, waits, futures  # do not keep finished futures alive while this thread sleeps
        with self._lock:
            left = [wait for wait, _ in self._waits.values()]
            self._waits.clear()  # nothing can complete these waits, and they would keep the loop alive
        for wait in left:
            wait.leave(True)

    def _take(self, changed: list[tuple[asyncio.Future[None], Await]]) -> list[asyncio.Future[None]]:
        """Remove the woken waits, and return the futures of those that were not cancelled."""
        futures = []
        with self._lock:
            for future, wait in changed:
                if self._waits.pop(future, None) is not None:
                    futures.append(future)
                else:
                    wait.leave(True)  # the call was cancelled after its wake-up
        return futures


def _tell(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


_watchers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, list[Watcher]] = weakref.WeakKeyDictionary()


def _running_loop() -> asyncio.AbstractEventLoop:
    from asyncio import get_running_loop

    return get_running_loop()


def end_waits() -> None:
    """End the running loop's watchers.

    Call this when the loop is about to close and all its waits have ended.
    """
    for watcher in _watchers.pop(_running_loop(), []):
        watcher.end()


def _watcher(loop: asyncio.AbstractEventLoop) -> Watcher:
    """Return one of the loop's watchers with room for another wait."""
    watchers = _watchers.setdefault(loop, [])
    watcher = next((watcher for watcher in watchers if watcher.has_room()), None)
    if watcher is None:
        watcher = Watcher(loop)
        watchers.append(watcher)
    return watcher


async def _changed(wait: Await) -> None:
    """Sleep until ``wait`` is woken. The wake-up also removes ``wait`` from the channel's wait queue."""
    loop = _running_loop()
    watcher = _watcher(loop)
    future: asyncio.Future[None] = loop.create_future()
    try:
        watcher.add(future, wait)
        await future
    except BaseException:
        watcher.remove(future)
        wait.leave(True)  # passes on a wake-up that this call may have received
        raise


async def _when_possible(side: Any, reading: bool, operation: Callable[[], T]) -> T:
    """Return the result of the operation once it no longer raises ``Full`` or ``Empty``."""
    again = False
    while True:
        # Register before the next try: any change after that try must wake this call.
        wait = Await(side, reading, again)
        try:
            result = operation()
        except (Full, Empty):
            await _changed(wait)
            again = True
        except BaseException:
            wait.leave(True)
            raise
        else:
            wait.leave(False)
            return result


async def aput(self: Writable[T], item: T) -> None:  # noqa: D417 - a method of channels and ports
    """Put an item like ``put``, without blocking the event loop.

    Args:
        item: The item to put.

    Raises:
        Closed: The channel is closed.
        Broken: The channel is broken.
        TypeError: The item cannot be serialised for another process.
        asyncio.CancelledError: The task was cancelled. The item has not been put.

    Example:
        >>> import asyncio
        >>> from flowchan import Channel
        >>> channel = Channel(1)
        >>> asyncio.run(channel.aput("a"))
        >>> channel.get()
        'a'
    """
    try:
        self.put_nowait(item)
        return
    except Full:
        pass
    await _when_possible(self, False, functools.partial(self.put_nowait, item))


async def aget(self: Readable[T]) -> T:
    """Take the oldest item like ``get``, without blocking the event loop.

    Returns:
        The item.

    Raises:
        Drained: The channel is closed and empty.
        Broken: The channel is broken.
        asyncio.CancelledError: The task was cancelled. No item has been taken.

    Example:
        >>> import asyncio
        >>> from flowchan import Channel
        >>> channel = Channel(1)
        >>> channel.put("a")
        >>> asyncio.run(channel.aget())
        'a'
    """
    try:
        return self.get_nowait()
    except Empty:
        pass
    return await _when_possible(self, True, self.get_nowait)


async def anext_item(self: Readable[T]) -> T:
    """Return the next item for ``async for``."""
    try:
        return await aget(self)
    except Drained:
        raise StopAsyncIteration from None


def aiter_items(self: T) -> T:
    """Return the iterator for ``async for item in channel``, which ends when the channel is drained."""
    return self


def waits_of_loops() -> list[tuple[asyncio.AbstractEventLoop, list[tuple[asyncio.Task[Any] | None, Any]]]]:
    """Return each event loop that has awaited a channel, with its current waits.

    A wait is described by a pair: its task, if any, and its channel.
    """
    return [
        (loop, [wait for watcher in watchers for wait in watcher.waits()])
        for loop, watchers in list(_watchers.items())
    ]
