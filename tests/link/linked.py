"""Two ends of a link in one process, and workers that sit on the far one as threads: what they must keep of
the channel's promises is the same as with a machine in between."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any

import psutil

from benchmarks.far import delay_between
from flowchan import Broken, Channel, _core


class Linked:
    """Two linked ends, and the connection between them, which can be broken at any time. ``delay``: seconds
    that everything takes on its way."""

    def __init__(self, delay: float = 0.0) -> None:
        self.home, self.away = _core.Link(True), _core.Link(False)
        self.breaks = 0
        self.delay = delay
        self.wires: list[threading.Thread] = []
        self.ends: list[socket.socket] = []  # of the wires

    def connect(self) -> None:
        """Connects them anew. What is under way over the old connection is lost with it."""
        here, there = socket.socketpair()
        if self.delay:
            (here, near), (far, there) = (here, there), socket.socketpair()
            self.wires += delay_between(near, far, self.delay)
            self.ends += [near, far]
        attaching = threading.Thread(target=self.home.attach, args=(here.detach(),))
        attaching.start()
        self.away.attach(there.detach())
        attaching.join()
        self.breaks += 1

    def __enter__(self) -> Linked:
        self.connect()
        return self

    def __exit__(self, *exc: object) -> None:
        self.home.close()
        self.away.close()
        for wire in self.wires:
            wire.join()
        for end in self.ends:
            end.close()


class FarWorker:
    """One worker on the far end: its ports at home, and the rings there that it reads and writes."""

    def __init__(
        self,
        linked: Linked,
        number: int,
        source: Channel[Any],
        *results: Channel[Any],
        ordered: bool = False,
        one_output: bool = False,
        heir_of: FarWorker | None = None,
    ) -> None:
        self.linked, self.number = linked, number
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
        if heir_of is not None:
            _core._take_up([heir_of.reader], heir_of.writers, [self.reader])
        linked.home.line(number, [self.reader], self.writers)
        linked.away.line(number, [self.feed], self.drains)

    def die(self, number: int) -> FarWorker:
        """Its host is gone: home gives it up, and what it had goes to a successor, whose line has this
        number."""
        self.linked.home.drop(self.number)
        self.linked.away.drop(self.number)
        successor = FarWorker(
            self.linked,
            number,
            self.source,
            *self.results,
            ordered=self.ordered,
            one_output=self.one_output,
            heir_of=self,
        )
        for channel in (self.into, *self.out):
            channel.abort(None)
        return successor

    def start(self, function: Callable[[Any], Iterable[tuple[int, Any]]]) -> threading.Thread:
        """Puts what ``function`` gives for each item: (which output, what)."""

        def work() -> None:
            with contextlib.suppress(Broken):  # it died
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
    """A thread that puts the items, then closes the channel."""
    writer = source.writer()

    def feed() -> None:
        with writer:
            for item in items:
                writer.put(item)

    thread = threading.Thread(target=feed)
    thread.start()
    return thread


def kill_relays() -> int:
    """Kill every TLS process of this process, and so break its encrypted connections. How many there were."""
    killed = 0
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if any(word.endswith("tls_proxy.py") for word in child.cmdline()):
                child.kill()
                killed += 1
    return killed
