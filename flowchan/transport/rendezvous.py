"""Processes tell each other a few words through a coordinator that all of them reach, before they know each
other.

They go round: each says a line of JSON, and once all have, each hears what all have said. When one of them
leaves, the others hear that it is over. Who has heard the last round may leave: the others have been sent it.
"""

from __future__ import annotations

import contextlib
import json
import math
import select
import socket
import time
from collections.abc import Callable
from typing import Any

from flowchan.transport.interrupts import unless_interrupted

AT_ONCE = 1 << 16
SETTLED = b'"settled"\n'
"""What those say in their last round who stay: they have met, and wait for nobody who leaves."""
LATE = "not all of the other members have said something in time while they met"
Accept = Callable[[float], tuple[socket.socket, dict[str, Any]]]


class RendezvousEnded(Exception):
    """The rendezvous has ended, and why. ``refused``: those who have come can't meet at all."""

    def __init__(self, why: str, refused: bool = False) -> None:
        super().__init__(why)
        self.refused = refused


class Coordinator:
    """The one in the middle, for ranks from 0 up to ``size``. It waits for none of them to speak, but for one
    that does not read when the kernel takes no more for it. ``over``: why it has ended; connections stay
    until the others have closed them, for what is unread when one is closed takes the last words to the other
    side with it. ``settled``: all have met, and stay to hear when it ends.

    It may be rank 0 itself, until ``give_up``: then it calls :meth:`assemble` and :meth:`gather`.
    """

    def __init__(self, size: int, give_up: float = math.inf) -> None:
        self.over = ""
        self.settled = False
        self.sockets: dict[int, socket.socket] = {}
        self._said = [b""] * size
        self._give_up = give_up

    def come(self, rank: int, sock: socket.socket) -> None:
        """It is here. Who comes twice is sent away."""
        if rank in self.sockets:
            sock.close()
            return
        self.sockets[rank] = sock
        if self.over:
            _tell(sock, _last_words(self.over))

    def hear(self, rank: int) -> bytes:
        """Takes what it says, when its socket is readable. What all have said, if it was the last of them."""
        try:
            came = self.sockets[rank].recv(AT_ONCE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""
        except OSError:
            came = b""
        if came:
            return b"" if self.over else self.say(rank, came)
        self.sockets.pop(rank).close()
        if not self.settled:
            self.end(f"rank {rank} ended while the members met")
        return b""

    def say(self, rank: int, words: bytes) -> bytes:
        """In the name of that rank."""
        self._said[rank] += words
        if not all(line.endswith(b"\n") for line in self._said):
            return b""
        self.settled = all(line == SETTLED for line in self._said)
        told = b"[" + b",".join(line.strip() for line in self._said) + b"]\n"
        self._said = [b""] * len(self._said)
        self._tell_all(told)
        return told

    def tell(self, value: Any) -> None:
        """All others, before the first round, a value that JSON has."""
        self._tell_all(json.dumps(value).encode() + b"\n")

    def end(self, why: str, refused: bool = False) -> None:
        """Nobody is to go on."""
        if not self.over:
            self.over = why
            self._tell_all(_last_words(why, refused))

    def assemble(self, accept: Accept) -> None:
        """Let all others in, whom ``accept`` gives within so many seconds, with their ranks and sizes.

        Raises:
            TimeoutError: Some have not come in time; it names them.
            RendezvousEnded: Two come as one rank, or sizes differ.
        """
        size = len(self._said)
        while missing := set(range(1, size)) - self.sockets.keys():
            try:
                sock, hello = accept(max(0.0, self._give_up - time.monotonic()))
            except unless_interrupted(TimeoutError):
                late = f"of {size} members, these have not come in time: {sorted(missing)}"
                raise TimeoutError(late) from None
            rank, its_size = hello.get("rank", -1), hello.get("size")
            if rank in self.sockets and _has_ended(self.sockets[rank]):
                self.sockets.pop(rank).close()  # it comes once more
            self.come(rank if 0 < rank < size and rank not in self.sockets else size, sock)
            if its_size != size:
                self.end(f"rank 0 is one of {size} members, rank {rank} one of {its_size}", True)
            elif size in self.sockets:
                self.end(f"two processes have come as rank {rank}", True)
            if self.over:
                while self.sockets:  # until they have heard it
                    self._look()
                raise RendezvousEnded(self.over, True)

    def gather(self, value: Any) -> list[Any]:
        """As a participant's, of rank 0."""
        told = self.say(0, json.dumps(value).encode() + b"\n")
        while not told:
            told = self._look()
            if self.over:
                raise RendezvousEnded(self.over)
        return list(json.loads(told))

    def _look(self) -> bytes:
        """What all have said, if that is heard next."""
        waiting, ranks = select.poll(), {sock.fileno(): rank for rank, sock in self.sockets.items()}
        for fd in ranks:
            waiting.register(fd, select.POLLIN)
        longest = None if self._give_up == math.inf else max(0.0, self._give_up - time.monotonic()) * 1000
        ready = waiting.poll(longest)
        if not ready:
            raise TimeoutError(LATE)
        return [self.hear(ranks[fd]) for fd, _ in ready][-1]

    def _tell_all(self, line: bytes) -> None:
        for sock in self.sockets.values():
            _tell(sock, line)

    def close(self) -> None:
        for sock in self.sockets.values():
            sock.close()
        self.sockets.clear()


def _last_words(why: str, refused: bool = False) -> bytes:
    return json.dumps({"over": why, "refused": refused}).encode() + b"\n"


def _tell(sock: socket.socket, line: bytes) -> None:
    with contextlib.suppress(OSError):  # it has gone, which is heard of it
        sock.sendall(line)


def _has_ended(sock: socket.socket) -> bool:
    try:
        return not sock.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
    except OSError as error:
        return not isinstance(error, BlockingIOError)


class Participant:
    """One of those that meet, over its connection to the ``coordinator``, of which that is the name."""

    def __init__(self, sock: socket.socket, coordinator: str) -> None:
        self._sock, self._coordinator = sock, coordinator
        self._has = b""

    def gather(self, value: Any) -> list[Any]:
        """Says a value that JSON has, and gives what all say in this round, by rank. Raises
        :class:`RendezvousEnded`,
        and ``TimeoutError`` as the socket does."""
        return list(self._hear(json.dumps(value).encode() + b"\n"))

    def hear(self) -> Any:
        """What the coordinator tells all, before the first round."""
        return self._hear(b"")

    def _hear(self, words: bytes) -> Any:
        try:
            self._sock.sendall(words)
            line = self._line()
        except unless_interrupted(OSError) as error:
            if isinstance(error, TimeoutError):
                raise TimeoutError(LATE) from None
            line = b""
        if not line:
            raise RendezvousEnded(f"{self._coordinator} ended while the members met")
        said = json.loads(line)
        if isinstance(said, dict):
            raise RendezvousEnded(said["over"], said["refused"])
        return said

    def _line(self) -> bytes:
        while b"\n" not in self._has:
            came = self._sock.recv(AT_ONCE)
            if not came:
                return b""
            self._has += came
        line, _, self._has = self._has.partition(b"\n")
        return line

    def goes_on(self) -> bool:
        """Between two rounds: whether the rendezvous has not ended."""
        waiting = select.poll()
        waiting.register(self._sock, select.POLLIN)
        return not self._has and not waiting.poll(0)

    def settle(self) -> None:
        """The last round of those who stay. Raises as ``gather`` does."""
        self._hear(SETTLED)
        self._sock.settimeout(None)

    def wait_for_end(self) -> None:
        """Returns when the rendezvous has ended, or :meth:`interrupt` was called by another thread."""
        with contextlib.suppress(OSError):
            self._line()

    def interrupt(self) -> None:
        with contextlib.suppress(OSError):  # the other side has gone
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()
