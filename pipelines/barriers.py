"""Provide a barrier, an event and a condition for threads in several processes.

If ``across`` is ``"hosts"``, all three also work across machines, as long as the process that created them is
alive. All three make threads wait at a gate, a channel that is almost always empty. A :class:`SharedDict`
holds the current gate. Closing the gate releases all waiting and later threads; putting an item releases one
thread. Each phase uses another gate, so that a late thread cannot take an item that was meant for another
phase. If ``across`` is ``"hosts"``, the process that created the first gate owns all gates. Gates therefore
survive the exits of other processes.
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
from flowchan.public import public


@dataclass(frozen=True, slots=True)
class _Generation:
    """Channels of a barrier, which its parties use until the barrier breaks or is reset."""

    arrivals: Channel[None]
    gates: tuple[Channel[None], Channel[None]]
    """Gates of alternate phases, so that a thread that is early for the next phase can't pass this phase's
    gate."""

    @classmethod
    def of(cls, parties: int, make: Callable[[int], Channel[None]]) -> _Generation:
        return cls(make(1), (make(parties), make(parties)))

    def arrive(self) -> int:
        """Record an arrival and return the number of earlier arrivals. The channel itself keeps the count."""
        while len(self.arrivals):
            self.arrivals.get_nowait()
        self.arrivals.put_nowait(None)
        return self.arrivals.stats().items_in - 1

    def abort(self) -> None:
        for channel in (self.arrivals, *self.gates):
            channel.abort()


@public
class Barrier:
    """Barrier at which a fixed number of threads, in any processes, repeatedly wait for each other.

    The same threads must take part each time. If one of them dies before it arrives, the others keep waiting,
    as they would at a barrier from the standard library. If a thread may die, pass a timeout to :meth:`wait`.

    Args:
        parties: Number of threads that must arrive, at least 1.
        action: Function that the last thread to arrive calls before any thread continues (default: none). If
            the function raises, the barrier breaks.
        across: ``"processes"`` on one machine (default), or ``"hosts"``.

    Raises:
        TypeError: ``parties`` is not an int, or ``action`` cannot be called.
        ValueError: ``parties`` is less than 1, or ``across`` is unknown.

    Example:
        >>> from flowchan.pipelines import Barrier, map
        >>> def work(barrier, worker):
        ...     return barrier.wait(timeout=60)
        >>> sorted(map(3, work, Barrier(3), on="process").join())
        [0, 1, 2]
    """

    @refuses_misspelt("Barrier")
    def __init__(
        self, parties: int, action: Callable[[], object] | None = None, *, across: Among = "processes"
    ) -> None:
        check_among("Barrier", across)
        self.parties = whole("Barrier", "parties", parties, 1)
        if action is not None and not callable(action):
            raise TypeError(f"Barrier: action must be callable or None, got {action!r}")
        self._action = action
        self._generation = _Generation.of(parties, functools.partial(Channel, across=across))
        self._generations: SharedDict[str, _Generation] = SharedDict({"now": self._generation}, across=across)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until all parties have arrived.

        Args:
            timeout: Maximum seconds to wait (default: no limit).

        Returns:
            This thread's position in the order of arrival, from 0 to ``parties - 1``.

        Raises:
            threading.BrokenBarrierError: ``timeout`` expired in this or another thread, or the barrier was
                aborted or reset. All waiting threads raise this error, and so do later calls until
                :meth:`reset`.
        """
        generation = self._generation
        try:
            with self._generations.lock:
                generation = self._now()
                meeting, index = divmod(generation.arrive(), self.parties)
                gate = generation.gates[meeting % 2]
                if index == 0:
                    _clear(gate)
                if index == self.parties - 1:
                    self._release_all(generation, gate)
                    return index
            gate.get(timeout)
        except ChannelError as error:
            generation.abort()  # the thread that began to break the barrier may have died before it finished
            raise threading.BrokenBarrierError from error
        return index

    def _now(self) -> _Generation:
        """Return the current generation. If this process only knows a broken generation, fetch the newest."""
        if self._generation.arrivals.broken:
            # If the process that created the barrier has exited, the barrier stays broken.
            with contextlib.suppress(Broken):
                self._generation = self._generations["now"]
        return self._generation

    def _release_all(self, generation: _Generation, gate: Channel[None]) -> None:
        if self._action is not None:
            try:
                self._action()
            except BaseException:
                generation.abort()
                raise
        gate.put_many([None] * (self.parties - 1))

    def reset(self) -> None:
        """Make a broken barrier usable again.

        Threads that are waiting get ``threading.BrokenBarrierError``.

        Example:
            >>> from flowchan.pipelines import Barrier
            >>> barrier = Barrier(1)
            >>> barrier.abort()
            >>> barrier.reset()
            >>> barrier.wait()
            0
        """
        with self._generations.lock:
            self._now().abort()
            self._generation = _Generation.of(self.parties, self._generations._another)
            self._generations["now"] = self._generation

    def abort(self) -> None:
        """Break the barrier.

        Threads that are waiting or that arrive before the next :meth:`reset` get
        ``threading.BrokenBarrierError``.

        Example:
            >>> from flowchan.pipelines import Barrier
            >>> barrier = Barrier(2)
            >>> barrier.abort()
            >>> barrier.broken
            True
        """
        self._now().abort()

    @property
    def broken(self) -> bool:
        """Return True if the barrier is broken."""
        return bool(self._now().arrivals.broken)

    @property
    def n_waiting(self) -> int:
        """Return the number of threads that are waiting now."""
        arrivals = self._now().arrivals
        return 0 if arrivals.broken else arrivals.stats().items_in % self.parties

    def __repr__(self) -> str:
        return f"<Barrier of {self.parties}{', broken' if self.broken else ''}>"


