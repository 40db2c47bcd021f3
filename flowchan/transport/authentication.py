"""Let the two ends of a new connection authenticate each other with a shared secret.

Every message has a fixed size, so that a peer cannot choose how much the other side reads::

    both      greeting   protocol, role, TLS or not, 32 fresh random bytes, a certificate
    dialled   proof      HMAC-SHA256(key, "dialled: proof") where key = HMAC-SHA256(secret, both greetings)
    listens   proof      HMAC-SHA256(key, "listens: proof")
    dialled   hello      4,096 bytes of JSON, padded with spaces; HMAC-SHA256(key, "dialled: hello" + these)
    listens   hello      the same with "listens"

An attacker cannot replay a handshake, because each greeting contains a new nonce, or reflect a message,
because each message contains its sender's role. Changing a byte of a greeting changes the key. A greeting is
only compared with the expected bytes, and a hello is parsed only after its sender's proof. Nothing is
unpickled. With TLS, hellos are already encrypted. The listener's greeting contains its certificate's
fingerprint, so the proofs cover the certificate. The dialling side continues only if TLS presents that
certificate.

Without TLS, data after the handshake is unprotected: an attacker who can change packets can take over the
connection.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import select
import socket
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from flowchan.errors import Refused
from flowchan.transport.interrupts import append_result
from flowchan.transport.tcp import joined
from flowchan.transport.tls import Certificate, TlsProxy, certificate

PREAMBLE = b"flowchan link 1\n"
NONCE = 32
NO_CERTIFICATE = bytes(32)
PROOF = 32
HELLO = 4096
SECRET = 16  # minimum number of bytes in a secret
DIALLED, LISTENS = b"dialled", b"listens"
PLAIN, WITH_TLS = b"-", b"T"
GREETING = len(PREAMBLE) + len(DIALLED) + 1 + NONCE + len(NO_CERTIFICATE)

Hello = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Encrypt:
    """Handshake step in which TLS begins, with our certificate or the fingerprint of the peer's."""

    ours: Certificate | None
    peer_greeting: bytes


class Last(bytes):
    """Last message of the listening side. It accepts the peer that sent the hello ``peer_hello``."""

    peer_hello: Hello


Handshake = Generator[bytes | int | Encrypt, bytes, Hello]
"""Yields bytes to send, a number of bytes to receive, or an :class:`Encrypt`. Returns the peer's hello.
Raises :class:`Refused` with a reason that does not name the peer."""


def meet(
    sock: socket.socket, secret: bytes, *, dialled: bool, hello: Hello, timeout: float, tls: bool = False
) -> tuple[socket.socket, Hello]:
    """Authenticate both ends of ``sock`` with ``secret``, and exchange hellos.

    On an error, ``sock`` is closed.

    Args:
        sock: New connection.
        secret: Secret that both ends must know.
        dialled: True if this side dialled; False if it listened.
        hello: This side's hello.
        timeout: Seconds for the whole handshake.
        tls: Encrypt the connection.

    Returns:
        The socket to use from now on, and the peer's hello. With ``tls``, the socket leads to a proxy process
        that encrypts the data (``tls.py``) and ends when the socket is closed.

    Raises:
        Refused: The peer does not know the secret, sends nothing, or uses another protocol. The message is
            one line, which contains the peer's address.
    """
    try:
        pending = PendingHandshake(sock, handshake(secret, hello, dialled=dialled, tls=tls), timeout)
    except BaseException:
        sock.close()
        raise
    try:
        while pending.hello is None:
            waiting = select.poll()
            waiting.register(pending.sock, select.POLLIN)
            remaining = pending.give_up - time.monotonic()
            if remaining <= 0 or not waiting.poll(remaining * 1000):
                raise Refused(f"{pending.peer} was refused: {pending.late_reason()}")
            pending.receive_step()
        return pending.finish()
    except BaseException:
        pending.close()
        raise


