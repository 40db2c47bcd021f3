"""Two ends of a connection over loopback, for handshake tests."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from support.peers import ThreadPeer

from flowchan.transport import authentication, tcp

SECRET = b"a secret of thirty-two bytes, ok"
OTHER = b"another one of thirty-two bytes."


@contextlib.contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield the dialling and the listening end of a connection."""
    with tcp.listen("127.0.0.1:0") as listener:
        dialled = tcp.dial(listener.address, 30)
        with dialled, listener.accept(30) as listens:
            yield dialled, listens


def met(
    sock: socket.socket, secret: bytes = SECRET, *, dialled: bool = True, timeout: float = 30, **more: Any
) -> tuple[socket.socket, Any]:
    """Call ``meet`` for one end. The hello states the end's role."""
    results = {"dialled": dialled}
    return authentication.meet(sock, secret, dialled=dialled, hello=results, timeout=timeout, **more)


def meet_in_thread(
    sock: socket.socket, secret: bytes = SECRET, *, dialled: bool = False, **more: Any
) -> ThreadPeer:
    """Run the other end in a thread."""
    return ThreadPeer(lambda: met(sock, secret, dialled=dialled, **more))


@contextlib.contextmanager
def ctrl_c() -> Iterator[None]:
    """Raise an exception from a signal handler soon, and require that the exception ends the block."""

    class Stop(Exception):
        pass

    def handler(*_: object) -> None:
        raise Stop

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(Stop):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
