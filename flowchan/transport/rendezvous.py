"""Exchange small values, through a coordinator, between processes that do not know each other yet.

The exchange works in rounds. Each participant sends a line of JSON, and when all lines have arrived, the
coordinator sends all of them to everyone. If a participant leaves, the others learn that the rendezvous has
ended. After a participant has received the last round, it may leave, because the others will also receive
that round.
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
"""Last line from a participant, which then stays connected.

Once all participants have sent this line, one that leaves does not end the rendezvous any more.
"""
LATE = "some other members did not send anything in time during the rendezvous"
Accept = Callable[[float], tuple[socket.socket, dict[str, Any]]]


class RendezvousEnded(Exception):
    """Raised when the rendezvous has ended; ``why`` is the reason.

    If ``refused`` is true, its members can never form a group.
    """

    def __init__(self, why: str, refused: bool = False) -> None:
        super().__init__(why)
        self.refused = refused


class Coordinator:
    """Coordinates a rendezvous of ranks 0 to ``size - 1``.

    The coordinator never waits for a participant to send. The coordinator waits only for a participant that
    does not read while the kernel's send buffer is full. Connections stay open until the participants close
    them, because closing one with unread data would destroy the last message to the peer.

    If rank 0 is the coordinator, it calls :meth:`assemble` and :meth:`gather`, which end at the time
    ``give_up``.

    Args:
        size: Number of participants.
        give_up: Monotonic time at which the rendezvous ends.

    Attributes:
        over: Why the rendezvous has ended; empty if it continues.
        settled: True if the rendezvous is complete; participants stay connected to learn of its end.
    """

    def __init__(self, size: int, give_up: float = math.inf) -> None:
        self.over = ""
        self.settled = False
        self.sockets: dict[int, socket.socket] = {}
        self._lines = [b""] * size
        self._give_up = give_up

    def come(self, rank: int, sock: socket.socket) -> None:
        """Add a rank's connection. Close a second connection of the same rank."""
        if rank in self.sockets:
            sock.close()
            return
        self.sockets[rank] = sock
        if self.over:
            _tell(sock, _end_message(self.over))

    def receive(self, rank: int) -> bytes:
        """Receive from a rank whose socket is readable; return the completed round, if any."""
        try:
            came = self.sockets[rank].recv(AT_ONCE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""
        except OSError:
            came = b""
        if came:
            return b"" if self.over else self.add_line(rank, came)
        self.sockets.pop(rank).close()
        if not self.settled:
            self.end(f"rank {rank} ended during the rendezvous")
        return b""

    def add_line(self, rank: int, words: bytes) -> bytes:
        """Add the line that a rank has sent to this round; return the round if it is complete."""
        self._lines[rank] += words
        if not all(line.endswith(b"\n") for line in self._lines):
            return b""
        self.settled = all(line == SETTLED for line in self._lines)
        answer = b"[" + b",".join(line.strip() for line in self._lines) + b"]\n"
        self._lines = [b""] * len(self._lines)
        self._tell_all(answer)
        return answer

    def tell(self, value: Any) -> None:
        """Send a JSON value to all participants before the first round."""
        self._tell_all(json.dumps(value).encode() + b"\n")

    def end(self, why: str, refused: bool = False) -> None:
        """End the rendezvous for all participants."""
        if not self.over:
            self.over = why
            self._tell_all(_end_message(why, refused))

    def assemble(self, accept: Accept) -> None:
        """Accept all other ranks until ``give_up``.

        Participants with the rank ``None`` get the remaining ranks in order of arrival.

        Args:
            accept: Function that waits up to the given number of seconds for a connection. The function
                returns the connection and a hello with ``rank`` and ``size``.

        Raises:
            TimeoutError: Some ranks did not connect in time; the message lists them.
            RendezvousEnded: Two processes have the same rank, or different values of ``size``.
        """
        arrived: list[socket.socket] = []  # connections of participants without a rank
        try:
            self._assemble(accept, arrived)
        except BaseException:
            for sock in arrived:
                if self.over:
                    _tell(sock, _end_message(self.over, True))
                sock.close()
            raise
        for rank, sock in zip(self._missing(), arrived, strict=True):
            self.come(rank, sock)
            _tell(sock, json.dumps(rank).encode() + b"\n")

    def _missing(self) -> list[int]:
        return sorted(set(range(1, len(self._lines))) - self.sockets.keys())

    def _assemble(self, accept: Accept, arrived: list[socket.socket]) -> None:
        size = len(self._lines)
        while True:
            for ended in filter(_has_ended, arrived.copy()):
                arrived.remove(ended)
                ended.close()
            if not (missing := self._missing()[len(arrived) :]):
                return
            try:
                sock, hello = accept(max(0.0, self._give_up - time.monotonic()))
            except unless_interrupted(TimeoutError):
                late = f"rank 0 of {size} timed out: ranks {missing} have not arrived"
                raise TimeoutError(late) from None
            rank, its_size = hello.get("rank", -1), hello.get("size")
            if rank is None and its_size == size:
                arrived.append(sock)
                continue
            who = "a member without a rank" if rank is None else f"rank {rank}"
            rank = size if rank is None else rank
            if rank in self.sockets and _has_ended(self.sockets[rank]):
                self.sockets.pop(rank).close()  # the rank has connected again, so close its old connection
            self.come(rank if 0 < rank < size and rank not in self.sockets else size, sock)
            if its_size != size:
                self.end(
                    f"all members must pass the same size, got {size} from rank 0 and {its_size} from {who}",
                    True,
                )
            elif size in self.sockets:
                self.end(f"each rank must be used once, got two processes with rank {rank}", True)
            if self.over:
                while self.sockets:  # wait until the participants have received the reason
                    self._receive_ready()
                raise RendezvousEnded(self.over, True)

    def gather(self, value: Any) -> list[Any]:
        """Exchange rank 0's value with all participants, like :meth:`Participant.gather`."""
        answer = self.add_line(0, json.dumps(value).encode() + b"\n")
        while not answer:
            answer = self._receive_ready()
            if self.over:
                raise RendezvousEnded(self.over)
        return list(json.loads(answer))

    def _receive_ready(self) -> bytes:
        """Receive from the ranks that are ready; return the completed round, if any."""
        waiting, ranks = select.poll(), {sock.fileno(): rank for rank, sock in self.sockets.items()}
        for fd in ranks:
            waiting.register(fd, select.POLLIN)
        longest = None if self._give_up == math.inf else max(0.0, self._give_up - time.monotonic()) * 1000
        ready = waiting.poll(longest)
        if not ready:
            raise TimeoutError(LATE)
        return [self.receive(ranks[fd]) for fd, _ in ready][-1]

    def _tell_all(self, line: bytes) -> None:
        for sock in self.sockets.values():
            _tell(sock, line)

    def close(self) -> None:
        for sock in self.sockets.values():
            sock.close()
        self.sockets.clear()


def _end_message(why: str, refused: bool = False) -> bytes:
    return json.dumps({"over": why, "refused": refused}).encode() + b"\n"


def _tell(sock: socket.socket, line: bytes) -> None:
    with contextlib.suppress(OSError):  # if the peer is gone, the next receive reports it
        sock.sendall(line)


def _has_ended(sock: socket.socket) -> bool:
    try:
        return not sock.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
    except OSError as error:
        return not isinstance(error, BlockingIOError)


class Participant:
    """Participant in a rendezvous. ``coordinator`` is the name of the other end in errors."""

    def __init__(self, sock: socket.socket, coordinator: str) -> None:
        self._sock, self._coordinator = sock, coordinator
        self._has = b""

    def gather(self, value: Any) -> list[Any]:
        """Exchange a JSON value with all participants in this round.

        Args:
            value: This participant's value.

        Returns:
            All participants' values, by rank.

        Raises:
            RendezvousEnded: The rendezvous has ended.
            TimeoutError: The socket's timeout expired.
        """
        return list(self._exchange(json.dumps(value).encode() + b"\n"))

    def receive(self) -> Any:
        """Return a value that the coordinator sends to all before the first round."""
        return self._exchange(b"")

    def _exchange(self, words: bytes) -> Any:
        try:
            self._sock.sendall(words)
            line = self._line()
        except unless_interrupted(OSError) as error:
            if isinstance(error, TimeoutError):
                raise TimeoutError(LATE) from None
            line = b""
        if not line:
            raise RendezvousEnded(f"{self._coordinator} ended during the rendezvous")
        message = json.loads(line)
        if isinstance(message, dict):
            raise RendezvousEnded(message["over"], message["refused"])
        return message

    def _line(self) -> bytes:
        while b"\n" not in self._has:
            came = self._sock.recv(AT_ONCE)
            if not came:
                return b""
            self._has += came
        line, _, self._has = self._has.partition(b"\n")
        return line

    def goes_on(self) -> bool:
        """Return whether the rendezvous continues. Call this only between two rounds."""
        waiting = select.poll()
        waiting.register(self._sock, select.POLLIN)
        return not self._has and not waiting.poll(0)

    def settle(self) -> None:
        """Complete the last round; afterwards, all participants stay connected.

        Raises the same errors as ``gather``.
        """
        self._exchange(SETTLED)
        self._sock.settimeout(None)

    def wait_for_end(self) -> None:
        """Wait until the rendezvous ends, or until another thread calls :meth:`interrupt`."""
        with contextlib.suppress(OSError):
            self._line()

    def interrupt(self) -> None:
        with contextlib.suppress(OSError):  # the peer may be gone
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()
