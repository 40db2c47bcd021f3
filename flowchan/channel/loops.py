"""Whether anything but a channel can move an event loop.

A future that nothing but a channel completes is *stuck* while the channel is. So is what only stuck futures
complete: a task that awaits one, and what asyncio makes of several: ``gather``, ``wait``, ``as_completed``,
``shield``, a ``TaskGroup``. How those hang together is read off the callbacks that asyncio has left with the
futures. What is not known there counts as work: a future of the user's, an event, a lock, for somebody may
set or release it from outside; and anything in an asyncio that was built differently.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread
import sys
import types
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

from flowchan.channel.awaiting import waits_of_loops

Futures = set[Any]
GIL: bool = getattr(sys, "_is_gil_enabled", lambda: True)()
PATIENCE = 0.05
"""Seconds that a loop without a GIL has to say whether it has work."""


def only_wait_for(channels: Collection[Any]) -> bool:
    """Whether every event loop in which somebody waits for one of ``channels`` waits for them and nothing
    else: all its tasks do, and it has no timer, no socket and no helping thread at work."""
    try:
        wanted = {id(channel) for channel in channels}
        for loop, waits in waits_of_loops():
            there = {future for future, channel in waits.items() if id(channel) in wanted}
            if there and not (_only_waits(loop, there) if GIL else _in_it(loop, there)):
                return False
    except (AttributeError, RuntimeError, ValueError):  # another kind of loop, or one that has just changed
        return False
    return True


def _only_waits(loop: Any, there: Futures) -> bool:
    tasks = asyncio.all_tasks(loop)
    return not _has_work(loop) and tasks <= _all_stuck(there, tasks)


def _in_it(loop: Any, there: Futures) -> bool:
    """The same, found out by the loop itself. Without a GIL nobody else may read its futures: asyncio's
    native ones are freed meanwhile. One that has no time for it has work."""
    found: concurrent.futures.Future[bool] = concurrent.futures.Future()

    def look() -> None:
        try:
            found.set_result(_only_waits(loop, there))
        except BaseException as error:
            found.set_exception(error)

    # What has woken it up for us comes between the two, and does not count as work.
    loop.call_soon_threadsafe(loop.call_soon, look)
    try:
        return found.result(PATIENCE)
    except TimeoutError:
        return False


def _has_work(loop: Any) -> bool:
    timers = any(not timer.cancelled() for timer in list(loop._scheduled))
    sockets = len(loop._selector.get_map()) > 1  # one is the loop's own
    return bool(loop._ready) or timers or sockets or _helps(loop._default_executor)


def _helps(executor: Any) -> bool:
    """Whether a thread of the executor does anything but wait for work."""
    if executor is None:
        return False
    frames = sys._current_frames()
    idle = concurrent.futures.thread._worker.__code__
    threads = [frames.get(thread.ident) for thread in list(executor._threads)]
    return executor._work_queue.qsize() > 0 or any(
        frame is not None and frame.f_code is not idle for frame in threads
    )


def _all_stuck(futures: Futures, tasks: Futures) -> Futures:
    """``futures``, and all that nothing else completes."""
    stuck: Futures = set()
    fresh = {future for future in futures if not future.done()}
    while fresh:
        stuck |= fresh
        awaiting = {task for task in tasks if task._fut_waiter in stuck}
        fresh = (awaiting | set(_made_of(stuck))) - stuck
    return stuck


def _made_of(stuck: Futures) -> Iterator[Any]:
    """What asyncio completes when some of ``stuck`` are done, and not before."""
    counted: Counter[Any] = Counter()  # by what `wait` waits for: how many of its futures are stuck
    left: dict[Any, int] = {}  # and how many are left
    for future in stuck:
        for callback, _ in future._callbacks or ():
            group: Any = getattr(callback, "__self__", None)
            if isinstance(group, asyncio.TaskGroup) and group._tasks <= stuck:
                ended = group._on_completed_fut  # type: ignore[attr-defined]
                yield from [ended] if ended else []
            match _variables(callback):
                case {"outer": asyncio.Future() as outer}:  # gather, shield
                    if {one for one in getattr(outer, "_children", ()) if not one.done()} <= stuck:
                        yield outer
                case {"waiter": waiter, "counter": int(count)}:  # wait
                    counted[waiter] += 1
                    left[waiter] = count
                case {"todo": set(todo), "done": asyncio.Queue() as done} if todo <= stuck:  # as_completed
                    yield from done._getters  # type: ignore[attr-defined]
    yield from (waiter for waiter, count in counted.items() if count == left[waiter])


def _variables(callback: Any) -> dict[str, Any]:
    """The variables around a function that asyncio has defined within another; as_completed is an object from
    Python 3.13 on, and its variables are attributes."""
    iterator: Any = getattr(callback, "__self__", None)
    if type(iterator).__name__ == "_AsCompletedIterator":
        return {"todo": iterator._todo, "done": iterator._done}
    if not isinstance(callback, types.FunctionType) or callback.__module__ != "asyncio.tasks":
        return {}
    cells = zip(callback.__code__.co_freevars, callback.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells}
