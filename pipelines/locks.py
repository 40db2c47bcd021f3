"""Provide a lock and a semaphore that threads in several processes can share.

A :class:`Lock` is a channel with one item, the token, which is never removed permanently. The holder leases
the token, and gives it back to release the lock. If the holder's process dies, the lease ends and the token
is available again. The token can therefore never be lost or duplicated. A :class:`Semaphore` has several
tokens, called permits.
"""

from __future__ import annotations

import threading
import time

from flowchan import Channel, Empty, In
from flowchan.items.arguments import refuses_misspelt, whole
from flowchan.pipelines.channel_backed import Among, Held, Shared, check_among, give_back
from flowchan.public import public


@public
class Lock(Held, Shared):
    """Reentrant lock for threads in several processes, like ``threading.RLock``.

    Pass the lock to another process as an argument, through a channel, or by fork. If the process that holds
    the lock dies, the next waiting thread gets the lock. The update that the dead process was making may be
    incomplete. A forked child does not hold its parent's lock. If ``across`` is ``"hosts"``, the lock works
    only while the process that created it is alive.

    Args:
        across: ``"processes"`` on one machine (default), or ``"hosts"``.

    Raises:
        ValueError: ``across`` is unknown.

    Example:
        >>> from flowchan.pipelines import Lock, SharedDict, map
        >>> def work(lock, counts, worker):
        ...     with lock:
        ...         counts["n"] += 1
        >>> counts = SharedDict({"n": 0})
        >>> results = map(4, work, Lock(), counts, on="process").join()
        >>> counts["n"]
        4
    """

    @refuses_misspelt("Lock")
    def __init__(self, *, across: Among = "processes") -> None:
        check_among("Lock", across)
        channel: Channel[None] = Channel(1, across=across)
        channel.put_nowait(None)
        channel.close()  # from now on, no second token can be added
        self._open((channel,))

    def _renew(self) -> None:
        # Threads of this process first compete for this lock, so at most one of them waits for the token.
        self._turn = threading.RLock()
        self._depth = 0
        self._holder: int | None = None
        self._token: In[None] | None = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire the lock, like ``threading.RLock.acquire``.

        Args:
            blocking: False to return at once if the lock is not free (default: True).
            timeout: Maximum seconds to wait (default: -1, no limit).

        Returns:
            True if this thread now holds the lock.

        Example:
            >>> from flowchan.pipelines import Lock
            >>> lock = Lock()
            >>> lock.acquire(timeout=1), lock.locked()
            (True, True)
            >>> lock.release()
            >>> lock.locked()
            False
        """
        began = time.monotonic()
        if not self._turn.acquire(blocking, timeout):
            return False
        if self._depth == 0:
            token: In[None] | None = None
            try:
                token = self.channels[0].reader()
                if not blocking:
                    token.get_nowait()
                elif timeout < 0:
                    token.get()
                else:
                    token.get(timeout=max(0.0, timeout - (time.monotonic() - began)))
            except BaseException as error:
                if token is not None:
                    give_back(token)  # Ctrl-C may have come after the call got the token
                self._turn.release()
                if isinstance(error, Empty):
                    return False
                raise
            self._token = token
            self._holder = threading.get_ident()
        self._depth += 1
        return True

    def release(self) -> None:
        """Release the lock once. A lock that was acquired n times must be released n times.

        Raises:
            RuntimeError: The calling thread does not hold the lock.
        """
        if not self._is_owned():
            raise RuntimeError("release: this thread does not hold the lock")
        self._depth -= 1
        if self._depth == 0 and self._token is not None:
            token, self._token, self._holder = self._token, None, None
            give_back(token)
        self._turn.release()

    def locked(self) -> bool:
        """Return True if a thread in any process holds the lock now."""
        return len(self.channels[0]) == 0

    # ``threading.Condition`` calls methods with these names on its lock.

    def _is_owned(self) -> bool:
        return self._holder == threading.get_ident()

    def _release_save(self) -> int:
        """Release the lock as many times as this thread has acquired it, and return that number."""
        depth = self._depth
        for _ in range(depth):
            self.release()
        return depth

    def _acquire_restore(self, depth: int) -> None:
        for _ in range(depth):
            self.acquire()

    def __repr__(self) -> str:
        return f"<Lock {'held' if self.locked() else 'free'}>"


@public
class Semaphore(Held, Shared):
    """Semaphore for threads in several processes, like ``threading.BoundedSemaphore``.

    Any thread of a process may release a permit that the process has acquired. If a process dies, its permits
    become free. A forked child does not hold its parent's permits. If ``across`` is ``"hosts"``, the
    semaphore works only while the process that created it is alive.

    Args:
        value: Number of permits, at least 1 (default: 1).
        across: ``"processes"`` on one machine (default), or ``"hosts"``.

    Raises:
        TypeError: ``value`` is not an int.
        ValueError: ``value`` is less than 1, or ``across`` is unknown.

    Example:
        >>> from flowchan.pipelines import Semaphore, map
        >>> def fetch(downloads, worker):
        ...     with downloads:  # at most two workers at a time
        ...         return worker
        >>> map(4, fetch, Semaphore(2), on="process").join()
        [1, 2, 3, 4]
    """

    @refuses_misspelt("Semaphore")
    def __init__(self, value: int = 1, *, across: Among = "processes") -> None:
        check_among("Semaphore", across)
        whole("Semaphore", "value", value, 1)
        permits: Channel[None] = Channel(value, across=across)
        permits.put_many([None] * value)
        permits.close()  # from now on, no permit can be added
        self._open((permits,))

    def _renew(self) -> None:
        self._held: list[In[None]] = []  # one port per permit, because a port leases only one item at a time

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        """Acquire a permit, like ``threading.Semaphore.acquire``.

        Args:
            blocking: False to return at once if no permit is free (default: True).
            timeout: Maximum seconds to wait (default: no limit).

        Returns:
            True if the permit was acquired.

        Example:
            >>> from flowchan.pipelines import Semaphore
            >>> permits = Semaphore(1)
            >>> permits.acquire(), permits.acquire(timeout=0.01)
            (True, False)
            >>> permits.release()
        """
        permit = self.channels[0].reader()
        try:
            permit.get(timeout if blocking else 0)
        except BaseException as error:
            give_back(permit)  # Ctrl-C may have come after the call got the permit
            if isinstance(error, Empty):
                return False
            raise
        self._held.append(permit)
        return True

    def release(self) -> None:
        """Release a permit.

        Raises:
            ValueError: This process does not hold a permit.
        """
        try:
            permit = self._held.pop()
        except IndexError:
            raise ValueError("release: this process does not hold a permit of the semaphore") from None
        give_back(permit)

    def __repr__(self) -> str:
        return f"<Semaphore, {len(self.channels[0])} of {self.channels[0].capacity} free>"
