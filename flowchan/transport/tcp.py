"""Connect hosts over TCP: listen, dial, and find this host's address towards a peer.

An address is text of the form ``host:port``, with an IPv6 host in brackets: ``[::1]:4711``. This machine's
name is never used, because many systems resolve it to 127.0.1.1. The address that is given to a peer is the
source address on the kernel's route to that peer.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from flowchan.transport.interrupts import unless_interrupted
from flowchan.transport.name_lookup import Resolved, resolve

UNSENT = 256 * 1024
"""Maximum number of unsent bytes in a connection.

More bytes would not fit into the CPU cache, and would delay small frames.
"""
UNREAD = 128 * 1024
"""Bytes that the kernel buffers on a loopback connection.

The number is small, so that the kernel reuses memory that the reader has just freed. With this size, each end
of a bare socket needs 100 µs of CPU time for 1 MB. With 256 KB, the sender needs 190 µs and the receiver
120 µs. With 32 KB, which is less than one segment, each segment would wait for a timer.
"""
UNHEARD = 15_000  # milliseconds after which unacknowledged bytes end a connection
# macOS has another name for TCP_KEEPIDLE, and lacks TCP_USER_TIMEOUT.
_TIMEOUTS = {
    "TCP_USER_TIMEOUT": UNHEARD,
    "TCP_KEEPIDLE": 5,
    "TCP_KEEPALIVE": 5,
    "TCP_KEEPINTVL": 3,
    "TCP_KEEPCNT": 3,
}
TIMEOUTS = {getattr(socket, name): limit for name, limit in _TIMEOUTS.items() if hasattr(socket, name)}
BACKLOG = 256
HEAD_START_S = 0.25
"""Seconds to wait for one IP address of a host before the next one is also tried."""
ENDED_EARLY = {errno.ECONNABORTED, errno.EPROTO, errno.EPERM}
"""Errors of accept() for a connection that ended before it was accepted. The next call of ``accept`` may
succeed."""


def split(address: str) -> tuple[str, int]:
    """Split an address into host and port. Raise ``ValueError`` if it is invalid."""
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(
            f"{address!r} is not an address: write an IPv6 host in brackets, for example '[::1]:4711'"
        )
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 65536):
        raise ValueError(
            f"{address!r} is not an address: it must be a host, a colon and a port up to 65535 "
            "(0: any free one), for example '127.0.0.1:4711'"
        )
    return host, int(port)


def joined(name: tuple[str | int, ...] | str | bytes) -> str:
    """Return a socket name as an address. The name of a Unix socket is a path or bytes."""
    if not isinstance(name, tuple):
        return os.fsdecode(name).lstrip("\0") or "a local peer"
    host = str(name[0])
    return f"[{host}]:{name[1]}" if ":" in host else f"{host}:{name[1]}"


def accept_waiting(listener: socket.socket) -> tuple[socket.socket, Any] | None:
    """Accept a waiting connection. Return it and the peer's address, or None if there is none."""
    try:
        return listener.accept()
    except BlockingIOError:
        return None
    except OSError as error:
        if error.errno in ENDED_EARLY:
            return None
        raise


