"""Run agents on this machine whose connections are slow, silent for a while, or reset."""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import json
import socket
import struct
import termios
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from flowchan.hosts.host_pool import Pool, pool_of
from flowchan.hosts.providers.local import Local
from flowchan.hosts.providers.provider import Launch, StartedAgent

CHUNK = 64 << 10
LONG = 3600.0
NOWHERE = bytes(16)
"""Address with which ``connect`` dissolves a connection."""


class Wire:
    """Proxy that delays each byte by ``delay`` seconds and passes at most ``rate`` bytes/s in each direction.

    If ``limit`` is set, the wire resets each connection once the peer has received ``limit`` bytes in one
    direction.

    A peer that dials the address that ``to`` returns reaches ``target`` over this connection.
    """

    def __init__(self, delay: float = 0.0, rate: float = float("inf"), limit: int | None = None) -> None:
        self.delay, self.rate, self.limit = delay, rate, limit
        self.connections = 0
        self.passed = 0  # bytes
        self._listeners: list[socket.socket] = []
        self._over = threading.Event()
        self._socks: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._silent_until = 0.0

    def __reduce__(self) -> Any:
        """Pickle the wire as None: it cannot be pickled itself, and its provider is sent with the stages."""
        return type(None), ()

    def to(self, target: str) -> str:
        self._listeners.append(socket.create_server(("127.0.0.1", 0)))
        listener = self._listeners[-1]
        self._threads.append(threading.Thread(target=self._accept, args=(listener, target)))
        self._threads[-1].start()
        return "127.0.0.1:{1}".format(*listener.getsockname())

    def be_silent(self, seconds: float) -> None:
        """Hold all bytes for a few seconds, and then pass them on. Neither end is notified."""
        self._silent_until = time.monotonic() + seconds

    def reset(self) -> None:
        """Reset all connections, as a restarted host does.

        ``close`` with a linger of 0 would do the same, but has no effect while another thread polls the
        socket.
        """
        self._reset(*self._socks)

    def close(self) -> None:
        self._over.set()
        for sock in (*self._listeners, *self._socks):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in (*self._listeners, *self._socks):
            sock.close()

    def _accept(self, listener: socket.socket, target: str) -> None:
        host, _, port = target.rpartition(":")
        while not self._over.is_set():
            try:
                one, _ = listener.accept()
                other = socket.create_connection((host, int(port)))
            except OSError:
                continue
            self.connections += 1
            for sock in (one, other):
                sock.settimeout(LONG)  # let the threads poll, so that a reset is possible during a send
            self._socks += [one, other]
            for source, target in ((one, other), (other, one)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._pump(source, target)

    def _reset(self, *socks: socket.socket) -> None:
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            ctypes.CDLL(None).connect(sock.fileno(), NOWHERE, len(NOWHERE))

    def _wait_until_received(self, target: socket.socket) -> None:
        """Wait until the peer's kernel has all bytes that were sent, because a reset discards the others."""
        unacknowledged = array.array("i", [1])
        with contextlib.suppress(OSError):  # the connection has already ended
            while unacknowledged[0] and not self._over.wait(0.001):
                fcntl.ioctl(target, termios.TIOCOUTQ, unacknowledged)

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        """Copy bytes in two threads.

        One thread receives the bytes and notes when each piece is due; the other thread sends them.
        """
        pieces: deque[tuple[float, bytes]] = deque()
        arrived, free_slots = (
            threading.Semaphore(0),
            threading.Semaphore(4 if self.rate < float("inf") else 10_000),
        )

        def take() -> None:
            data = b"."
            while data:
                free_slots.acquire()
                data = b""
                with contextlib.suppress(OSError):
                    data = source.recv(CHUNK)
                pieces.append((time.monotonic() + self.delay, data))
                arrived.release()

        def give() -> None:
            left = self.limit
            while True:
                arrived.acquire()
                due, data = pieces.popleft()
                free_slots.release()
                self._over.wait(max(0.0, due - time.monotonic(), len(data) / self.rate))
                while (remaining := self._silent_until - time.monotonic()) > 0 and not self._over.wait(
                    remaining
                ):
                    pass
                if left is not None:
                    data, left = data[:left], left - len(data)
                with contextlib.suppress(OSError):
                    target.sendall(data) if data else target.shutdown(socket.SHUT_WR)
                if left is not None and left <= 0:
                    self._wait_until_received(target)
                    self._reset(source, target)
                    return
                self.passed += len(data)
                if not data:
                    return

        for work in (take, give):
            thread = threading.Thread(target=work)
            self._threads.append(thread)
            thread.start()


@dataclass(frozen=True)
class Wired(Local):
    """Provider like ``local``, with a wire for each host.

    If there are more hosts than wires, several hosts share a wire.
    """

    wires: tuple[Wire, ...]

    def start(self, number: int, launch: Launch) -> StartedAgent:
        wire, orders = self.wires[number % len(self.wires)], json.loads(launch.stdin)
        orders["address"] = wire.to(orders["address"])
        if back := orders.get("back"):
            orders["back"] = int(wire.to(f"127.0.0.1:{back}").rpartition(":")[2])
        return super().start(number, replace(launch, stdin=json.dumps(orders).encode() + b"\n"))


@contextlib.contextmanager
def wired(count: int, *wires: Wire, peer_timeout: float = 10.0) -> Iterator[Pool]:
    """Yield a pool of ``count`` agents behind these wires."""
    try:
        yield pool_of("local", Wired(count, wires), peer_timeout)
    finally:
        for wire in wires:
            wire.close()
