"""Implement the queue of a channel between threads, like ``LocalQueue`` in the native core.

Algorithm. A deque contains the items. An output of an ordered stage that comes early is parked until the
outputs of all earlier items are in the queue. A caller that cannot continue sleeps on a doorbell. On each
side, each change to the queue wakes the first sleeper that can continue. When a woken sleeper runs, it wakes
the next one, so k changes wake k sleepers.

Invariants (C8). While a woken waiter has not run yet, its side wakes no other waiter, unless the channel has
ended. Every woken waiter runs and then wakes the next one, whether its call succeeds or not. A waiter is
starving if it has waited for 20 ms and was woken twice without being able to continue. New waiters then let
it go first, as long as it can continue.

Interrupts. Python runs signal handlers between any two bytecodes of the main thread. Ctrl-C and SIGTERM are
deferred while the lock is held, so they always find a consistent queue. The thread that holds the lock may
run a destructor or another handler that uses the queue. For this reason, the lock is reentrant.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from flowchan.pure.wait_line import NEVER, UNNUMBERED, QueuedItem, ReaderState, Waiter, WaitLine, WriterState
from flowchan.transport.interrupts import interrupts_deferred

PATIENCE_NS = 20_000_000
MOST_PARKED_GROUPS = 4096
"""The queue parks outputs for at most this many input items, counted from the item whose turn it is."""
RETIRE, KEEP_TURNS = 1, 2
"""Orders to a reader: to treat the channel as drained, or to keep turns for its outputs from now on."""
MOST_WALKED = 4096
"""Maximum number of items that ``peek`` examines."""


class QueueState(Enum):
    """State of a channel. A drained channel also has the state ``CLOSED``."""

    OPEN = auto()
    CLOSED = auto()
    BROKEN = auto()


class QueueStep(Enum):
    """Result of one attempt at an operation."""

    DONE = auto()
    WAIT = auto()
    NOT_NOW = auto()
    CLOSED = auto()
    DRAINED = auto()
    BROKEN = auto()
    TOO_LARGE = auto()
    PORT_CLOSED = auto()
    KEEP_TURNS = auto()


@dataclass(slots=True)
class _Group:
    """Parked outputs of one input item. ``complete`` means that the item has no further outputs."""

    items: list[QueuedItem] = field(default_factory=list)
    complete: bool = False


class LocalQueue:
    """Bounded queue of references. Callers must hold the lock (``held()``) unless a method says otherwise."""

    def __init__(self, capacity: int, max_bytes: float) -> None:
        self.capacity, self.max_bytes, self.share = capacity, max_bytes, 0
        self.state = QueueState.OPEN
        self.cause: BaseException | None = None
        self.items: deque[QueuedItem] = deque()
        self.puts = self.takes = self.bytes_in = self.bytes_out = 0
        self.leased = self.parked = self.readers = self.writers = 0
        self.turn: float = 0
        self.short_of_bytes = self.keeps_numbers = False
        self._numbered = 0
        self._groups: deque[_Group] = deque()
        self._lines = {True: WaitLine(), False: WaitLine()}
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock. A Ctrl-C during the block raises its exception at the end of the block."""
        with interrupts_deferred(), self._lock:
            yield

    # --- items ---

    @property
    def counts_bytes(self) -> bool:
        return bool(self.share) or self.max_bytes != math.inf

    @property
    def exhausted(self) -> bool:
        return self.state is QueueState.CLOSED and not self.items and not self.parked

    @property
    def drained(self) -> bool:
        return self.exhausted and not self.leased

    def _room(self) -> int:
        return max(self.capacity - len(self.items) - self.parked, 0)

    def _fits(self, size: int, parks: bool = False) -> bool:
        most = min(self.share, self.max_bytes) if self.share else self.max_bytes
        alone = not self.items and not (parks and self.parked)
        return alone or self.bytes_in - self.bytes_out + size <= most

    def _has_turn(self, number: float) -> bool:
        """Return whether the queue has room for an output of this input item.

        The last free place is reserved for the item whose turn it is.
        """
        if number <= self.turn:
            return self._room() > 0
        return number - self.turn < MOST_PARKED_GROUPS and self._room() > 1

    def try_put(self, item: QueuedItem, writer: WriterState | None) -> QueueStep:
        """Put an item, or park the item if its turn has not come."""
        if self.state is not QueueState.OPEN:
            return QueueStep.BROKEN if self.state is QueueState.BROKEN else QueueStep.CLOSED
        if item.size > self.max_bytes:
            return QueueStep.TOO_LARGE
        parks = writer is not None and writer.keyed and writer.ordered and writer.number > self.turn
        if not self._fits(item.size, parks):
            self.short_of_bytes = True
            return QueueStep.WAIT
        if not (self._has_turn(writer.number) if writer and parks else self._room()):
            return QueueStep.WAIT
        if writer and parks:
            self._group(writer.number).items.append(item)
            self.parked += 1
        else:
            if self.keeps_numbers and writer and writer.keyed:
                item.number = writer.number
            self._push(item)
        self.bytes_in += item.size
        if writer and writer.keyed:
            writer.count += 1
            if writer.single and writer.ordered:
                self.item_done(writer)
        self.wake()
        return QueueStep.DONE

    def _push(self, item: QueuedItem) -> None:
        self.items.append(item)
        self.puts += 1

    def try_take(self, reader: ReaderState | None, into: list[QueuedItem]) -> QueueStep:
        """Take the oldest item, append it to ``into``, and lease it to ``reader``."""
        if self.state is QueueState.BROKEN:
            return QueueStep.BROKEN
        if reader and reader.orders and not reader.leased:
            if reader.orders & KEEP_TURNS and not reader.keeps_turns:
                return QueueStep.KEEP_TURNS
            if reader.orders & RETIRE:
                return QueueStep.DRAINED
        if not self.items:
            return QueueStep.DRAINED if self._ends_for(reader) else QueueStep.WAIT
        item = self.items.popleft()
        into.append(item)
        self.bytes_out += item.size
        if item.number == UNNUMBERED:
            item.number = self._numbered
            self._numbered += 1
        if reader:
            if not reader.leased:
                reader.number = item.number
            reader.leased.append(item)
            self.leased += 1
        self.takes += 1
        if self._lines[False].asleep:
            self.short_of_bytes = False
        self.wake()
        return QueueStep.DONE

    def peek(self, first: int, most: int) -> list[tuple[int, bool, int, int, Any]]:
        """Return the first ``most`` items from number ``first`` on, which stay in the queue.

        The caller must not hold the lock.
        """
        seen: list[tuple[int, bool, int, int, Any]] = []
        with self.held():
            following = self._numbered
            for item in itertools.islice(self.items, MOST_WALKED):
                number = item.number
                if number == UNNUMBERED:
                    number, following = following, following + 1
                if number >= first and len(seen) < most:
                    seen.append((int(number), False, item.size, 0, item.object))
        return seen

    def _ends_for(self, reader: ReaderState | None) -> bool:
        """Return whether the reader will get no more items. Items that others have on lease may come back."""
        return self.exhausted and (
            not self.leased or (reader is not None and bool(reader.alone or reader.leased))
        )

    def acknowledge(self, reader: ReaderState) -> list[QueuedItem]:
        """Finish the leased items, and return them. The caller must drop them without holding the lock."""
        finished, reader.leased = reader.leased, []
        self.leased -= len(finished)
        self.wake()
        return finished

    def give_back(self, reader: ReaderState) -> None:
        """Return leased items to the front of the queue, in the order of their numbers."""
        items, reader.leased = reader.leased, []
        self.leased -= len(items)
        self.untake(items)

    def untake(self, items: list[QueuedItem]) -> None:
        """Return taken items to the front of the queue."""
        if self.state is QueueState.BROKEN:
            return
        self.takes -= len(items)
        for item in reversed(items):
            self.bytes_out -= item.size
            place = 0
            while place < len(self.items) and self.items[place].number < item.number:
                place += 1
            self.items.insert(place, item)
        self.wake()

    # --- turns of outputs of ordered stages ---

    def _group(self, number: float) -> _Group:
        ahead = int(number - self.turn)
        while len(self._groups) <= ahead:
            self._groups.append(_Group())
        return self._groups[ahead]

    def item_done(self, writer: WriterState) -> QueueStep:
        """Record that the current input item of the writer has no more outputs.

        Return WAIT if the item is too far ahead of its turn.
        """
        behind = not writer.ordered or self.state is not QueueState.OPEN or writer.number < self.turn
        if not behind and writer.number - self.turn >= MOST_PARKED_GROUPS:
            return QueueStep.WAIT
        writer.keyed = False
        if not behind:
            self._group(writer.number).complete = True
            self._advance()
        return QueueStep.DONE

    def finish_item(self, writer: WriterState, number: float) -> QueueStep:
        """Record that input item ``number`` has no more outputs, unless its only output has recorded this."""
        if not writer.ordered:
            writer.keyed = False
            return QueueStep.DONE
        if not writer.keyed and writer.count and writer.number == number:
            return QueueStep.DONE
        if not writer.keyed:
            writer.begin(number)
        return self.item_done(writer)

    def start_turns_at(self, number: float) -> None:
        """Let the turns begin at this input item, because all outputs of earlier items have been put."""
        if self.state is not QueueState.OPEN or number <= self.turn:
            return
        for group in list(self._groups)[: int(number - self.turn)]:
            group.complete = True
        self._advance()
        if not self._groups and self.turn < number:
            self.turn = number
            self.wake()

    def _advance(self) -> None:
        """Move parked outputs whose turn has come into the queue. After a close, move all of them."""
        while self._groups:
            group = self._groups[0]
            for item in group.items:
                self._push(item)
            self.parked -= len(group.items)
            group.items = []
            if not group.complete and self.state is QueueState.OPEN:
                break
            self._groups.popleft()
            self.turn += 1
        self.wake()

    # --- ending ---

    def close(self) -> None:
        """Close the channel, so that it accepts no more items."""
        if self.state is QueueState.OPEN:
            self.state = QueueState.CLOSED
            self._advance()

    def abort(self, cause: BaseException | None) -> list[Any]:
        """Break the channel, and return its items. The caller must drop them without holding the lock."""
        if self.state is QueueState.BROKEN or self.drained:
            return []
        self.state, self.cause = QueueState.BROKEN, cause
        dropped: list[Any] = [self.items, self._groups]
        self.items, self._groups, self.parked = deque(), deque(), 0
        self.wake()
        return dropped

    def open_port(self, reads: bool) -> None:
        """Count an additional reader or writer."""
        if reads:
            self.readers += 1
        else:
            self.writers += 1

    def end_port(self, reads: bool, port: Any) -> None:
        """Subtract a reader or writer from the count, and wake the threads that wait at its port."""
        if reads:
            self.readers -= 1
        else:
            self.writers -= 1
        if not (self.readers if reads else self.writers):
            self.close()
        self.wake_port(reads, port)

    # --- waiting and waking ---

    def wake_port(self, reads: bool, port: Any) -> None:
        """Wake all calls that wait at a port."""
        line = self._lines[reads]
        for waiter in [waiter for waiter in line.asleep if waiter.port is port]:
            line.wake(waiter)

    def could_continue(self, waiter: Waiter) -> bool:
        """Return whether a waiter's operation would now succeed or fail rather than wait."""
        if self.state is QueueState.BROKEN:
            return True
        if waiter.reads:
            reader = waiter.reader
            ordered = reader is not None and bool(reader.orders) and not reader.leased
            return bool(self.items) or ordered or self._ends_for(reader)
        if self.state is QueueState.CLOSED:
            return True
        if waiter.turn is not None:
            return self._has_turn(waiter.turn)
        return self._fits(waiter.size) and self._room() > 0

    def wake(self) -> None:
        """Wake the first sleeper on each side that could continue, or all such sleepers after the end."""
        for line in self._lines.values():
            if not line.asleep or (line.woken and self.state is QueueState.OPEN):
                continue
            able = [waiter for waiter in line.asleep if self.could_continue(waiter)]
            if self.state is QueueState.OPEN and able:
                starving = line.starving
                able = [starving if starving in able else min(able, key=_by_turn)]
            for waiter in able:
                line.wake(waiter)

    def enter(self, waiter: Waiter, again: bool) -> None:
        """Add a waiter to its queue, where it sleeps until it could continue."""
        waiter.for_turn = waiter.turn is not None and waiter.turn > self.turn and not self.items
        self._lines[waiter.reads].enter(waiter, again)

    def leave(self, waiter: Waiter, unused: bool = True) -> None:
        """Remove a waiter, and wake the next one.

        ``unused`` means that the waiter has not performed its operation.
        """
        line = self._lines[waiter.reads]
        if line.leave(waiter) or unused:
            self.wake()

    def _may_pass(self, waiter: Waiter) -> bool:
        first = self._lines[waiter.reads].starving
        if first is None or first is waiter or waiter.turn is not None:
            return True
        return bool(waiter.reader and waiter.reader.orders) or not self.could_continue(first)

    def perform(self, waiter: Waiter, operation: Callable[[], QueueStep], deadline: float) -> QueueStep:
        """Perform the operation as soon as possible. The caller must not hold the lock.

        If a signal handler raises, its exception may leave this call after the operation has been performed.
        """
        line, vain, since, waiter.selecting = self._lines[waiter.reads], 0, 0, deadline != NEVER
        try:
            with self.held():
                passes = deadline == 0 or self.state is not QueueState.OPEN or self._may_pass(waiter)
                step = operation() if passes else QueueStep.WAIT
                if step is QueueStep.WAIT and deadline != 0:
                    since = time.monotonic_ns()
                    self.enter(waiter, again=False)
            while step is QueueStep.WAIT and deadline != 0:
                waiter.bell.sleep(deadline)
                late = time.monotonic() >= deadline
                with self.held():
                    woken = line.leave(waiter)
                    vain += woken
                    if not woken or self.state is not QueueState.OPEN or self._may_pass(waiter):
                        step = operation()
                    if step is QueueStep.WAIT and not late:
                        if vain >= 2 and time.monotonic_ns() - since > PATIENCE_NS and waiter.turn is None:
                            line.starving = line.starving or waiter
                        self.enter(waiter, again=True)
                        self.wake()
                    else:
                        self._end_wait(waiter)
                        break
        except BaseException:
            with self.held():
                line.leave(waiter)
                self._end_wait(waiter)
            raise
        return QueueStep.NOT_NOW if step is QueueStep.WAIT else step

    def _end_wait(self, waiter: Waiter) -> None:
        line = self._lines[waiter.reads]
        if line.starving is waiter:
            line.starving = None
        self.wake()

    def stats(self) -> dict[str, Any]:
        """Return the values of all fields of ``ChannelStats`` except ``awaiting``."""
        reading, writing = self._lines[True], self._lines[False]
        waiting = [*reading.asleep, *reading.woken, *writing.asleep, *writing.woken]
        return {
            "items_in": self.puts + self.parked,
            "items_out": self.takes,
            "bytes_in": self.bytes_in,
            "inside": len(self.items),
            "leased": self.leased,
            "waiting_readers": reading.clock.waiting,
            "waiting_writers": writing.clock.waiting,
            "readers": self.readers,
            "writers": self.writers,
            "read_wait": reading.clock.seconds(),
            "write_wait": writing.clock.seconds(),
            "turn_wait": writing.turns.seconds(),
            "readers_waiting_for": reading.waiting_for(),
            "writers_waiting_for": writing.waiting_for(),
            "selecting": sum(waiter.selecting for waiter in waiting),
            "woken": len(reading.woken) + len(writing.woken),
            "bytes_inside": self.bytes_in - self.bytes_out,
            "short_of_bytes": self.short_of_bytes and writing.clock.waiting > 0,
            "holders": [],
        }


def _by_turn(waiter: Waiter) -> float:
    return math.inf if waiter.turn is None else waiter.turn
