"""``await`` on channels and ports, for asyncio (C9).

A coroutine that can't go on stands at the channel's gate, as a thread would, and leaves a note with its event
loop's :class:`Watcher`, a thread that sleeps on all the noted gates at once and tells the loop which of them
changed; then the coroutine tries again itself. So a wait costs no thread, and an item is only ever taken in
the loop, in one step, with nothing between taking and returning it: a cancelled call has not taken one.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from flowchan._core import Await, Watch, _select
from flowchan.channel.sides import Readable, Writable
from flowchan.errors import Drained, Empty, Full

if TYPE_CHECKING:
    import asyncio  # slow to import, and there where something awaits

T = TypeVar("T")

MOST = 127  # waits of one thread: what one futex_waitv takes, less the bell
SLICE = 0.1
"""Seconds after which a watcher looks whether a process has died that was to wake somebody, or its loop has
ended."""
LONG = 1.0
"""The same where only threads of this process take part."""


class Watcher:
    """Sleeps for up to ``MOST`` waits of one event loop. Its thread ends when nothing has been waited for
    some time, when the loop is closed, or when the main thread has ended."""

    IDLE = 1.0

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)  # while something waits, its future holds the loop
        self._lock = threading.Lock()
        self._waits: dict[asyncio.Future[None], tuple[Await, asyncio.Task[Any] | None]] = {}
        self._watch = Watch()
        self._thread: threading.Thread | None = None
        self._over = False

    def has_room(self) -> bool:
        return len(self._waits) < MOST

    def add(self, future: asyncio.Future[None], wait: Await) -> None:
        from asyncio import current_task

        with self._lock:
            self._waits[future] = wait, current_task()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="flowchan async")
                thread.start()
                self._thread = thread  # one that can't be started is remembered nowhere
        self._watch.ring()

    def remove(self, future: asyncio.Future[None]) -> None:
        with self._lock:
            self._waits.pop(future, None)
        self._watch.ring()

    def end(self) -> None:
        """Ends the thread now. Nothing may wait any more."""
        self._over = True
        self._watch.ring()
        thread = self._thread
        if thread is not None:
            thread.join()

    def waits(self) -> list[tuple[asyncio.Task[Any] | None, Any]]:
        """Give each task that awaits a channel, with the channel."""
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
                    break  # the loop was closed
            del loop, waits, futures  # nothing that is over is kept while this sleeps
        with self._lock:
            left = [wait for wait, _ in self._waits.values()]
            self._waits.clear()  # nobody hears of them any more, and they hold the loop
        for wait in left:
            wait.leave(True)

    def _take(self, changed: list[tuple[asyncio.Future[None], Await]]) -> list[asyncio.Future[None]]:
        """Those that still wait, and do so no more."""
        futures = []
        with self._lock:
            for future, wait in changed:
                if self._waits.pop(future, None) is not None:
                    futures.append(future)
                else:
                    wait.leave(True)  # its call was cancelled meanwhile
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
    """The running loop is about to end and nothing waits in it any more: leaves no thread behind."""
    for watcher in _watchers.pop(_running_loop(), []):
        watcher.end()


def _watcher(loop: asyncio.AbstractEventLoop) -> Watcher:
    """One that has room for another wait."""
    watchers = _watchers.setdefault(loop, [])
    watcher = next((watcher for watcher in watchers if watcher.has_room()), None)
    if watcher is None:
        watcher = Watcher(loop)
        watchers.append(watcher)
    return watcher


async def _changed(wait: Await) -> None:
    """Until something happens to the channel that may let ``wait`` go on; it has left the gate then."""
    loop = _running_loop()
    watcher = _watcher(loop)
    future: asyncio.Future[None] = loop.create_future()
    try:
        watcher.add(future, wait)
        await future
    except BaseException:
        watcher.remove(future)
        wait.leave(True)  # the wake-up may have been meant for this call
        raise


async def any_changed(waits: Sequence[Await]) -> None:
    """The same for several, until it happens to one of them. All have left their gates at the end."""
    import asyncio

    loop = _running_loop()
    watched: dict[asyncio.Future[None], Watcher] = {}
    try:
        for one in waits:
            future: asyncio.Future[None] = loop.create_future()
            watched[future] = _watcher(loop)
            watched[future].add(future, one)
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for future, watcher in watched.items():
            watcher.remove(future)
        for one in waits:
            one.leave(True)  # a wake-up may have been meant for another call


async def aput(self: Writable[T], item: T) -> None:
    """As ``put``, for coroutines. A cancelled call has put nothing."""
    try:
        self.put_nowait(item)
        return
    except Full:
        pass
    again = False
    while True:
        wait = Await(self, False, again)  # before the try: what happens after it is heard
        try:
            self.put_nowait(item)
        except Full:
            await _changed(wait)
            again = True
        except BaseException:
            wait.leave(True)
            raise
        else:
            wait.leave(False)
            return


async def aget(self: Readable[T]) -> T:
    """As ``get``, for coroutines. A cancelled call has taken nothing."""
    try:
        return self.get_nowait()
    except Empty:
        pass
    again = False
    while True:
        wait = Await(self, True, again)
        try:
            item = self.get_nowait()
        except Empty:
            await _changed(wait)
            again = True
        except BaseException:
            wait.leave(True)
            raise
        else:
            wait.leave(False)
            return item


async def aselect(gets: list[Any], puts: list[tuple[Any, Any]], looks: list[Any]) -> tuple[int, Any]:
    """As native select without a timeout, for coroutines. A cancelled call has done nothing."""
    done = _select(gets, puts, 0, looks)
    again = False
    while done[0] == -1:
        waits = [Await(one, True, again) for one in gets]
        waits += [Await(one, False, again) for one, _ in puts]
        waits += [Await(one, True, again) for one in looks]
        try:
            done = _select(gets, puts, 0, looks)
        except BaseException:
            for wait in waits:
                wait.leave(True)
            raise
        if done[0] == -1:
            await any_changed(waits)
            again = True
            continue
        for place, wait in enumerate(waits):
            wait.leave(place != done[0] or place >= len(gets) + len(puts))
    return done


async def anext_item(self: Readable[T]) -> T:
    """The next item of ``async for``."""
    try:
        return await aget(self)
    except Drained:
        raise StopAsyncIteration from None


def aiter_items(self: T) -> T:
    """``async for item in channel``: until it is drained."""
    return self


def waits_of_loops() -> list[tuple[asyncio.AbstractEventLoop, list[tuple[asyncio.Task[Any] | None, Any]]]]:
    """Give every event loop of this process that has awaited a channel, with the tasks that do so now, and
    their channels."""
    return [
        (loop, [wait for watcher in watchers for wait in watcher.waits()])
        for loop, watchers in list(_watchers.items())
    ]
