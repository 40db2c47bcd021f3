"""Connect to a known address with a known secret, and retry while no peer listens there."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable

from flowchan.transport.authentication import Hello, meet
from flowchan.transport.interrupts import unless_interrupted
from flowchan.transport.tcp import dial

SHORTEST, LONGEST = 0.002, 1.0
"""Shortest and longest pause between attempts, in seconds."""

_jitter = random.SystemRandom()  # separate from the random numbers of user code


class Backoff:
    """Pauses that double with each attempt, up to ``LONGEST`` seconds.

    Each pause is randomly shortened by up to one half, so that the peers of a listener do not all dial at the
    same moment.
    """

    def __init__(self) -> None:
        self._next = SHORTEST

    def reset(self) -> None:
        """Restart with the shortest pause."""
        self._next = SHORTEST

    def wait_after_break(self, in_vain: int) -> None:
        """Wait before redialling after a broken connection.

        Args:
            in_vain: Number of consecutive connections over which nothing arrived. The method does not
                wait after the first one.
        """
        if in_vain > 1:
            threading.Event().wait(self.pause())
        else:
            self.reset()

    def pause(self) -> float:
        """Return how many seconds to wait before the next attempt."""
        pause, self._next = self._next, min(2 * self._next, LONGEST)
        return pause * _jitter.uniform(0.5, 1.0)


def reach(
    address: str,
    secret: bytes,
    hello: Hello,
    *,
    why: str,
    within: float,
    tls: bool,
    wanted: Callable[[], bool] = lambda: True,
) -> tuple[socket.socket, Hello, str]:
    """Connect to ``address``, authenticate both ends, and retry until that succeeds.

    Args:
        address: Address at which the peer listens.
        secret: Secret of both ends.
        hello: This side's hello.
        why: Beginning of the error message.
        within: Seconds after which to give up.
        tls: Encrypt the connection.
        wanted: Function that returns False if the caller does not need the connection any more.

    Returns:
        The connection, the peer's hello, and the IP address of this host in the connection.

    Raises:
        OSError: No attempt succeeded in time. The cause of this error is the error of the last complete
            attempt.
    """
    give_up = time.monotonic() + within
    backoff, wait, absent = Backoff(), threading.Event(), False
    failed: OSError | None = None
    while True:
        remaining = give_up - time.monotonic()
        if remaining <= 0 or not wanted():
            reason = str("" if failed is None else failed.strerror or failed)
            last = reason and ": " + reason.removeprefix(f"can't reach {address}: ")
            raise OSError(f"{why}{last} at {address} for {within:.3g} s") from failed
        try:
            absent, was_absent = True, absent
            sock = dial(address, remaining)
            absent = False
            if was_absent:
                backoff.reset()  # the peer has just appeared, so the next attempt may come soon
            ours = sock.getsockname()[0]
            remaining = max(0.0, give_up - time.monotonic())
            return *meet(sock, secret, dialled=True, hello=hello, timeout=remaining, tls=tls), ours
        except unless_interrupted(OSError) as error:
            if failed is None or time.monotonic() < give_up:
                failed = error
            wait.wait(min(backoff.pause(), max(0.0, give_up - time.monotonic())))
