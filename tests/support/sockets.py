"""Helpers for tests of connections."""

from __future__ import annotations

import contextlib
import socket


def receive(sock: socket.socket, size: int) -> bytes:
    """Receive exactly ``size`` bytes, or fewer if the connection ends."""
    came = b""
    with contextlib.suppress(ConnectionError):
        while len(came) < size and (more := sock.recv(size - len(came))):
            came += more
    return came
