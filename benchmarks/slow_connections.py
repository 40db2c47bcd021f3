"""Create slow connections, and break connections."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time

LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}


def delay_between(one: socket.socket, other: socket.socket, delay: float) -> list[threading.Thread]:
    """Forward the bytes between two sockets, delayed by ``delay`` seconds, until both sockets are closed.

    Return the threads that forward the bytes; they end with the sockets.
    """
    ways = [(one, other), (other, one)]
    threads = [threading.Thread(target=_pass_on, args=(*way, delay)) for way in ways]
    for thread in threads:
        thread.start()
    return threads


def _pass_on(source: socket.socket, target: socket.socket, delay: float) -> None:
    coming: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def receive() -> None:
        """Receive data as soon as it arrives, so that the sender is never blocked."""
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
        with contextlib.suppress(OSError):  # the other end may be closed
            target.sendall(data) if data else target.shutdown(socket.SHUT_WR)
    receiving.join()


def cut() -> int:
    """Shut down every loopback connection of this process, and return their number."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor may have been closed in the meantime
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(number))) as sock:
                if sock.family in LOOPBACK and sock.getpeername()[0] == LOOPBACK[sock.family]:
                    sock.shutdown(socket.SHUT_RDWR)
                    found += 1
    return found
