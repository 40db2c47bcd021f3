"""``await`` on channels and ports, for asyncio (C9).

A coroutine that can't go on leaves a note with its event loop's :class:`Watcher`, a thread that sleeps on all the noted
channels at once and tells the loop which of them changed; the coroutine then tries again itself. So a wait costs no
thread, and an item is only ever taken in the loop, in one step, with nothing between taking and returning it: a
cancelled call has not taken one.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from typing import Any, TypeVar

from flowchan import _core
from flowchan.errors import Drained, Empty, Full

T = TypeVar("T")

MOST = 127  # waits of one thread: what one futex_waitv takes, less the bell


class Watcher:
    """Sleeps for up to ``MOST`` waits of one event loop. Its thread ends when nothing has been waited for some time, when
    the loop is closed, or when the main thread has ended."""

    IDLE = 1.0

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)  # while something waits, its future holds the loop
        self._lock = threading.Lock()
        self._waits: dict[asyncio.Future[None], tuple[Any, bool]] = {}
        self._bell: Any = _core.Channel(capacity=1, processes=False, max_bytes=2**64 - 1, name="bell")
        self._thread: threading.Thread | None = None
        self._over = False

    def has_room(self) -> bool:
        return len(self._waits) < MOST

    def add(self, future: asyncio.Future[None], target: Any, reading: bool) -> None:
        with self._lock:
            self._waits[future] = (target, reading)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="flowchan async")
                self._thread.start()
        self._ring()

    def remove(self, future: asyncio.Future[None]) -> None:
        with self._lock:
            self._waits.pop(future, None)
        self._ring()

    def end(self) -> None:
        """Ends the thread now. Nothing may wait any more."""
        self._over = True
        self._ring()
        thread = self._thread
        if thread is not None:
            thread.join()

    def _ring(self) -> None:
        try:
            self._bell.put_nowait(None)
        except Full:
            pass  # it rings already

    def _watch(self) -> None:
        idle_since = time.monotonic()
        while True:
            loop = self._loop()
            if loop is None or loop.is_closed() or self._over:
                break
            with self._lock:
                waits = list(self._waits.items())
                if not waits and time.monotonic() - idle_since > self.IDLE:
                    self._thread = None
                    return
            if waits:
                idle_since = time.monotonic()
            changed = _core._wait_any([(self._bell, True), *(place for _, place in waits)], 0.1)
            try:
                self._bell.get_nowait()
            except Empty:
                pass
            futures = []
            with self._lock:
                for future, place in (waits[index - 1] for index in changed if index):
                    if self._waits.pop(future, None) is not None:
                        futures.append(future)
                    else:
                        _core._pass_on(*place)  # its call was cancelled meanwhile
            if futures:
                try:
                    loop.call_soon_threadsafe(_tell, futures)
                except RuntimeError:
                    break  # the loop was closed
            del loop, waits, futures
        self._waits.clear()  # nobody hears of them any more, and they hold the loop


def _tell(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


_watchers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, list[Watcher]] = weakref.WeakKeyDictionary()


def end_waits() -> None:
    """The running loop is about to end and nothing waits in it any more: leaves no thread behind."""
    for watcher in _watchers.pop(asyncio.get_running_loop(), []):
        watcher.end()


async def _changed(target: Any, reading: bool) -> None:
    """Until something happens to the channel that may let one reader, or one writer, go on."""
    loop = asyncio.get_running_loop()
    watchers = _watchers.setdefault(loop, [])
    watcher = next((watcher for watcher in watchers if watcher.has_room()), None)
    if watcher is None:
        watcher = Watcher(loop)
        watchers.append(watcher)
    future: asyncio.Future[None] = loop.create_future()
    watcher.add(future, target, reading)
    try:
        await future
    except asyncio.CancelledError:
        watcher.remove(future)
        _core._pass_on(target, reading)  # the wake-up may have been meant for this call
        raise


async def aput(self: Any, item: Any) -> None:
    """As ``put``, for coroutines. A cancelled call has put nothing."""
    while True:
        try:
            self.put_nowait(item)
            return
        except Full:
            await _changed(self, False)


async def aget(self: Any) -> Any:
    """As ``get``, for coroutines. A cancelled call has taken nothing."""
    while True:
        try:
            return self.get_nowait()
        except Empty:
            await _changed(self, True)


async def anext_item(self: Any) -> Any:
    """The next item of ``async for``."""
    try:
        return await aget(self)
    except Drained:
        raise StopAsyncIteration from None


def aiter_items(self: T) -> T:
    """``async for item in channel``: until it is drained."""
    return self
