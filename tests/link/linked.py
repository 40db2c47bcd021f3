"""Connect two ends of a link in one process, with threads as remote workers.

The workers must get the same guarantees as over a link between machines.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any

import psutil

from benchmarks.slow_connections import delay_between
from flowchan import Broken, Channel, _core


class Linked:
    """Two ends of a link, and the connection between them, which a test can break at any time.

    Args:
        delay: transmission delay of each byte, in seconds
    """

    def __init__(self, delay: float = 0.0) -> None:
        self.owner_side, self.worker_side = _core.Link(True), _core.Link(False)
        self.breaks = 0
        self.delay = delay
        self.delays: list[threading.Thread] = []
        self.ends: list[socket.socket] = []  # the proxies' sockets, if the connection has a delay

    def connect(self) -> None:
        """Replace the connection between the ends. Frames in transit on the old connection are lost."""
        owner_end, worker_end = socket.socketpair()
        if self.delay:
            proxy_owner_end = worker_end
            proxy_worker_end, worker_end = socket.socketpair()
            self.delays += delay_between(proxy_owner_end, proxy_worker_end, self.delay)
            self.ends += [proxy_owner_end, proxy_worker_end]
        attaching = threading.Thread(target=self.owner_side.attach, args=(owner_end.detach(),))
        attaching.start()
        self.worker_side.attach(worker_end.detach())
        attaching.join()
        self.breaks += 1

    def __enter__(self) -> Linked:
        self.connect()
        return self

    def __exit__(self, *exc: object) -> None:
        self.owner_side.close()
        self.worker_side.close()
        for delay_thread in self.delays:
            delay_thread.join()
        for end in self.ends:
            end.close()


class RemoteWorker:
    """A remote worker: its ports on the owner side, and its rings on the worker side."""

    def __init__(
        self,
        linked: Linked,
        number: int,
        source: Channel[Any],
        *results: Channel[Any],
        ordered: bool = False,
        one_output: bool = False,
        replaces: RemoteWorker | None = None,
        lends: bool = False,
    ) -> None:
        self.linked, self.number, self.lends = linked, number, lends
        self.source, self.results, self.ordered, self.one_output = source, results, ordered, one_output
        self.reader, self.writers = source.reader(), [channel.writer() for channel in results]
        self.into: Channel[Any] = Channel(1024, across="processes", max_bytes=1 << 26)
        self.out = [Channel[Any](1024, across="processes", max_bytes=1 << 26) for _ in results]
        self.feed, self.drains = self.into.writer(), [channel.reader() for channel in self.out]
        self.inside, self.outside = self.into.reader(), [channel.writer() for channel in self.out]
        for writer, outer in zip(self.writers, self.outside, strict=True):
            writer._follow(self.reader, ordered, one_output)
            outer._follow(self.inside, False, one_output)
        for port in (self.reader, *self.writers, self.inside, *self.outside):
            port._supervise()
        if replaces is not None:
            _core._take_up([replaces.reader], replaces.writers, [self.reader])
        linked.owner_side.open_stream(number, [self.reader], self.writers)
        linked.worker_side.open_stream(number, [self.feed], self.drains, lends=lends)

    def die(self, number: int) -> RemoteWorker:
        """Act as if the worker's host had failed, and return a replacement that takes over its items.

        ``number`` is the replacement's stream number.
        """
        self.linked.owner_side.drop(self.number)
        self.linked.worker_side.drop(self.number)
        replacement = RemoteWorker(
            self.linked,
            number,
            self.source,
            *self.results,
            ordered=self.ordered,
            one_output=self.one_output,
            replaces=self,
            lends=self.lends,
        )
        for channel in (self.into, *self.out):
            channel.abort(None)
        return replacement

    def start(self, function: Callable[[Any], Iterable[tuple[int, Any]]]) -> threading.Thread:
        """Start a thread that calls ``function`` for each item and puts the outputs.

        The function returns pairs of a port's number and an output.
        """

        def work() -> None:
            with contextlib.suppress(Broken):  # the worker has died
                for item in self.inside:
                    for port, output in function(item):
                        self.outside[port].put(output)
            self.inside.close()
            for port in self.outside:
                port.close()

        thread = threading.Thread(target=work)
        thread.start()
        return thread


def feeding(source: Channel[Any], items: Iterable[Any]) -> threading.Thread:
    """Start a thread that puts the items and then closes its writer."""
    writer = source.writer()

    def feed() -> None:
        with writer:
            for item in items:
                writer.put(item)

    thread = threading.Thread(target=feed)
    thread.start()
    return thread


def kill_tls_proxies() -> int:
    """Kill this process's TLS proxies, to break its encrypted connections. Return their number."""
    killed = 0
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # the proxy has just ended
            if any(word.endswith("tls_proxy.py") for word in child.cmdline()):
                child.kill()
                killed += 1
    return killed
