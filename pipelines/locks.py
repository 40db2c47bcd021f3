"""Lock and semaphore for the threads of several processes.

A :class:`Lock` is a channel with one item, the token, which never leaves the channel for good. The holder has
the token on lease, and a release gives it back. If the holder's process dies, its lease ends and the token is
in the channel again. So at no step can the token be lost or exist twice. A :class:`Semaphore` has several
tokens.
"""

from __future__ import annotations

import threading
import time

from flowchan import Channel, Empty, In
from flowchan.items.arguments import refuses_misspelt, whole
from flowchan.pipelines.channel_backed import Among, Held, Shared, check_among, give_back


class Lock(Held, Shared):
    """Reentrant lock for the threads of several processes, like ``threading.RLock``.

    Give the lock to another process as an argument, through a channel, or by fork. If the process that holds
    the lock dies, the next one gets it; an update under the lock may then be incomplete. A forked child does
    not hold its parent's lock. With ``across="hosts"``, the lock works as long as the process that created it
    lives.

    Args:
        across: ``"processes"`` (default) of one machine, or ``"hosts"``.

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
        channel.close()  # prevents a second token
        self._open((channel,))

    def _renew(self) -> None:
        # The threads of this process take turns here, so at most one of them waits for the token.
        self._turn = threading.RLock()
        self._depth = 0
        self._holder: int | None = None
        self._token: In[None] | None = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire the lock, like ``threading.RLock.acquire``.

        Args:
            blocking: False to return at once (default: True).
            timeout: Maximum seconds to wait (default: -1, no limit).

        Returns:
            True if this thread holds the lock now.

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
                    give_back(token)  # it may have arrived together with a Ctrl-C
                self._turn.release()
                if isinstance(error, Empty):
                    return False
                raise
            self._token = token
            self._holder = threading.get_ident()
        self._depth += 1
        return True

    def release(self) -> None:
        """Release the lock once.

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
        """Return True if a thread of any process holds the lock now."""
        return len(self.channels[0]) == 0

    # Methods that a condition calls on its lock, with the names of threading.RLock.

    def _is_owned(self) -> bool:
        return self._holder == threading.get_ident()

    def _release_save(self) -> int:
        """Release the lock as often as the thread has acquired it, and return that number."""
        depth = self._depth
        for _ in range(depth):
            self.release()
        return depth

    def _acquire_restore(self, depth: int) -> None:
        for _ in range(depth):
            self.acquire()

    def __repr__(self) -> str:
        return f"<Lock {'held' if self.locked() else 'free'}>"


class Semaphore(Held, Shared):
    """Semaphore for the threads of several processes, like ``threading.BoundedSemaphore``.

    Any thread of a process may release a permit that the process has acquired. If a process dies, its permits
    are free again. A forked child holds none. With ``across="hosts"``, the semaphore works as long as the
    process that created it lives.

    Args:
        value: Number of permits, at least 1 (default: 1).
        across: ``"processes"`` (default) of one machine, or ``"hosts"``.

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
        permits.close()  # prevents further permits
        self._open((permits,))

    def _renew(self) -> None:
        self._held: list[In[None]] = []  # one port per permit, because a port has one item on lease

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        """Acquire a permit, like ``threading.Semaphore.acquire``.

        Args:
            blocking: False to return at once (default: True).
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
            give_back(permit)  # it may have arrived together with a Ctrl-C
            if isinstance(error, Empty):
                return False
            raise
        self._held.append(permit)
        return True

    def release(self) -> None:
        """Release a permit.

        Raises:
            ValueError: This process holds no permit.
        """
        try:
            permit = self._held.pop()
        except IndexError:
            raise ValueError("release: this process holds no permit of the semaphore") from None
        give_back(permit)

    def __repr__(self) -> str:
        return f"<Semaphore, {len(self.channels[0])} of {self.channels[0].capacity} free>"