class PendingHandshake:
    """Handshake in progress. The connection's peer has not proved yet that it knows the secret.

    No method blocks: ``receive_step()`` takes only data that has arrived.
    """

    def __init__(self, sock: socket.socket, steps: Handshake, timeout: float) -> None:
        self.sock = sock
        self.hello: Hello | None = None
        self.messages = 0  # number of complete messages from the peer
        self.give_up = time.monotonic() + timeout
        self._timeout = timeout
        self._steps = steps
        self._expected = 0
        self._received = bytearray()
        self._proxy: TlsProxy | None = None
        self._last: Last | None = None
        self._sent: list[int] = []
        self.peer, self.host = "a peer that has left", ""
        with contextlib.suppress(OSError):
            self.peer = joined(sock.getpeername())
            self.host = self.peer.rpartition(":")[0]
        sock.setblocking(False)
        self._proceed(None)

    def receive_step(self) -> None:
        """Receive bytes of the current step, but no further bytes, and continue the handshake.

        Raise :class:`Refused` if the handshake fails. If Ctrl-C comes after the peer's last message, the next
        call continues.
        """
        if self._last is not None:
            self._end(self._last)
            return
        try:
            came = self.sock.recv(self._expected - len(self._received))
        except BlockingIOError:
            return
        except OSError as error:
            self._refuse(self._why_it_ended(error))
        if not came:
            self._refuse(self._why_it_ended())
        self._received += came
        if len(self._received) == self._expected:
            message = bytes(self._received)
            self._received.clear()
            self._proceed(message)
            self.messages += 1

    def _why_it_ended(self, error: OSError | None = None) -> str:
        if self._proxy and (reason := self._proxy.reason()):
            return reason
        if error:
            return f"the connection ended during the handshake ({error.strerror})"
        if self._expected == GREETING and not self._received:
            return "it closed the connection without sending a message"
        return "it closed the connection during the handshake; perhaps the secrets differ"

    def finish(self) -> tuple[socket.socket, Hello]:
        """Return the socket and the peer's hello, once the peer has proved the secret."""
        assert self.hello is not None
        if self._proxy:
            self._proxy.forget()
        self.sock.setblocking(True)
        return self.sock, self.hello

    def close(self) -> None:
        if self._proxy:
            self._proxy.forget()
        self.sock.close()

    def late_reason(self) -> str:
        """Return why a peer that took too long is rejected."""
        written_hello = (
            f"only {len(self._received)} of {self._expected} bytes" if self._received else "nothing"
        )
        limit = f"the handshake, which may take {self._timeout:g} s in total"
        return f"it sent {written_hello} in this step of {limit}"

    def _proceed(self, message: bytes | None) -> None:
        try:
            step = next(self._steps) if message is None else self._steps.send(message)
            while not isinstance(step, int):
                if isinstance(step, Last):
                    self._last = step
                    self._end(step)
                    return
                if isinstance(step, bytes):
                    self._send(step)
                else:
                    self._encrypt(step)
                step = next(self._steps)
            self._expected = step
        except StopIteration as done:
            self.hello = done.value
        except Refused as refused:
            self._refuse(str(refused))

    def knows_secret(self) -> bool:
        """Return whether the peer has proved that it knows the secret."""
        return self.messages >= 2

    def has_proved(self) -> bool:
        """Return whether the peer is accepted. The handshake may still need one :meth:`receive_step`."""
        return self._last is not None

    def _end(self, last: Last) -> None:
        self._send(last, self._sent)
        self.hello = last.peer_hello

    def _send(self, message: bytes, sent: list[int] | None = None) -> None:
        """Send a message, and append the number of bytes sent to ``sent``.

        All messages together are a few thousand bytes, which fit into any send buffer.
        """
        sent = [] if sent is None else sent
        try:
            if not sent:
                append_result(sent, self.sock.send, message)
        except OSError as error:
            self._refuse(self._why_it_ended(error))
        if sent[0] < len(message):
            self._refuse("it does not read the messages from this side")

    def _encrypt(self, step: Encrypt) -> None:
        remaining = max(0.1, self.give_up - time.monotonic())
        self._proxy = TlsProxy(self.sock, step.ours, step.peer_greeting, remaining)
        self.sock = self._proxy.end
        self.sock.setblocking(False)

    def _refuse(self, reason: str) -> Any:
        raise Refused(f"{self.peer} was refused: {reason}") from None


