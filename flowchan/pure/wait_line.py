"""Keep a list of the calls that wait on one side of a queue, and measure how long they wait."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from dataclasses import dataclass, field
from typing import Any

NEVER = math.inf
"""Deadline of a call without a timeout. A deadline of 0 means that the call must not wait."""
SLICE_S = 0.1
"""Longest sleep of the main thread. It must be short, because a signal just before a sleep does not end
it."""
UNNUMBERED = math.inf


@dataclass(eq=False, slots=True)
class QueuedItem:
    """Item in the queue. ``size`` is 0 if the channel counts no bytes. The first take sets ``number``."""

    object: Any
    size: int
    number: float = UNNUMBERED


@dataclass(slots=True)
class WaitClock:
    """Measures the total time that calls have waited, including those that wait now."""

    waiting: int = 0
    total: int = 0

    def change(self, by: int, now: int) -> None:
        self.waiting += by
        self.total -= by * now

    def seconds(self) -> float:
        return (self.total + self.waiting * time.monotonic_ns()) / 1e9


@dataclass(slots=True)
class PortClock:
    """Wait times of a port: the total, and the part spent waiting for a turn of an ordered stage."""

    all: WaitClock = field(default_factory=WaitClock)
    turn: WaitClock = field(default_factory=WaitClock)


@dataclass(slots=True)
class ReaderState:
    """State of a reading port.

    ``number`` is the number of the port's first leased item or, if no item is leased, of its last item.
    """

    number: float = -1
    leased: list[QueuedItem] = field(default_factory=list)
    orders: int = 0
    keeps_turns: bool = False
    alone: bool = False
    clock: PortClock = field(default_factory=PortClock)


@dataclass(slots=True)
class WriterState:
    """State of a writing port.

    Attributes:
        ordered: Outputs of input item i wait until those of all earlier items are in the queue.
        single: Each input item has exactly one output, which also finishes it.
        keyed: The next outputs come from the input item ``number``.
        number: Number of the input item.
        count: Number of outputs of this input item so far.
        clock: Waiting times of the port.
    """

    ordered: bool = False
    single: bool = False
    keyed: bool = False
    number: float = 0
    count: int = 0
    clock: PortClock = field(default_factory=PortClock)

    def begin(self, number: float) -> None:
        self.number, self.count, self.keyed = number, 0, True


class Bell:
    """Lets one thread sleep until the bell rings. A bell that rang earlier ends the next sleep at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        with contextlib.suppress(RuntimeError):  # the bell has already rung
            self._lock.release()

    def sleep(self, deadline: float) -> None:
        """Sleep until the bell rings or the deadline passes. A signal may also end the sleep."""
        left = deadline - time.monotonic() if deadline != NEVER else NEVER
        if threading.current_thread() is threading.main_thread():
            left = min(left, SLICE_S)
        if left == NEVER:
            self._lock.acquire()
        else:
            self._lock.acquire(timeout=max(left, 0))


@dataclass(eq=False, slots=True)
class Waiter:
    """Call that waits or may have to wait on one side of a queue."""

    reads: bool
    port: Any = None
    reader: ReaderState | None = None
    writer: WriterState | None = None
    size: int = 0
    turn: float | None = None
    """Number of the input item for whose turn the call waits, or None."""
    selecting: bool = False
    bell: Bell = field(default_factory=Bell)
    woken: bool = False
    for_turn: bool = False

    @property
    def clock(self) -> PortClock | None:
        state = self.reader or self.writer
        return None if state is None else state.clock


class WaitLine:
    """The waiting calls on one side of a queue. The first call in ``asleep`` is the next to wake."""

    def __init__(self) -> None:
        self.asleep: list[Waiter] = []
        self.woken: list[Waiter] = []
        self.clock, self.turns = WaitClock(), WaitClock()
        self.since = 0
        self.starving: Waiter | None = None

    def enter(self, waiter: Waiter, again: bool) -> None:
        now = time.monotonic_ns()
        if not self.clock.waiting and not again:
            self.since = now
        self._count(waiter, 1, now)
        waiter.woken = False
        self.asleep.insert(0 if again else len(self.asleep), waiter)

    def leave(self, waiter: Waiter) -> bool:
        """Remove a waiter from this line, if present, and return whether the waiter had been woken."""
        if waiter not in self.asleep and waiter not in self.woken:
            return False
        (self.woken if waiter.woken else self.asleep).remove(waiter)
        self._count(waiter, -1, time.monotonic_ns())
        return waiter.woken

    def wake(self, waiter: Waiter) -> None:
        self.asleep.remove(waiter)
        self.woken.append(waiter)
        waiter.woken = True
        waiter.bell.ring()

    def _count(self, waiter: Waiter, by: int, now: int) -> None:
        self.clock.change(by, now)
        self.turns.change(by * waiter.for_turn, now)
        if waiter.clock:
            waiter.clock.all.change(by, now)
            waiter.clock.turn.change(by * waiter.for_turn, now)

    def waiting_for(self) -> float:
        return (time.monotonic_ns() - self.since) / 1e9 if self.clock.waiting else 0.0
