"""A lock and a semaphore between the threads of all processes that have them.

A :class:`Lock` is a channel with one item, the token, that is never really taken out: holding the lock is
having the token on lease, and releasing it gives the token back. So when the process of the holder dies, the
token comes back by itself, and there is no step at which the token could be lost or be there twice. A
:class:`Semaphore` has several tokens.
"""

from __future__ import annotations

import threading
import time

from flowchan import Channel, Empty, In
from flowchan.items.arguments import refuses_misspelt, whole
from flowchan.pipelines.channel_backed import Among, Held, Shared, check_among, give_back


class Lock(Held, Shared):
    """A lock that a thread may take several times, as ``threading.RLock``, and that holds between processes;
    with ``across="hosts"`` between those of several machines, as long as the process lives that made it.

    Give it to another process as an argument, through a channel, or by fork. If the process that holds it
    dies, in whatever way, the next one gets it; what the lock guards may then be half done. A forked child
    does not hold what its parent's thread holds.
    """

    @refuses_misspelt("Lock")
    def __init__(self, *, across: Among = "processes") -> None:
        check_among("Lock", across)
        channel: Channel[None] = Channel(1, across=across)
        channel.put_nowait(None)
        channel.close()  # nobody can put a second token
        self._open((channel,))

    def _renew(self) -> None:
        # The threads of this process take turns here, so that one of them at most waits for the token.
        self._turn = threading.RLock()
        self._depth = 0
        self._holder: int | None = None
        self._token: In[None] | None = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As ``threading.Lock.acquire``: whether the lock is now held."""
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
                    give_back(token)  # it may have come together with a Ctrl-C
                self._turn.release()
                if isinstance(error, Empty):
                    return False
                raise
            self._token = token
            self._holder = threading.get_ident()
        self._depth += 1
        return True

    def release(self) -> None:
        """Raises ``RuntimeError`` if the calling thread does not hold the lock."""
        if not self._is_owned():
            raise RuntimeError("this thread does not hold the lock")
        self._depth -= 1
        if self._depth == 0 and self._token is not None:
            token, self._token, self._holder = self._token, None, None
            give_back(token)
        self._turn.release()

    def locked(self) -> bool:
        """Whether anybody holds it at this moment, in any process."""
        return len(self.channels[0]) == 0

    # What a condition asks of its lock, by the names that threading.RLock has for it.

    def _is_owned(self) -> bool:
        return self._holder == threading.get_ident()

    def _release_save(self) -> int:
        """Releases it as often as the thread has acquired it."""
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
    """Lets ``value`` threads at most, of any processes, be inside at the same time; with ``across="hosts"``
    of processes on several machines.

    A process releases what it has acquired, by whichever of its threads, and no more than that: this is
    ``threading.BoundedSemaphore``. What a process had acquired that dies, in whatever way, is free again. A
    forked child has acquired nothing.
    """

    @refuses_misspelt("Semaphore")
    def __init__(self, value: int = 1, *, across: Among = "processes") -> None:
        check_among("Semaphore", across)
        whole("Semaphore", "value", value, 1)
        permits: Channel[None] = Channel(value, across=across)
        permits.put_many([None] * value)
        permits.close()  # nobody can put more of them
        self._open((permits,))

    def _renew(self) -> None:
        self._held: list[In[None]] = []  # a port for each, as a port has one item in hand

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        """As ``threading.Semaphore.acquire``: whether it was acquired."""
        permit = self.channels[0].reader()
        try:
            permit.get(timeout if blocking else 0)
        except BaseException as error:
            give_back(permit)  # it may have come together with a Ctrl-C
            if isinstance(error, Empty):
                return False
            raise
        self._held.append(permit)
        return True

    def release(self) -> None:
        """Raises ``ValueError`` if this process has released all that it has acquired."""
        try:
            permit = self._held.pop()
        except IndexError:
            raise ValueError(
                "this process has released the semaphore as often as it has acquired it"
            ) from None
        give_back(permit)

    def __repr__(self) -> str:
        return f"<Semaphore, {len(self.channels[0])} of {self.channels[0].capacity} free>"
