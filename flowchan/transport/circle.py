"""Processes tell each other a few words through one that all of them reach, before they know each other.

They go round: each says a line of JSON, and once all have, each hears what all have said. When one of them
leaves, the others hear that it is over. Who has heard the last round may leave: the others have been sent it.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
from typing import Any

from flowchan.transport.interrupts import unless_interrupted

AT_ONCE = 1 << 16
SETTLED = b'"settled"\n'
"""What those say in their last round who stay: they have met, and wait for nobody who leaves."""
LATE = "not all of the other members have said something in time while they met"


class Over(Exception):
    """The circle has ended, and why."""


class Circle:
    """The one in the middle, for ranks from 0 up to ``size``. It waits for none of them to speak, but for one
    that does not read when the kernel takes no more for it. ``over``: why it has ended; connections stay
    until the others have closed them, for what is unread when one is closed takes the last words to the other
    side with it. ``settled``: all have met, and stay to hear when it ends."""

    def __init__(self, size: int) -> None:
        self.over = ""
        self.settled = False
        self.sockets: dict[int, socket.socket] = {}
        self._said = [b""] * size

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
        for sock in self.sockets.values():
            _tell(sock, told)
        return told

    def tell(self, value: Any) -> None:
        """All others, before the first round, a value that JSON has."""
        for sock in self.sockets.values():
            _tell(sock, json.dumps(value).encode() + b"\n")

    def end(self, why: str) -> None:
        """Nobody is to go on."""
        if not self.over:
            self.over = why
            for sock in self.sockets.values():
                _tell(sock, _last_words(why))

    def close(self) -> None:
        for sock in self.sockets.values():
            sock.close()
        self.sockets.clear()


def _last_words(why: str) -> bytes:
    return json.dumps({"over": why}).encode() + b"\n"


def _tell(sock: socket.socket, line: bytes) -> None:
    with contextlib.suppress(OSError):  # it has gone, which is heard of it
        sock.sendall(line)


class Voice:
    """One of the circle, over its connection to the ``middle``, of which that is the name."""

    def __init__(self, sock: socket.socket, middle: str) -> None:
        self._sock, self._middle = sock, middle
        self._has = b""

    def gather(self, value: Any) -> list[Any]:
        """Says a value that JSON has, and gives what all say in this round, by rank. Raises :class:`Over`,
        and ``TimeoutError`` as the socket does."""
        return list(self._hear(json.dumps(value).encode() + b"\n"))

    def hear(self) -> Any:
        """What the one in the middle tells all, before the first round."""
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
            raise Over(f"{self._middle} ended while the members met")
        said = json.loads(line)
        if isinstance(said, dict):
            raise Over(said["over"])
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
        """Between two rounds: whether the circle has not ended."""
        waiting = select.poll()
        waiting.register(self._sock, select.POLLIN)
        return not self._has and not waiting.poll(0)

    def settle(self) -> None:
        """The last round of those who stay. Raises as ``gather`` does."""
        self._hear(SETTLED)
        self._sock.settimeout(None)

    def wait_for_end(self) -> None:
        """Returns when the circle has ended, or :meth:`interrupt` was called by another thread."""
        with contextlib.suppress(OSError):
            self._line()

    def interrupt(self) -> None:
        with contextlib.suppress(OSError):  # the other side has gone
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()
