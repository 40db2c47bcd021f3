"""How threads of several processes wait for each other: a barrier, an event and a condition. With
``across="hosts"`` these may be processes of several machines, as long as that process lives which made what
they wait at.

All three wait at gates, channels in which nothing ever lies for long, and a :class:`SharedDict` says which
gate it is now. A gate opens by being closed, for all who wait and all who come, or by an item for one of
them. So what is to begin anew gets a new gate, and nobody who comes late can take what was meant for others.
Over hosts all gates are channels of the process that made the first, whoever needs a new one: nobody waits at
the gate of somebody who may go.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from flowchan import Broken, Channel, ChannelError, Closed, Drained, Empty, Full
from flowchan.items.arguments import refuses_misspelt, whole
from flowchan.pipelines.channel_backed import Among, Held, check_among
from flowchan.pipelines.locks import Lock
from flowchan.pipelines.shared_dict import SharedDict


@dataclass(frozen=True, slots=True)
class _Room:
    """Where the parties of a barrier meet until it is broken."""

    arrivals: Channel[None]
    gates: tuple[Channel[None], Channel[None]]
    """By turns: who comes to the next meeting early must not leave by the gate of this one."""

    @classmethod
    def of(cls, parties: int, make: Callable[[int], Channel[None]]) -> _Room:
        return cls(make(1), (make(parties), make(parties)))

    def arrive(self) -> int:
        """How many have arrived before, in all: what the channel's own count says."""
        while len(self.arrivals):
            self.arrivals.get_nowait()
        self.arrivals.put_nowait(None)
        return self.arrivals.stats().items_in - 1

    def abort(self) -> None:
        for channel in (self.arrivals, *self.gates):
            channel.abort()


class Barrier:
    """A place where ``parties`` threads, of any processes, wait for each other, any number of times. The last
    to come calls ``action`` before anybody leaves; if that raises, the barrier is broken.

    ``across="hosts"``: of processes on several machines.

    The same participants come each time. One that dies before it arrives keeps the others waiting, as with
    the barriers of the standard library: give ``wait`` a timeout where that can happen.
    """

    @refuses_misspelt("Barrier")
    def __init__(
        self, parties: int, action: Callable[[], object] | None = None, *, across: Among = "processes"
    ) -> None:
        check_among("Barrier", across)
        self.parties = whole("Barrier", "parties", parties, 1)
        if action is not None and not callable(action):
            raise TypeError(f"Barrier: action must be callable, or None, not {action!r}")
        self._action = action
        self._room = _Room.of(parties, functools.partial(Channel, across=across))
        self._rooms: SharedDict[str, _Room] = SharedDict({"now": self._room}, across=across)

    def wait(self, timeout: float | None = None) -> int:
        """Waits until all parties are here. Gives each of them another number, from 0 for the first to
        ``parties - 1``.

        Raises ``threading.BrokenBarrierError`` when ``timeout`` seconds are over, and then for everybody,
        until a ``reset()``.
        """
        room = self._room
        try:
            with self._rooms.lock:
                room = self._now()
                meeting, index = divmod(room.arrive(), self.parties)
                gate = room.gates[meeting % 2]
                if index == 0:
                    _clear(gate)
                if index == self.parties - 1:
                    self._let_go(room, gate)
                    return index
            gate.get(timeout)
        except ChannelError as error:
            room.abort()  # whoever broke it may have died before it was done
            raise threading.BrokenBarrierError from error
        return index

    def _now(self) -> _Room:
        """The room of now: that which is known here, unless it was broken and another may have its place."""
        if self._room.arrivals.broken:
            with contextlib.suppress(Broken):  # who made the barrier is gone: it stays broken
                self._room = self._rooms["now"]
        return self._room

    def _let_go(self, room: _Room, gate: Channel[None]) -> None:
        if self._action is not None:
            try:
                self._action()
            except BaseException:
                room.abort()
                raise
        gate.put_many([None] * (self.parties - 1))

    def reset(self) -> None:
        """Begins anew: a broken barrier can be used again. Everybody who waits gets
        ``threading.BrokenBarrierError``."""
        with self._rooms.lock:
            self._now().abort()
            self._room = _Room.of(self.parties, self._rooms._another)
            self._rooms["now"] = self._room

    def abort(self) -> None:
        """Breaks the barrier: everybody who waits, and everybody who comes before a ``reset()``, gets
        ``threading.BrokenBarrierError``."""
        self._now().abort()

    @property
    def broken(self) -> bool:
        """Whether it is broken."""
        return bool(self._now().arrivals.broken)

    @property
    def n_waiting(self) -> int:
        """How many wait at this moment."""
        arrivals = self._now().arrivals
        return 0 if arrivals.broken else arrivals.stats().items_in % self.parties

    def __repr__(self) -> str:
        return f"<Barrier of {self.parties}{', broken' if self.broken else ''}>"