class Listener:
    """Socket that listens on one address."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.address = joined(sock.getsockname())

    def accept(self, timeout: float | None = None) -> socket.socket:
        """Return the next connection, whose peer is not authenticated yet.

        The caller authenticates the peer with :func:`flowchan.transport.authentication.meet`. Raise
        ``TimeoutError``, or ``OSError`` if this process lacks descriptors.
        """
        give_up = None if timeout is None else time.monotonic() + timeout
        while True:
            if not self.wait(None if give_up is None else max(0.0, give_up - time.monotonic())):
                raise TimeoutError(f"no peer connected to {self.address} within {timeout:g} s")
            if (sock := self.accept_now()) is not None:
                return sock

    def wait(self, timeout: float | None) -> bool:
        """Wait up to ``timeout`` seconds for a connection, and return whether there is one."""
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        return bool(waiting.poll(None if timeout is None else timeout * 1000))

    def accept_now(self) -> socket.socket | None:
        """Return a connection that is ready to be accepted, or None."""
        accepted = accept_waiting(self._socket)
        if accepted is None:
            return None
        sock, peer = accepted
        with contextlib.suppress(OSError):  # if the connection has already ended, its reader will notice
            prepare(sock, peer[0])
        sock.setblocking(True)
        return sock

    def detach(self) -> int:
        """Return the listening descriptor, from which the caller accepts connections from now on.

        These connections inherit the socket options that a link needs.
        """
        prepare(self._socket, self._socket.getsockname()[0])
        return self._socket.detach()

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def listen(address: str, timeout: float | None = None) -> Listener:
    """Listen on ``address`` only. Raises ``ValueError`` or ``OSError``.

    If the address contains a name, it must be resolved within ``timeout`` seconds (default: no limit).
    """
    host, port = split(address)
    family, _, _, _, name = resolve(host, port, address, timeout)[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:  # makes [::] accept only IPv6
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(name)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"can't listen on {address}: {os.strerror(error.errno or 0)}") from None
    return Listener(sock)


def dial(address: str, timeout: float) -> socket.socket:
    """Connect to ``address`` in one attempt.

    If the host has several IP addresses and one does not answer, the next one is also tried after
    ``HEAD_START_S`` (RFC 8305).

    Raises ``ValueError``, ``TimeoutError``, or another ``OSError`` whose message contains the address.
    """
    host, port = split(address)
    give_up = time.monotonic() + timeout
    resolved = resolve(host, port, address, timeout)
    try:
        return _first_connection(resolved, give_up)
    except unless_interrupted(OSError) as error:
        if isinstance(error, TimeoutError):
            raise TimeoutError(f"{address} did not answer within {timeout:g} s") from None
        raise OSError(error.errno, f"can't reach {address}: {error.strerror}") from None


def _first_connection(resolved: Sequence[Resolved], give_up: float) -> socket.socket:
    """Return a connection to the first address that accepts it. If no address does, raise the last error."""
    failure: OSError | None = None
    untried, waiting = deque(resolved), select.poll()
    attempts: dict[int, socket.socket] = {}
    try:
        while untried or attempts:
            if untried:
                family, _, _, _, name = untried.popleft()
                try:
                    sock = socket.socket(family, socket.SOCK_STREAM)
                except unless_interrupted(OSError) as error:  # for example, this machine has no IPv6
                    failure = failure or error
                    continue
                attempts[sock.fileno()] = sock
                waiting.register(sock, select.POLLOUT)
                try:
                    _begin(sock, name)
                except unless_interrupted(OSError) as error:
                    failure = error
                    waiting.unregister(sock)
                    attempts.pop(sock.fileno()).close()
                    continue
            remaining = max(0.0, give_up - time.monotonic())
            for fd, _ in waiting.poll((min(HEAD_START_S, remaining) if untried else remaining) * 1000):
                try:
                    _check(attempts[fd])
                    return attempts.pop(fd)
                except unless_interrupted(OSError) as error:
                    failure = error
                    waiting.unregister(fd)
                    attempts.pop(fd).close()
            if attempts and time.monotonic() >= give_up:
                raise TimeoutError
    finally:
        for sock in attempts.values():
            sock.close()
    raise failure or OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))


def _begin(sock: socket.socket, name: tuple[str, int]) -> None:
    """Begin to connect."""
    prepare(sock, name[0])
    sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        sock.connect(name)


def _check(sock: socket.socket) -> None:
    """Raise an error if the connection could not be made."""
    failed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    # If nothing listens on a local port, the kernel may connect the socket to itself.
    if not failed and sock.getsockname() == sock.getpeername():
        failed = errno.ECONNREFUSED
    if failed:
        raise OSError(failed, os.strerror(failed))
    sock.setblocking(True)


def prepare(sock: socket.socket, peer: str) -> None:
    """Set the socket options that a link needs on its connection to ``peer``, an IP address.

    The options make the kernel send small frames immediately, and notice a connection that breaks silently.
    Over loopback, sent bytes arrive at once, so a small buffer is enough. Over a network, the buffer must
    hold the bytes in flight. The kernel adapts its size to bandwidth and delay, but only if no size is set.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if peer == "::1" or peer.startswith("127."):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD)
    else:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in TIMEOUTS.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def route_to(peer: str, timeout: float | None = None) -> str:
    """Return this host's source address for packets to ``peer``, without a port.

    ``peer`` is the name or address of a host, which can reach this host at the returned address. The kernel's
    routes determine the address. Only the lookup of a name sends packets; it may take ``timeout`` seconds
    (default: no limit). Raises ``OSError``.
    """
    family, _, _, _, name = resolve(peer, 9, peer, timeout)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(name)
        except OSError as error:
            raise OSError(error.errno, f"this host has no route to {peer}: {error.strerror}") from None
        return str(sock.getsockname()[0])
