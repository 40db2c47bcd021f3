"""A lock and a barrier between the threads of all processes that have them.

A :class:`Lock` is a channel with one item, the token, that is never really taken out: holding the lock is
having the token on lease, and releasing it gives the token back. So when the process of the holder dies, the
token comes back by itself, and there is no step at which the token could be lost or be there twice.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType

from flowchan import Channel, ChannelError, Empty, In
from flowchan.items.whole import whole
from flowchan.pipelines.sharing import Shared, give_back


class Lock(Shared):
    """A lock that a thread may take several times, as ``threading.RLock``, and that holds between processes.

    Give it to another process as an argument, through a channel, or by fork. If the process that holds it
    dies, in whatever way, the next one gets it; what the lock guards may then be half done. A forked child
    does not hold what its parent's thread holds.
    """

    def __init__(self) -> None:
        channel: Channel[None] = Channel(1, across="processes")
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
        if self._holder != threading.get_ident():
            raise RuntimeError("this thread does not hold the lock")
        self._depth -= 1
        if self._depth == 0 and self._token is not None:
            token, self._token, self._holder = self._token, None, None
            give_back(token)
        self._turn.release()

    def locked(self) -> bool:
        """Whether anybody holds it at this moment, in any process."""
        return len(self.channels[0]) == 0

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Lock {'held' if self.locked() else 'free'}>"


class Barrier:
    """A place where ``parties`` threads, of any processes, wait for each other, any number of times.

    The same participants come each time. One that dies before it arrives keeps the others waiting, as with
    the barriers of the standard library: give ``wait`` a timeout where that can happen.
    """

    def __init__(self, parties: int) -> None:
        self.parties = whole("Barrier", "parties", parties, 1)
        self._lock = Lock()
        self._arrivals: Channel[None] = Channel(1, across="processes")
        # Two gates by turns: who comes to the next meeting early must not leave by the gate of this one.
        self._gates: tuple[Channel[None], ...] = tuple(Channel(parties, across="processes") for _ in range(2))

    def wait(self, timeout: float | None = None) -> int:
        """Waits until all parties are here. Gives each of them another number, from 0 for the first to
        ``parties - 1``.

        Raises ``threading.BrokenBarrierError`` when ``timeout`` seconds are over, and then for everybody, now
        and later.
        """
        try:
            with self._lock:
                meeting, index = divmod(self._arrive(), self.parties)
                gate = self._gates[meeting % 2]
                if index == 0:
                    self._clear(gate)
                if index == self.parties - 1:
                    gate.put_many([None] * index)
            if index < self.parties - 1:
                gate.get(timeout)
        except ChannelError as error:
            self.abort()
            raise threading.BrokenBarrierError from error
        return index

    def _arrive(self) -> int:
        """How many have arrived before, in all: what the channel's own count says."""
        if len(self._arrivals):
            self._arrivals.get_nowait()
        self._arrivals.put_nowait(None)
        return self._arrivals.stats().items_in - 1

    def _clear(self, gate: Channel[None]) -> None:
        """All are here since the last meeting, so the one before that is over. What is in its gate was left
        for a participant that died."""
        while len(gate):
            gate.get_nowait()

    def abort(self) -> None:
        """Breaks the barrier: everybody who waits, and everybody who comes, gets
        ``threading.BrokenBarrierError``."""
        for channel in (self._arrivals, *self._gates):
            channel.abort()

    @property
    def broken(self) -> bool:
        """Whether it is broken."""
        return bool(self._arrivals.broken)

    def __repr__(self) -> str:
        return f"<Barrier of {self.parties}{', broken' if self.broken else ''}>"