def _clear(gate: Channel[None]) -> None:
    """All are here since the last meeting, so the one before that is over. What is in its gate was left for a
    participant that died."""
    while len(gate):
        gate.get_nowait()


class Event:
    """Something that has happened, or not yet, for the threads of all processes that have it, as
    ``threading.Event``; with ``across="hosts"`` for processes on several machines. No death of a process can
    set it, clear it, or keep others waiting.
    """

    @refuses_misspelt("Event")
    def __init__(self, *, across: Among = "processes") -> None:
        check_among("Event", across)
        gate: Channel[None] = Channel(1, across=across)
        self._gates: SharedDict[str, Channel[None]] = SharedDict({"now": gate}, across=across)

    def is_set(self) -> bool:
        """Whether it has been set and not been cleared since."""
        return bool(self._gates["now"].closed)

    def set(self) -> None:
        """Lets go everybody who waits, and everybody who comes before a ``clear()``."""
        self._gates["now"].close()

    def clear(self) -> None:
        """Those who come from now on wait for the next ``set()``."""
        with self._gates.lock:
            if self.is_set():
                self._gates["now"] = self._gates._another(1)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it is set, for ``timeout`` seconds at most. Whether it was."""
        try:
            self._gates["now"].get(timeout)
        except Drained:
            return True
        except Empty:
            return False
        raise AssertionError("nobody puts anything into the gate of an event")

    def __repr__(self) -> str:
        return f"<Event {'set' if self.is_set() else 'not set'}>"


class Condition(Held):
    """Where threads of several processes wait until something holds that another thread or process makes so,
    as ``threading.Condition``: who waits has the lock, gives it up for as long as it waits, and looks again.

    ``lock`` is a :class:`Lock` that guards what the condition is about; without one it makes its own,
    ``across="hosts"`` for processes on several machines. A waiter that dies is forgotten, and ``notify``
    wakes another one. About a hundred processes of one machine can wait at a time.
    """

    @refuses_misspelt("Condition")
    def __init__(self, lock: Lock | None = None, *, across: Among | None = None) -> None:
        if lock is not None and not isinstance(lock, Lock):
            raise TypeError(f"Condition: lock must be a flowchan.pipelines.Lock, or None, not {lock!r}")
        if across is not None:
            check_among("Condition", across)
        self._lock = Lock(across=across or "processes") if lock is None else lock
        its = cast(Among, self._lock.channels[0].across)
        if across not in (None, its):
            raise ValueError(
                f"Condition: across={across!r} can't be with a lock across {its!r}: give it "
                f"Lock(across={across!r}), or no lock"
            )
        # In the order in which they have come, each with a gate of its own.
        self._waiting: SharedDict[int, Channel[None]] = SharedDict(across=its)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As :meth:`Lock.acquire`."""
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        """As :meth:`Lock.release`."""
        self._lock.release()

    def __exit__(self, *how: Any) -> None:
        if how[1] is None or self._lock._is_owned():  # not if a wait could not have it again
            super().__exit__(*how)

    def wait(self, timeout: float | None = None) -> bool:
        """Gives up the lock, waits until it is notified, for ``timeout`` seconds at most, and has the lock
        again. Whether it was notified. Raises ``RuntimeError`` if this thread does not hold the lock."""
        self._check("wait")
        ticket, gate = secrets.randbits(62), self._waiting._another(1)
        with gate.reader() as port:  # it goes with this process, and who notifies sees that
            self._waiting[ticket] = gate
            depth = self._lock._release_save()
            try:
                port.get(timeout)
                return True
            except Empty:
                pass
            finally:
                self._lock._acquire_restore(depth)
                self._waiting.pop(ticket, None)
            return gate.stats().items_in > 0  # notified after the time was over, and before it was back

    def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> object:
        """Waits until ``predicate()`` is true, for ``timeout`` seconds at most, and gives its value."""
        until = None if timeout is None else time.monotonic() + timeout
        while not (found := predicate()):
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                break
            self.wait(left)
        return found

    def notify(self, n: int = 1) -> None:
        """Wakes ``n`` of those who wait, the first that have come. Raises ``RuntimeError`` if this thread
        does not hold the lock."""
        self._check("notify")
        for ticket in self._waiting:
            if n <= 0:
                break
            n -= self._wake(ticket)

    def notify_all(self) -> None:
        """Wakes all who wait."""
        self._check("notify_all")
        for ticket in self._waiting:
            self._wake(ticket)

    def _wake(self, ticket: int) -> bool:
        """Whether there was one to be woken. In this order nobody is forgotten by who dies in between."""
        try:
            self._waiting[ticket].put_nowait(None)
            woken = True
        except (Closed, Full):  # it has died; somebody has woken it, and died
            woken = False
        del self._waiting[ticket]
        return woken

    def _check(self, call: str) -> None:
        if not self._lock._is_owned():
            raise RuntimeError(f"Condition.{call}: this thread does not hold the lock; use `with condition:`")

    def __repr__(self) -> str:
        return f"<Condition, {len(self._waiting)} waiting>"
