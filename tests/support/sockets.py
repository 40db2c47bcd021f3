"""What tests of connections share."""

from __future__ import annotations

import contextlib
import socket


def receive(sock: socket.socket, size: int) -> bytes:
    """Exactly so many bytes, or what came before the end."""
    came = b""
    with contextlib.suppress(ConnectionError):
        while len(came) < size and (more := sock.recv(size - len(came))):
            came += more
    return came
