"""Agents on this machine whose connections go over a slow wire."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from flowchan.hosts.local import Local
from flowchan.hosts.pool import Pool, pool_of
from flowchan.hosts.provider import Launch, Started

CHUNK = 64 << 10


class Wire:
    """Passes on what comes, each byte ``delay`` seconds late, and at most ``rate`` bytes a second each way.
    Agents dial ``address``."""

    def __init__(self, delay: float = 0.0, rate: float = float("inf")) -> None:
        self.delay, self.rate = delay, rate
        self.passed = 0  # bytes
        self.target = ""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "127.0.0.1:{1}".format(*self._listener.getsockname())
        self._over = threading.Event()
        self._socks: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __reduce__(self) -> Any:
        """A provider is a value, which goes along with its stages."""
        return type(None), ()

    def close(self) -> None:
        self._over.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for sock in self._socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in (self._listener, *self._socks):
            sock.close()

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                one, _ = self._listener.accept()
                host, _, port = self.target.rpartition(":")
                other = socket.create_connection((host, int(port)))
            except OSError:
                continue
            self._socks += [one, other]
            for source, target in ((one, other), (other, one)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._pump(source, target)

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        """As two threads: one takes in, with the time at which each piece is to go out, and one puts out."""
        pieces: deque[tuple[float, bytes]] = deque()
        there, room = threading.Semaphore(0), threading.Semaphore(4 if self.rate < float("inf") else 10_000)

        def take() -> None:
            data = b"."
            while data:
                room.acquire()
                with contextlib.suppress(OSError):
                    data = source.recv(CHUNK)
                pieces.append((time.monotonic() + self.delay, data))
                there.release()

        def give() -> None:
            while True:
                there.acquire()
                due, data = pieces.popleft()
                room.release()
                self._over.wait(max(0.0, due - time.monotonic(), len(data) / self.rate))
                with contextlib.suppress(OSError):
                    target.sendall(data) if data else target.shutdown(socket.SHUT_WR)
                self.passed += len(data)
                if not data:
                    return

        for work in (take, give):
            self._threads.append(threading.Thread(target=work))
            self._threads[-1].start()


@dataclass(frozen=True)
class Wired(Local):
    """As ``local``, over a wire."""

    wire: Wire

    def start(self, number: int, launch: Launch) -> Started:
        said = json.loads(launch.stdin)
        self.wire.target, said["address"] = said["address"], self.wire.address
        return super().start(number, replace(launch, stdin=json.dumps(said).encode() + b"\n"))


@contextlib.contextmanager
def wired(count: int, wire: Wire, patience: float = 10.0) -> Iterator[Pool]:
    """A pool of so many agents behind this wire."""
    try:
        yield pool_of("local", Wired(count, wire), patience)
    finally:
        wire.close()
