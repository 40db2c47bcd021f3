"""Wait for several channels at once: ``select``, and the waits of coroutines (see channel/awaiting.py)."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import dataclass, field
from typing import Any

from flowchan.pure.call_results import deadline_of, forks, raise_step
from flowchan.pure.local_gets import return_taken, try_get
from flowchan.pure.local_puts import try_put, writing
from flowchan.pure.local_queue import QueueStep
from flowchan.pure.pure_channel import LocalChannel, ReadingPort, WritingPort
from flowchan.pure.wait_line import NEVER, Bell, QueuedItem, Waiter

MOST = 128
"""Maximum number of operations in a ``select``, the same as in the native core."""
ALL_WAIT, ALL_DRAINED = -1, -2


@dataclass(slots=True)
class _Operation:
    """Operation of a ``select``. With ``checks_only``, a get succeeds without taking an item."""

    channel: LocalChannel
    reads: bool
    port: Any = None
    item: Any = None
    checks_only: bool = False
    taken: list[QueuedItem] = field(default_factory=list)

    def attempt(self) -> tuple[QueueStep, Any]:
        if self.checks_only:
            queue = self.channel.usable()
            if self.channel.broken:
                raise_step(self.channel, QueueStep.BROKEN, True, 0)
            return QueueStep.DONE if queue.items or queue.drained else QueueStep.NOT_NOW, None
        if self.reads:
            return try_get(self.channel, self.port, taken=self.taken)
        return try_put(self.channel, self.port, self.item), None

    def waiter(self, bell: Bell) -> Waiter:
        waiter = (
            Waiter(True, self.port, reader=self.port and self.port.state)
            if self.reads
            else writing(self.port)
        )
        waiter.bell, waiter.selecting = bell, True
        return waiter


def _operation(target: Any, reads: bool, item: Any = None, checks_only: bool = False) -> _Operation:
    if isinstance(target, LocalChannel):
        target.usable()
        return _Operation(target, reads, None, item, checks_only)
    if isinstance(target, ReadingPort if reads else WritingPort):
        return _Operation(target.ready(), reads, target, item)
    kind = "gets must be channels or In ports" if reads else "puts must go to channels or Out ports"
    raise TypeError(f"select: {kind}, got {target!r}")


def select_one(
    gets: list[Any], puts: list[tuple[Any, Any]], timeout: float | None, ready: list[Any] | None = None
) -> tuple[int, Any]:
    """Perform one operation. Return its index and item, or None if the result is ALL_WAIT or ALL_DRAINED."""
    deadline = deadline_of(timeout)
    operations = [_operation(get, True) for get in gets]
    operations += [_operation(put[0], False, put[1]) for put in puts]
    operations += [_operation(channel, True, checks_only=True) for channel in ready or ()]
    if not 1 <= len(operations) <= MOST:
        raise ValueError(
            f"select: gets, puts and ready must contain 1 to {MOST} operations, got {len(operations)}"
        )
    done: tuple[int, Any] = (ALL_WAIT, None)
    try:
        done = _try_now(operations) if deadline == 0 else _try_each(operations)
        again = False
        while done[0] == ALL_WAIT and deadline != 0:
            done, late = _wait_once(operations, deadline, again)
            if late:
                break
            if done[0] == ALL_WAIT:
                done = _try_each(operations)
            again = True
    except BaseException:
        for one in operations:  # an operation may have taken an item before a signal handler raised
            return_taken(one.channel, one.port, one.taken)
        raise
    return done


def _try_each(operations: list[_Operation]) -> tuple[int, Any]:
    """Try each operation once, in random order."""
    drained = 0
    for index in random.sample(range(len(operations)), len(operations)):
        step, item = operations[index].attempt()
        if step is QueueStep.DONE:
            return index, item
        drained += step is QueueStep.DRAINED
    return (ALL_DRAINED if drained == len(operations) else ALL_WAIT), None


def _try_now(operations: list[_Operation]) -> tuple[int, Any]:
    """Try all operations until one succeeds, or until a round of tries in which no item has moved."""
    while True:
        before = _moves(operations)
        done = _try_each(operations)
        if done[0] != ALL_WAIT or _moves(operations) == before:
            return done


def _moves(operations: list[_Operation]) -> list[tuple[int, int]]:
    queues = [operation.channel.usable() for operation in operations]
    return [(queue.puts + queue.parked, queue.takes) for queue in queues]


def _wait_once(operations: list[_Operation], deadline: float, again: bool) -> tuple[tuple[int, Any], bool]:
    """Enter all queues, try the operations, and sleep until one may succeed or the time is up."""
    bell = Bell()
    waiters = [(operation.channel.usable(), operation.waiter(bell)) for operation in operations]
    done: tuple[int, Any] = (ALL_WAIT, None)
    late = False
    try:
        for queue, waiter in waiters:
            with queue.held():
                queue.enter(waiter, again)
        done = _try_each(operations)
        if done[0] == ALL_WAIT:
            late = time.monotonic() >= deadline
            if not late:
                bell.sleep(deadline)
    finally:
        for queue, waiter in waiters:
            with queue.held():
                queue.leave(waiter)
    return done, late


class Await:
    """Wait of a coroutine at a channel or port."""

    def __init__(self, target: Any, reading: bool, again: bool) -> None:
        self._entered = False
        operation = _operation(target, reading)
        self.channel, self._made_in = operation.channel, forks()
        self._queue, self.waiter = self.channel.usable(), operation.waiter(Bell())
        with self._queue.held():
            self._queue.enter(self.waiter, again)
            self.channel.awaiting += 1
            self._entered = True

    def __del__(self) -> None:
        if self._entered and self._made_in == forks():
            self.leave(True)

    @property
    def changed(self) -> bool:
        """Return whether the coroutine must try its operation again."""
        port = self.waiter.port
        return self.waiter.woken or (port is not None and not port.open)

    def leave(self, unused: bool) -> None:
        """Leave the queue. If ``unused`` is true, pass on the wake-up that this coroutine did not use."""
        with self._queue.held():
            if self._entered:
                self._entered = False
                self.channel.awaiting -= 1
                self._queue.leave(self.waiter, unused)
            elif unused:
                self._queue.wake()


class LoopWatch:
    """Lets one thread sleep on behalf of many coroutines."""

    def __init__(self) -> None:
        self._bell, self._rings, self.heard = Bell(), itertools.count(1), 0

    def ring(self) -> None:
        """End the current or the next sleep."""
        self.heard = next(self._rings)
        self._bell.ring()

    def sleep(self, heard: int, waits: list[Await], seconds: float) -> list[int]:
        """Sleep until a wait changes or ``ring`` is called. Remove and return the waits that have changed."""
        for wait in waits:
            wait.waiter.bell = self._bell  # set this before reading ``changed``, or a wake-up could be missed
        if self.heard == heard and not any(wait.changed for wait in waits):
            self._bell.sleep(min(time.monotonic() + seconds, NEVER))
        found = [index for index, wait in enumerate(waits) if wait.changed]
        for index in found:
            waits[index].leave(False)
        return found


def observe(channels: list[LocalChannel]) -> tuple[int, int, int]:
    """Return totals over all channels: items put plus items taken, waiting readers, and waiting writers."""
    stats = [channel._stats() for channel in channels]
    return (
        sum(one["items_in"] + one["items_out"] for one in stats),
        sum(one["waiting_readers"] for one in stats),
        sum(one["waiting_writers"] for one in stats),
    )