def _clear(gate: Channel[None]) -> None:
    """Empty the gate of two phases ago, so that the next phase can use it.

    All parties have arrived since that phase, which is therefore over. Any items left in the gate were meant
    for threads that died.
    """
    while len(gate):
        gate.get_nowait()


@public
class Event:
    """Flag that threads in several processes can wait for, like ``threading.Event``.

    If a process dies, the event keeps its state and does not block other processes.

    Args:
        across: ``"processes"`` on one machine (default), or ``"hosts"``.

    Raises:
        ValueError: ``across`` is unknown.

    Example:
        >>> from flowchan.pipelines import Event, map
        >>> ready = Event()
        >>> workers = map(2, lambda ready, worker: ready.wait(timeout=60), ready, on="process")
        >>> ready.set()
        >>> workers.join()
        [True, True]
    """

    @refuses_misspelt("Event")
    def __init__(self, *, across: Among = "processes") -> None:
        check_among("Event", across)
        gate: Channel[None] = Channel(1, across=across)
        self._gates: SharedDict[str, Channel[None]] = SharedDict({"now": gate}, across=across)

    def is_set(self) -> bool:
        """Return True if the event is set."""
        return bool(self._gates["now"].closed)

    def set(self) -> None:
        """Set the event.

        All waiting threads continue. Later calls of :meth:`wait` return at once, until :meth:`clear` is
        called.

        Example:
            >>> from flowchan.pipelines import Event
            >>> event = Event()
            >>> event.set()
            >>> event.is_set()
            True
            >>> event.clear()
            >>> event.is_set()
            False
        """
        self._gates["now"].close()

    def clear(self) -> None:
        """Clear the event, so that later calls of :meth:`wait` wait for the next :meth:`set`."""
        with self._gates.lock:
            if self.is_set():
                self._gates["now"] = self._gates._another(1)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event is set.

        Args:
            timeout: Maximum seconds to wait (default: no limit).

        Returns:
            True if the event is set, False if ``timeout`` expired.
        """
        try:
            self._gates["now"].get(timeout)
        except Drained:
            return True
        except Empty:
            return False
        raise AssertionError("Event: the channel holds an item, but must stay empty")

    def __repr__(self) -> str:
        return f"<Event {'set' if self.is_set() else 'not set'}>"


@public
class Condition(Held):
    """Condition variable for threads in several processes, like ``threading.Condition``.

    A thread acquires the lock and calls :meth:`wait`, which releases the lock while the thread is waiting. If
    a waiting thread has died, ``notify`` wakes another thread. About a hundred processes on one machine can
    wait at the same time.

    Args:
        lock: :class:`Lock` that guards the shared state (default: a new lock).
        across: ``"processes"`` on one machine (default), or ``"hosts"``. If ``lock`` is given, ``across``
            defaults to the lock's value and must be equal to it.

    Raises:
        TypeError: ``lock`` is not a :class:`Lock`.
        ValueError: ``across`` is unknown, or differs from the scope of ``lock``.

    Example:
        >>> from flowchan.pipelines import Condition, SharedDict, map
        >>> def consume(changed, state, worker):
        ...     with changed:
        ...         changed.wait_for(lambda: state["ready"], timeout=60)
        ...         return state["ready"]
        >>> changed, state = Condition(), SharedDict({"ready": False})
        >>> workers = map(2, consume, changed, state, on="process")
        >>> with changed:
        ...     state["ready"] = True
        ...     changed.notify_all()
        >>> workers.join()
        [True, True]
    """

    @refuses_misspelt("Condition")
    def __init__(self, lock: Lock | None = None, *, across: Among | None = None) -> None:
        if lock is not None and not isinstance(lock, Lock):
            raise TypeError(f"Condition: lock must be a flowchan.pipelines.Lock or None, got {lock!r}")
        if across is not None:
            check_among("Condition", across)
        self._lock = Lock(across=across or "processes") if lock is None else lock
        its = cast(Among, self._lock.channels[0].across)
        if across not in (None, its):
            raise ValueError(
                f"Condition: across must be {its!r} like that of the lock, got {across!r}; use "
                f"Lock(across={across!r}), or pass no lock"
            )
        # One gate for each waiting thread, in order of arrival.
        self._waiting: SharedDict[int, Channel[None]] = SharedDict(across=its)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire the lock, like :meth:`Lock.acquire`.

        Args:
            blocking: False to return at once if the lock is not free (default: True).
            timeout: Maximum seconds to wait (default: -1, no limit).

        Returns:
            True if this thread now holds the lock.
        """
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        """Release the lock.

        Raises:
            RuntimeError: The calling thread does not hold the lock.
        """
        self._lock.release()

    def __exit__(self, *how: Any) -> None:
        # If wait() failed to acquire the lock again, this thread must not release it.
        if how[1] is None or self._lock._is_owned():
            super().__exit__(*how)

    def wait(self, timeout: float | None = None) -> bool:
        """Release the lock, wait for a notification, and acquire the lock again.

        Args:
            timeout: Maximum seconds to wait for the notification (default: no limit).

        Returns:
            True if this thread was notified, False if ``timeout`` expired.

        Raises:
            RuntimeError: The calling thread does not hold the lock.

        Example:
            >>> from flowchan.pipelines import Condition
            >>> changed = Condition()
            >>> with changed:
            ...     changed.wait(timeout=0.01)
            False
        """
        self._check("wait")
        ticket, gate = secrets.randbits(62), self._waiting._another(1)
        with gate.reader() as port:  # if this process dies, the port closes, and notifiers skip it
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
            # A notification may have come after the timeout, but before this thread acquired the lock.
            return gate.stats().items_in > 0

    def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> object:
        """Wait until ``predicate()`` is true.

        Args:
            predicate: Function without arguments, called while the lock is held.
            timeout: Maximum seconds to wait (default: no limit).

        Returns:
            The last value of ``predicate()``, which is false only if ``timeout`` expired.

        Raises:
            RuntimeError: The calling thread does not hold the lock.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while not (found := predicate()):
            remaining = None if until is None else until - time.monotonic()
            if remaining is not None and remaining <= 0:
                break
            self.wait(remaining)
        return found

    def notify(self, n: int = 1) -> None:
        """Wake waiting threads in order of arrival.

        Args:
            n: Maximum number of threads to wake (default: 1).

        Raises:
            RuntimeError: The calling thread does not hold the lock.

        Example:
            >>> from flowchan.pipelines import Condition
            >>> changed = Condition()
            >>> changed.acquire()
            True
            >>> changed.notify()
            >>> changed.release()
        """
        self._check("notify")
        for ticket in self._waiting:
            if n <= 0:
                break
            n -= self._wake(ticket)

    def notify_all(self) -> None:
        """Wake all waiting threads.

        Raises:
            RuntimeError: The calling thread does not hold the lock.
        """
        self._check("notify_all")
        for ticket in self._waiting:
            self._wake(ticket)

    def _wake(self, ticket: int) -> bool:
        """Wake a waiting thread, and return False if the thread had already stopped waiting.

        If a notifier dies between two steps, the next notifier can still wake every waiting thread.
        """
        try:
            self._waiting[ticket].put_nowait(None)
            woken = True
        except (Closed, Full):  # the thread has died, or a notifier woke it and then died
            woken = False
        del self._waiting[ticket]
        return woken

    def _check(self, call: str) -> None:
        if not self._lock._is_owned():
            raise RuntimeError(f"Condition.{call}: this thread does not hold the lock; use `with condition:`")

    def __repr__(self) -> str:
        return f"<Condition, {len(self._waiting)} waiting>"
