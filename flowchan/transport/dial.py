"""Reaching whom we know by address and secret, also when it is not there yet, or is away for a moment."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from flowchan.transport.authentication import Hello, meet
from flowchan.transport.interrupts import unless_interrupted
from flowchan.transport.tcp import dial

SHORTEST, LONGEST = 0.002, 1.0
"""Seconds between two tries."""


def reach(
    address: str,
    secret: bytes,
    hello: Hello,
    *,
    why: str,
    within: float,
    tls: bool,
    wanted: Callable[[], bool] = lambda: True,
) -> tuple[socket.socket, Hello]:
    """A connection over which both have proved the secret, and the other side's hello. Tries again and again,
    while it is ``wanted``; raises an ``OSError`` that begins with ``why`` when there is none within so many
    seconds, and ends with why the last try failed that was not cut short by that, which is its cause."""
    give_up = time.monotonic() + within
    pause, wait = SHORTEST, threading.Event()
    failed: OSError | None = None
    while True:
        left = give_up - time.monotonic()
        if left <= 0 or not wanted():
            last = "" if failed is None else f": {failed.strerror or failed}"
            raise OSError(f"{why}{last} at {address} for {within:.3g} s") from failed
        try:
            sock = dial(address, left)
            pause = SHORTEST  # somebody is there
            left = max(0.0, give_up - time.monotonic())
            return meet(sock, secret, dialled=True, hello=hello, timeout=left, tls=tls)
        except unless_interrupted(OSError) as error:
            if failed is None or time.monotonic() < give_up:
                failed = error
            wait.wait(min(pause, max(0.0, give_up - time.monotonic())))
            pause = min(2 * pause, LONGEST)
