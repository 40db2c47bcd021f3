"""Listen for connections, and accept only peers that know the secret.

SECURITY.md describes how far peers without the secret can delay accepted peers. One thread runs all
handshakes, in :meth:`AuthenticatedListener.accept`. If there are too many handshakes, it selects the address
with the most. Then it considers the peers from this address that have sent the fewest messages, and rejects
one of them at random. The listener never rejects a peer that has proved that it knows the secret.
"""

from __future__ import annotations

import contextlib
import random
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable

from flowchan.errors import Refused
from flowchan.transport.authentication import Hello, PendingHandshake, handshake
from flowchan.transport.descriptors import lacks
from flowchan.transport.tcp import Listener
from flowchan.transport.tls import certificate

AT_ONCE = 128
HANDSHAKE_TIMEOUT_S = 10.0  # seconds allowed for a handshake
_chooser = random.SystemRandom()  # a generator whose choices peers can't predict
PAUSE = 0.1  # how long to accept no connections when this process runs out of descriptors, in seconds


class AuthenticatedListener:
    """Accepts connections whose peers prove that they know the secret.

    ``refused`` counts the rejected peers, and ``last_refused`` is the reason for the last rejection.
    """

    def __init__(
        self,
        listener: Listener,
        secret: bytes,
        hello: Hello,
        *,
        tls: bool = False,
        handshake_timeout: float = HANDSHAKE_TIMEOUT_S,
    ) -> None:
        if tls:
            certificate()  # raises immediately if the package for TLS is missing
        self.address = listener.address
        self.refused = 0
        self.last_refused = ""
        self._listener = listener
        self._secret = secret
        self._hello = hello
        self._tls = tls
        self._handshake_timeout = handshake_timeout
        self._pending: list[PendingHandshake] = []  # oldest first
        self._closed_until = 0.0
        self._ready = selectors.DefaultSelector()
        self._ready.register(listener, selectors.EVENT_READ)

    def accept(
        self, timeout: float | None = None, take: Callable[[socket.socket, Hello], object] | None = None
    ) -> tuple[socket.socket, Hello]:
        """Accept the next connection whose peer proves that it knows the secret.

        No peer can make this call raise. Unfinished handshakes continue in the next call.

        Args:
            timeout: Seconds to wait. Default: no limit.
            take: Function to call with the connection and the hello before this call returns. If Ctrl-C
                interrupts the call first, the next call returns the same connection, and may call ``take``
                with it a second time.

        Returns:
            The connection, and the peer's hello.

        Raises:
            TimeoutError: No peer proved the secret within ``timeout`` seconds.
        """
        give_up = None if timeout is None else time.monotonic() + timeout
        while True:
            for pending in [pending for pending in self._pending if pending.has_proved()]:
                if (met := self._return_accepted(pending, take)) is not None:
                    return met
            now = time.monotonic()
            for key, _ in self._ready.select(self._next_event(now, give_up)):
                if key.fileobj is self._listener:
                    self._accept_connection()
                elif self._continue(key.data) and (met := self._return_accepted(key.data, take)) is not None:
                    return met
            now = time.monotonic()
            self._drop_late_peers(now)
            if give_up is not None and now >= give_up:
                raise TimeoutError(
                    f"no peer with the right secret connected to {self.address} within {timeout:g} s"
                )

    def _next_event(self, now: float, give_up: float | None) -> float | None:
        """Return the seconds until the next timer expires, or None if no timer is set."""
        times = [give_up] if give_up is not None else []
        times += [pending.give_up for pending in self._pending[:1]]
        if self._closed_until:
            times.append(self._closed_until)
            if now >= self._closed_until:
                self._closed_until = 0.0
                self._ready.register(self._listener, selectors.EVENT_READ)
        return max(0.0, min(times) - now) if times else None

    def _accept_connection(self) -> None:
        """Accept a connection and begin its handshake."""
        try:
            sock = self._listener.accept_now()
        except OSError as error:
            if not lacks(error):
                raise
            self._ready.unregister(self._listener)
            self._closed_until = time.monotonic() + PAUSE
            return
        if sock is None:
            return
        steps = handshake(self._secret, self._hello, dialled=False, tls=self._tls)
        try:
            pending = PendingHandshake(sock, steps, self._handshake_timeout)
        except Refused as refused:
            sock.close()
            self._log_refusal(str(refused))
            return
        except BaseException:
            sock.close()
            raise
        self._ready.register(pending.sock, selectors.EVENT_READ, pending)
        self._pending.append(pending)
        if len(self._pending) > AT_ONCE:
            self._drop_one_peer()

    def _drop_one_peer(self) -> None:
        """Reject one peer because too many handshakes are in progress; see the module docstring."""
        unproved = [pending for pending in self._pending if not pending.knows_secret()]
        if not unproved:
            return
        by_address = Counter(pending.host for pending in unproved)
        most = max(by_address.values())
        crowd = [pending for pending in unproved if by_address[pending.host] == most]
        fewest = min(pending.messages for pending in crowd)
        dropped = _chooser.choice([pending for pending in crowd if pending.messages == fewest])
        self._drop_peer(dropped, f"there were more than {AT_ONCE} handshakes at the same time")

    def _continue(self, pending: PendingHandshake) -> bool:
        """Continue a handshake, and return whether the peer has proved that it knows the secret."""
        sock = pending.sock
        # The peer was rejected in the meantime, or Ctrl-C ended an earlier call before the call unregistered
        # the peer.
        if pending not in self._pending:
            self._unregister_peer(pending, sock)
            pending.close()
            return False
        try:
            # Unregister the socket first. When TLS begins, the socket moves to another process and stays open
            # there.
            self._unregister(sock)
            pending.receive_step()
            self._ready.register(pending.sock, selectors.EVENT_READ, pending)
        except BaseException as error:
            if pending.has_proved() and not isinstance(error, Exception):
                raise  # the peer knows that it has been accepted, so keep its connection
            self._unregister_peer(pending, pending.sock)
            pending.close()
            if isinstance(error, OSError) and lacks(error):  # TLS needs descriptors that this process lacks
                self._log_refusal(f"{pending.peer} was refused: {error.strerror}")
            elif isinstance(error, Refused):
                self._log_refusal(str(error))
            else:
                raise
            return False
        return pending.has_proved()

    def _return_accepted(
        self, pending: PendingHandshake, take: Callable[[socket.socket, Hello], object] | None
    ) -> tuple[socket.socket, Hello] | None:
        """Return the connection and hello of a peer that knows the secret."""
        if pending.hello is None and not self._continue(pending):
            return None
        met = pending.finish()
        if take is not None:
            take(*met)
        self._unregister_peer(pending, pending.sock)
        return met

    def _unregister_peer(self, pending: PendingHandshake, sock: socket.socket) -> None:
        self._unregister(sock)
        with contextlib.suppress(ValueError):
            self._pending.remove(pending)

    def _unregister(self, sock: socket.socket) -> None:
        # The socket may already be unregistered, for example by a call that Ctrl-C ended.
        with contextlib.suppress(KeyError, ValueError):
            self._ready.unregister(sock)

    def _drop_late_peers(self, now: float) -> None:
        while self._pending and self._pending[0].give_up <= now:
            self._drop_peer(self._pending[0], self._pending[0].late_reason())

    def _drop_peer(self, pending: PendingHandshake, reason: str) -> None:
        self._unregister_peer(pending, pending.sock)
        pending.close()
        self._log_refusal(f"{pending.peer} was refused: {reason}")

    def _log_refusal(self, reason: str) -> None:
        self.refused += 1
        self.last_refused = reason

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when ``accept`` has work to do.

        If Ctrl-C ended the last ``accept``, call it again first: the descriptor does not show a peer that has
        already proved the secret.
        """
        return self._ready.fileno()

    def close(self) -> None:
        """Reject all peers that have not proved the secret yet, and stop listening."""
        for pending in list(self._pending):
            self._drop_peer(pending, "the listener was closed")
        self._ready.close()
        self._listener.close()

    def drop(self) -> None:
        """Release the descriptors in a forked child without affecting the parent."""
        self._ready.close()
        self._listener.close()

    def __enter__(self) -> AuthenticatedListener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
