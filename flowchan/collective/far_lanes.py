"""Messages from one member to another on another host: a connection for each pair and direction in use.

Every member listens. What it sends waits in a channel for a thread that connects and passes it on, so a
sender waits for nobody; who receives lets in whoever has something for it. As on one host, a receiver that is
there is waited for at the end.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

from flowchan.channel.channel import Channel
from flowchan.collective.values import dumps, loads
from flowchan.errors import Broken, Closed, MemberDied, MemberLeft
from flowchan.transport.authentication import Hello, meet
from flowchan.transport.door import Door
from flowchan.transport.tcp import dial

SIZE = struct.Struct("<q")
LEFT = -1  # in place of a message's size: its sender has left
LOOK = 0.2
"""Seconds until a receiver looks first whether a member that has sent nothing is there; then ever later."""
LONG = 1e6


class FarLanes:
    """Those of one member, ``rank``, which listens at ``door``; ``addresses``: where the others do."""

    def __init__(self, rank: int, door: Door, addresses: Sequence[str], secret: bytes) -> None:
        self.door, self.addresses = door, addresses
        self._rank, self._secret = rank, secret
        self._lock = threading.Lock()
        self._out: dict[int, _Outgoing] = {}
        self._in: dict[int, _Incoming] = {}

    def send(self, x: Any, to: int, timeout: float | None) -> None:
        if to not in self._out:
            self._out[to] = _Outgoing(self._rank, self.addresses[to], self._secret)
        try:
            self._out[to].messages.put(dumps(x), timeout)
        except (Broken, Closed) as error:
            raise _gone(to, "send") from error

    def receive(self, source: int, timeout: float | None) -> Any:
        give_up = time.monotonic() + (LONG if timeout is None else timeout)
        try:
            return loads(self._from(source, give_up).receive(source, give_up))
        except TimeoutError:
            raise TimeoutError(f"rank {source} has sent nothing to rank {self._rank} in time") from None

    def _from(self, source: int, give_up: float) -> _Incoming:
        wait = LOOK
        while source not in self._in:
            gone = wait > LOOK and self._is_gone(source)
            left = max(0.0, give_up - time.monotonic())
            self._let_in(0.0 if gone else min(wait, left), source)
            if source not in self._in and gone:
                raise _gone(source, "receive")
            if source not in self._in and not left:
                raise TimeoutError
            wait = min(2 * wait, 5.0)
        return self._in[source]

    def _let_in(self, wait: float, source: int) -> None:
        """One that has something for us, within so many seconds. Another thread may be at it."""
        if not self._lock.acquire(timeout=wait or 0.01):
            return
        try:
            if source not in self._in:
                with contextlib.suppress(TimeoutError):
                    self.adopt(*self.door.accept(wait))
        finally:
            self._lock.release()

    def adopt(self, sock: socket.socket, hello: Hello) -> None:
        """One who has something for us is let in."""
        self._in[hello["rank"]] = _Incoming(sock)

    def _is_gone(self, member: int) -> bool:
        """Whether nobody listens there any more."""
        try:
            dial(self.addresses[member], 1.0).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False  # perhaps the way there is cut
        return False

    def close(self) -> None:
        """Returns when all that was sent has been taken, or nobody will take it."""
        for outgoing in self._out.values():
            outgoing.messages.close()
        while any(outgoing.is_open() for outgoing in self._out.values()):
            with contextlib.suppress(TimeoutError):
                self.door.accept(0.02)[0].close()  # it may be closing, too, and wait for us
        self.door.close()  # from now on who sends to us learns that we are gone
        for incoming in self._in.values():
            incoming.close()


class _Outgoing:
    """What goes to one member, and the thread that sends it."""

    def __init__(self, rank: int, address: str, secret: bytes) -> None:
        self.messages: Channel[bytes] = Channel()
        self._address, self._secret, self._hello = address, secret, {"rank": rank}
        self._thread = threading.Thread(target=self._run, name="flowchan-collective-send", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._connection() as sock:
                for message in self.messages:
                    sock.sendall(SIZE.pack(len(message)))
                    sock.sendall(message)
                sock.sendall(SIZE.pack(LEFT))
        except OSError as error:
            self.messages.abort(error)

    def _connection(self) -> socket.socket:
        """Made when the other one receives from us. Raises ``ConnectionRefusedError`` when it is gone."""
        while True:
            sock = dial(self._address, LONG)
            with contextlib.suppress(OSError):  # then it is gone, or the connection was cut
                return meet(sock, self._secret, dialled=True, hello=self._hello, timeout=LONG, tls=False)[0]

    def is_open(self) -> bool:
        """Whether something is left to be sent."""
        return self._thread.is_alive()


class _Incoming:
    """What comes from one member. A call that is interrupted or late goes on with the next."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._has = bytearray()

    def receive(self, source: int, give_up: float) -> bytes:
        (size,) = SIZE.unpack(self._read(SIZE.size, source, give_up))
        if size == LEFT:
            raise _gone(source, "receive", left=True)
        message = bytes(self._read(SIZE.size + size, source, give_up)[SIZE.size :])
        self._has.clear()
        return message

    def _read(self, count: int, source: int, give_up: float) -> bytearray:
        while len(self._has) < count:
            self._sock.settimeout(max(0.001, give_up - time.monotonic()))
            try:
                came = self._sock.recv(min(count - len(self._has), 1 << 20))
            except TimeoutError:
                raise
            except OSError as error:
                raise _gone(source, "receive") from error
            if not came:
                raise _gone(source, "receive")
            self._has += came
        return self._has

    def close(self) -> None:
        self._sock.close()


def _gone(member: int, call: str, left: bool = False) -> MemberDied:
    """``left``: it has said so itself."""
    kind, word = (MemberLeft, "has left") if left else (MemberDied, "died, has left, or is out of reach")
    return kind(f"{call} can't be done: rank {member}, on another host, {word}", (member,), call)
