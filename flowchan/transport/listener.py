"""Who listens lets in whoever proves the secret, and is not held up by anybody else.

One thread serves all who are still proving it, in :meth:`AuthenticatedListener.accept`. When too many are,
the one that has
taken longest is sent away: those who know the secret need a few round trips only.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable

from flowchan.errors import Refused
from flowchan.transport.authentication import Hello, PendingHandshake, handshake
from flowchan.transport.descriptors import lacks
from flowchan.transport.tcp import Listener
from flowchan.transport.tls import certificate

AT_ONCE = 64
HANDSHAKE_TIMEOUT_S = 10.0  # seconds that a handshake may take
PAUSE = 0.1  # seconds without accepting when this process lacks descriptors


class AuthenticatedListener:
    """A listener and the secret that lets in. ``refused`` counts who was sent away, and ``last_refused`` says
    of the last one why."""

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
            certificate()  # raises here what can't be done without
        self.address = listener.address
        self.refused = 0
        self.last_refused = ""
        self._listener = listener
        self._secret = secret
        self._hello = hello
        self._tls = tls
        self._handshake_timeout = handshake_timeout
        self._guests: list[PendingHandshake] = []  # who has waited longest is first
        self._closed_until = 0.0
        self._ready = selectors.DefaultSelector()
        self._ready.register(listener, selectors.EVENT_READ)

    def accept(
        self, timeout: float | None = None, take: Callable[[socket.socket, Hello], object] | None = None
    ) -> tuple[socket.socket, Hello]:
        """The next connection whose peer has proved the secret, and its hello. Raises ``TimeoutError``; the
        handshakes that are going on then go on with the next call. Never raises because of a peer.

        ``take`` is given the connection before it counts as handed over: where Ctrl-C comes first, the next
        call gives it again, perhaps to who has it already."""
        give_up = None if timeout is None else time.monotonic() + timeout
        while True:
            for guest in [guest for guest in self._guests if guest.has_proved()]:
                if (met := self._hand_over(guest, take)) is not None:
                    return met
            now = time.monotonic()
            for key, _ in self._ready.select(self._next_event(now, give_up)):
                if key.fileobj is self._listener:
                    self._let_wait()
                elif self._go_on(key.data) and (met := self._hand_over(key.data, take)) is not None:
                    return met
            now = time.monotonic()
            self._send_away_the_late(now)
            if give_up is not None and now >= give_up:
                raise TimeoutError(f"nobody has proved the secret at {self.address} within {timeout:g} s")

    def _next_event(self, now: float, give_up: float | None) -> float | None:
        """How long there is nothing to do but for what comes."""
        times = [give_up] if give_up is not None else []
        times += [guest.give_up for guest in self._guests[:1]]
        if self._closed_until:
            times.append(self._closed_until)
            if now >= self._closed_until:
                self._closed_until = 0.0
                self._ready.register(self._listener, selectors.EVENT_READ)
        return max(0.0, min(times) - now) if times else None

    def _let_wait(self) -> None:
        """Takes one who has dialled among the guests."""
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
            guest = PendingHandshake(sock, steps, self._handshake_timeout)
        except Refused as refused:
            sock.close()
            self._note(str(refused))
            return
        except BaseException:
            sock.close()
            raise
        self._ready.register(guest.sock, selectors.EVENT_READ, guest)
        self._guests.append(guest)
        if len(self._guests) > AT_ONCE:
            self._send_away(self._guests[0], f"more than {AT_ONCE} handshakes were going on at once")

    def _go_on(self, guest: PendingHandshake) -> bool:
        """Whether it has proved the secret."""
        sock = guest.sock
        if guest not in self._guests:  # sent away since it was seen ready, or let wait while Ctrl-C came
            self._forget(guest, sock)
            guest.close()
            return False
        try:
            self._unregister(sock)  # where TLS begins, another process has it, and we would still hear of it
            guest.go_on()
            self._ready.register(guest.sock, selectors.EVENT_READ, guest)
        except BaseException as error:
            if guest.has_proved() and not isinstance(error, Exception):
                raise  # it counts on being let in: the next call goes on
            self._forget(guest, guest.sock)
            guest.close()
            if isinstance(error, OSError) and lacks(error):  # TLS needs descriptors of its own
                self._note(f"{guest.peer} was refused: {error.strerror}")
            elif isinstance(error, Refused):
                self._note(str(error))
            else:
                raise
            return False
        return guest.has_proved()

    def _hand_over(
        self, guest: PendingHandshake, take: Callable[[socket.socket, Hello], object] | None
    ) -> tuple[socket.socket, Hello] | None:
        """Of one that has proved the secret."""
        if guest.hello is None and not self._go_on(guest):
            return None
        met = guest.come_in()
        if take is not None:
            take(*met)
        self._forget(guest, guest.sock)
        return met

    def _forget(self, guest: PendingHandshake, sock: socket.socket) -> None:
        self._unregister(sock)
        with contextlib.suppress(ValueError):
            self._guests.remove(guest)

    def _unregister(self, sock: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):  # it has been: before Ctrl-C, or before it was closed
            self._ready.unregister(sock)

    def _send_away_the_late(self, now: float) -> None:
        while self._guests and self._guests[0].give_up <= now:
            self._send_away(self._guests[0], self._guests[0].late())

    def _send_away(self, guest: PendingHandshake, reason: str) -> None:
        self._forget(guest, guest.sock)
        guest.close()
        self._note(f"{guest.peer} was refused: {reason}")

    def _note(self, reason: str) -> None:
        self.refused += 1
        self.last_refused = reason

    def fileno(self) -> int:
        """Is readable when ``accept`` has something to do, but for who :meth:`has_let_wait`."""
        return self._ready.fileno()

    def has_let_wait(self) -> bool:
        """Whether somebody has proved the secret and waits for an ``accept``, for Ctrl-C came in the last."""
        return any(guest.has_proved() for guest in self._guests)

    def close(self) -> None:
        """Sends away who is still proving, and listens no more."""
        for guest in list(self._guests):
            self._send_away(guest, "the door was closed")
        self._ready.close()
        self._listener.close()

    def drop(self) -> None:
        """In a forked child: lets go of what its parent goes on using."""
        self._ready.close()
        self._listener.close()

    def __enter__(self) -> AuthenticatedListener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
