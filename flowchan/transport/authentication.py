"""Two ends of a fresh connection prove to each other that they know the same secret.

Every message has a fixed size, so nothing in it says how much is to be read::

    both      greeting   what we speak, which end we are, 32 fresh random bytes, a certificate's SHA-256
    dialled   proof      HMAC-SHA256(key, "dialled: proof") where key = HMAC-SHA256(secret, both greetings)
    listens   proof      HMAC-SHA256(key, "listens: proof")
    dialled   hello      4,096 bytes of JSON, spaces behind it; HMAC-SHA256(key, "dialled: hello" + these)
    listens   hello      the same with "listens"

Who repeats an old handshake meets a fresh nonce, who sends our own messages back meets the wrong role, who
changes a byte changes the key. Greetings are only compared with what they have to be, and the hello of a peer
is looked at when it has been proved; nothing is ever unpickled here. With TLS the hellos already travel
encrypted: the listener's greeting names its certificate, so the proofs cover it, and the side that dialled
goes on only if it meets that very certificate.

What follows the handshake without TLS is not protected: who can rewrite packets can take the connection over.
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
from typing import Any

from flowchan.errors import Refused
from flowchan.transport.tcp import joined

SPOKEN = b"flowchan link 1\n"
NONCE = 32
NO_CERTIFICATE = bytes(32)
PROOF = 32
HELLO = 4096
SECRET = 16  # bytes that a secret has at least
DIALLED, LISTENS = b"dialled", b"listens"
GREETING = len(SPOKEN) + len(DIALLED) + 1 + NONCE + len(NO_CERTIFICATE)

Hello = dict[str, Any]
Handshake = Generator["bytes | int", bytes, Hello]
"""Gives bytes to send or the number of bytes that it wants to be sent, and returns the peer's hello. It
raises :class:`Refused` with a reason that does not name the peer."""


def meet(
    sock: socket.socket, secret: bytes, *, dialled: bool, hello: Hello, timeout: float, tls: bool = False
) -> tuple[socket.socket, Hello]:
    """Proves to the other end of ``sock`` that we know ``secret``, has it prove the same, and exchanges
    hellos.

    Returns the socket to go on with and the peer's hello. ``dialled`` says which end we are. Raises
    :class:`Refused`, whose one line names the peer's address, when the peer does not know the secret, is
    silent, or speaks otherwise, all of it within ``timeout`` seconds. If it raises, ``sock`` is closed.
    """
    end = sock
    try:
        if tls:
            raise NotImplementedError("TLS comes next")
        guest = Guest(sock, handshake(secret, hello, dialled=dialled), timeout)
        while guest.hello is None:
            waiting = select.poll()
            waiting.register(guest.sock, select.POLLIN)
            left = guest.give_up - time.monotonic()
            if left <= 0 or not waiting.poll(left * 1000):
                raise Refused(f"{guest.peer} was refused: {guest.late()}")
            guest.go_on()
            end = guest.sock
        end.setblocking(True)
        return end, guest.hello
    except BaseException:
        end.close()
        raise


class Guest:
    """A connection whose peer has not proved the secret yet. Never waits: ``go_on()`` takes what has come."""

    def __init__(self, sock: socket.socket, steps: Handshake, timeout: float) -> None:
        self.sock = sock
        self.hello: Hello | None = None
        self.give_up = time.monotonic() + timeout
        self._timeout = timeout
        self._steps = steps
        self._wanted = 0
        self._came = bytearray()
        self.peer = "a peer that has gone"
        with contextlib.suppress(OSError):
            self.peer = joined(sock.getpeername())
        sock.setblocking(False)
        self._proceed(None)

    def go_on(self) -> None:
        """Receives no more than the step at hand wants. Raises :class:`Refused`."""
        try:
            came = self.sock.recv(self._wanted - len(self._came))
        except BlockingIOError:
            return
        except OSError as error:
            self._refuse(f"the connection ended in the handshake ({error.strerror})")
        if not came:
            self._refuse(
                "it ended the connection in the handshake. Perhaps its secret is another one than ours"
                if self._came or self._wanted != GREETING
                else "it ended the connection and said nothing"
            )
        self._came += came
        if len(self._came) == self._wanted:
            message = bytes(self._came)
            self._came.clear()
            self._proceed(message)

    def late(self) -> str:
        """What a peer is told that took too long."""
        said = f"only {len(self._came)} of {self._wanted} bytes" if self._came else "nothing"
        return f"it sent {said} in this step of the handshake, which has {self._timeout:g} s in all"

    def _proceed(self, message: bytes | None) -> None:
        try:
            step = next(self._steps) if message is None else self._steps.send(message)
            while isinstance(step, bytes):
                self._send(step)
                step = next(self._steps)
            self._wanted = step
        except StopIteration as done:
            self.hello = done.value
        except Refused as refused:
            self._refuse(str(refused))

    def _send(self, message: bytes) -> None:
        """A few thousand bytes in all, which fit into any send buffer."""
        try:
            sent = self.sock.send(message)
        except OSError as error:
            self._refuse(f"the connection ended in the handshake ({error.strerror})")
        if sent < len(message):
            self._refuse("it does not take what is sent")

    def _refuse(self, reason: str) -> Any:
        raise Refused(f"{self.peer} was refused: {reason}") from None


def handshake(secret: bytes, hello: Hello, *, dialled: bool) -> Handshake:
    """The steps of one end; they know nothing of sockets. See the head of this file."""
    us, them = (DIALLED, LISTENS) if dialled else (LISTENS, DIALLED)
    said = written(hello)
    if len(secret) < SECRET:
        raise ValueError(f"a secret has at least {SECRET} bytes, not {len(secret)}: secrets.token_bytes(32)")
    mine = greeting(us)
    yield mine
    theirs = yield GREETING
    check_greeting(theirs, greeting(them))
    key = hmac.digest(secret, mine + theirs if dialled else theirs + mine, "sha256")
    if dialled:
        yield proof(key, us, b"proof")
        check((yield PROOF), proof(key, them, b"proof"))
        yield said + proof(key, us, b"hello", said)
        return read((yield HELLO + PROOF), key, them)
    check((yield PROOF), proof(key, them, b"proof"))
    yield proof(key, us, b"proof")
    heard = read((yield HELLO + PROOF), key, them)
    yield said + proof(key, us, b"hello", said)
    return heard


def greeting(role: bytes) -> bytes:
    return SPOKEN + role + b"-" + secrets.token_bytes(NONCE) + NO_CERTIFICATE


def check_greeting(theirs: bytes, example: bytes) -> None:
    """Whether a greeting is what it has to be, but for its random bytes."""
    if not theirs.startswith(SPOKEN):
        raise Refused("it does not speak flowchan's protocol, or another version of it")
    head = len(SPOKEN) + len(DIALLED) + 1
    if theirs[:head] != example[:head]:
        raise Refused("it is on the same side of the connection as we are: both dialled, or both listen")


def proof(key: bytes, role: bytes, what: bytes, message: bytes = b"") -> bytes:
    return hmac.digest(key, role + b": " + what + message, "sha256")


def check(theirs: bytes, right: bytes) -> None:
    if not hmac.compare_digest(theirs, right):
        raise Refused("it does not know the secret")


def written(hello: Hello) -> bytes:
    """A hello as it travels."""
    text = json.dumps(hello, allow_nan=False).encode()
    if len(text) > HELLO:
        raise ValueError(f"a hello has at most {HELLO} bytes of JSON, not {len(text)}")
    return text.ljust(HELLO)


def read(message: bytes, key: bytes, role: bytes) -> Hello:
    """The hello in a message, once it is proved."""
    said, tag = message[:HELLO], message[HELLO:]
    check(tag, proof(key, role, b"hello", said))
    try:
        hello = json.loads(said)
    except (ValueError, RecursionError):
        hello = None
    if not isinstance(hello, dict):
        raise Refused("its hello is no JSON object")
    return hello
