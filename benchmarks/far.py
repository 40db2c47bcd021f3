"""A wire that is long: what goes in comes out later, however much it is."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time


def delay_between(one: socket.socket, other: socket.socket, delay: float) -> list[threading.Thread]:
    """Passes on what comes from either socket to the other, ``delay`` seconds later, until both have ended.
    Gives the threads that do so; they end by themselves."""
    ways = [(one, other), (other, one)]
    threads = [threading.Thread(target=_pass_on, args=(*way, delay)) for way in ways]
    for thread in threads:
        thread.start()
    return threads


def _pass_on(source: socket.socket, target: socket.socket, delay: float) -> None:
    coming: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def receive() -> None:
        """At once, so that nothing else holds up who sends."""
        data = b"-"
        while data:
            try:
                data = source.recv(1 << 20)
            except ConnectionError:
                data = b""
            coming.put((time.perf_counter() + delay, data))

    receiving = threading.Thread(target=receive)
    receiving.start()
    data = b"-"
    while data:
        due, data = coming.get()
        time.sleep(max(0.0, due - time.perf_counter()))
        with contextlib.suppress(OSError):  # the other end has gone
            target.sendall(data) if data else target.shutdown(socket.SHUT_WR)
    receiving.join()