def handshake(secret: bytes, hello: Hello, *, dialled: bool, tls: bool = False) -> Handshake:
    """Yield the steps of one side, for any transport. The module docstring describes the messages."""
    us, them = (DIALLED, LISTENS) if dialled else (LISTENS, DIALLED)
    written_hello = written(hello)
    if len(secret) < SECRET:
        raise ValueError(
            f"secret must have at least {SECRET} bytes, got {len(secret)}; use secrets.token_bytes(32)"
        )
    certified = certificate() if tls and not dialled else None
    ours = greeting(us, tls, certified.fingerprint if certified else NO_CERTIFICATE)
    yield ours
    peer_greeting = yield GREETING
    check_greeting(peer_greeting, them, tls)
    key = hmac.digest(secret, ours + peer_greeting if dialled else peer_greeting + ours, "sha256")
    if dialled:
        yield proof(key, us, b"proof")
        check((yield PROOF), proof(key, them, b"proof"))
        if tls:
            yield Encrypt(None, peer_greeting[-len(NO_CERTIFICATE) :])
        yield written_hello + proof(key, us, b"hello", written_hello)
        return read((yield HELLO + PROOF), key, them)
    check((yield PROOF), proof(key, them, b"proof"))
    yield proof(key, us, b"proof")
    if tls:
        yield Encrypt(certified, NO_CERTIFICATE)
    peer_hello = read((yield HELLO + PROOF), key, them)
    last = Last(written_hello + proof(key, us, b"hello", written_hello))
    last.peer_hello = peer_hello
    yield last
    return peer_hello


def greeting(role: bytes, tls: bool = False, fingerprint: bytes = NO_CERTIFICATE) -> bytes:
    """Return a side's first message: version, role, use of TLS, a nonce, and a certificate's fingerprint."""
    return PREAMBLE + role + (WITH_TLS if tls else PLAIN) + secrets.token_bytes(NONCE) + fingerprint


def check_greeting(peer_greeting: bytes, role: bytes, tls: bool) -> None:
    """Raise ``Refused`` unless a greeting has our protocol and TLS setting, and the right role."""
    if not peer_greeting.startswith(PREAMBLE):
        raise Refused("it does not use the protocol of this version of flowchan")
    rest = peer_greeting[len(PREAMBLE) :]
    if not rest.startswith(role):
        raise Refused("it has the same role as this side: both connect, or both listen")
    if rest[len(role) : len(role) + 1] != (WITH_TLS if tls else PLAIN):
        raise Refused(
            f"TLS is {'on here but off' if tls else 'off here but on'} at the peer; pass tls=True on both "
            "sides"
        )


def proof(key: bytes, role: bytes, what: bytes, message: bytes = b"") -> bytes:
    """Return the proof that a side with this role knows the key."""
    return hmac.digest(key, role + b": " + what + message, "sha256")


def check(peer_greeting: bytes, right: bytes) -> None:
    """Raise ``Refused`` unless the peer's proof is right."""
    if not hmac.compare_digest(peer_greeting, right):
        raise Refused("it does not know the secret")


def written(hello: Hello) -> bytes:
    """Return a hello as bytes, padded to the fixed size of hellos."""
    text = json.dumps(hello, allow_nan=False).encode()
    if len(text) > HELLO:
        raise ValueError(f"hello must have at most {HELLO} bytes of JSON, got {len(text)}")
    return text.ljust(HELLO)


def read(message: bytes, key: bytes, role: bytes) -> Hello:
    """Check a message's proof, and return the hello in the message."""
    written_hello, tag = message[:HELLO], message[HELLO:]
    check(tag, proof(key, role, b"hello", written_hello))
    try:
        hello = json.loads(written_hello)
    except (ValueError, RecursionError):
        hello = None
    if not isinstance(hello, dict):
        raise Refused("its hello is not a JSON object")
    return hello
