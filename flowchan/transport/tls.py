"""TLS 1.3 for a connection whose ends have proved the secret to each other, by a process of its own.

So whoever uses the connection gets a plain descriptor, and encryption never waits for the GIL of a process
that runs a user's code. The certificate is made for this process and thrown away with it; nobody vouches for
it, because the proofs of the handshake cover it.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flowchan.transport.pidfd import open_pidfd

RELAY = Path(__file__).with_name("tls_proxy.py")
BUFFER = 512 * 1024  # of the plain side: as much as the relay passes on at a time, and more
A_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True, repr=False)
class Certificate:
    """A certificate with its private key, and the SHA-256 by which the other end knows it."""

    pem: str
    fingerprint: bytes


@functools.cache
def certificate() -> Certificate:
    """The one of this process. Raises ``ImportError``."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError as error:
        raise ImportError(
            "tls=True needs the package cryptography where connections are listened for: "
            f"pip install 'flowchan[tls]' ({error})"
        ) from None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "flowchan")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - A_DAY)
        .not_valid_after(now + 3650 * A_DAY)
        .sign(key, hashes.SHA256())
    )
    encoding = serialization.Encoding
    private = key.private_bytes(encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    pem = (private + made.public_bytes(encoding.PEM)).decode()
    return Certificate(pem, hashlib.sha256(made.public_bytes(encoding.DER)).digest())


@contextlib.contextmanager
def _own_pidfd() -> Iterator[int | None]:
    """A handle of this process, for one that is to end with it; None where there are none."""
    pidfd = open_pidfd(os.getpid())
    try:
        yield pidfd
    finally:
        if pidfd is not None:
            os.close(pidfd)


class TlsProxy:
    """The process that does TLS for ``sock``, which it takes over. ``end`` is what to use in its place; the
    process ends after it has been closed.

    ``mine`` is the certificate of the end that listens; ``theirs`` the fingerprint that the end that dialled
    has to find.
    """

    def __init__(self, sock: socket.socket, mine: Certificate | None, theirs: bytes, timeout: float) -> None:
        self.end, far = socket.socketpair()
        for side in (self.end, far):
            side.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        try:
            with far, _own_pidfd() as parent_fd:
                told = {
                    "local": far.fileno(),
                    "net": sock.fileno(),
                    "pem": mine.pem if mine else "",
                    "fingerprint": theirs.hex(),
                    "timeout": timeout,
                    "parent": os.getpid(),
                    "parent_fd": parent_fd,
                }
                handles = () if parent_fd is None else (parent_fd,)
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(RELAY)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    pass_fds=(far.fileno(), sock.fileno(), *handles),
                    start_new_session=True,  # Ctrl-C goes to the session of the terminal
                )
        except BaseException:
            self.end.close()
            raise
        sock.close()
        assert process.stdin is not None
        assert process.stdout is not None
        self._says = process.stdout
        with contextlib.suppress(BrokenPipeError):  # it has died, which the end of the connection tells
            process.stdin.write(json.dumps(told).encode() + b"\n")
            process.stdin.flush()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        # So that nothing is left of it, whenever it ends. Holds no more than the process.
        threading.Thread(target=process.wait, name="flowchan: end of a TLS relay", daemon=True).start()

    def reason(self) -> str:
        """Why it has ended, once ``end`` says that it has; empty when TLS began."""
        return self._says.readline().decode().strip()

    def forget(self) -> None:
        """Is not asked any more."""
        self._says.close()
