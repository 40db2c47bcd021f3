"""Encrypt an authenticated connection with TLS 1.3, in a separate process.

The connection's user gets a plain descriptor, and the other process encrypts. Encryption therefore never
waits for the GIL of a process that runs user code. Each process generates its own certificate. No authority
has to sign the certificate, because the proofs in the handshake cover it.
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

PROGRAM = Path(__file__).with_name("tls_proxy.py")
BUFFER = 512 * 1024  # bytes in the plain side's buffer, enough for at least one step of the proxy
A_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True, repr=False)
class Certificate:
    """Certificate, its private key, and its SHA-256 fingerprint, which the peer checks."""

    pem: str
    fingerprint: bytes


@functools.cache
def certificate() -> Certificate:
    """Return this process's certificate. Raise ``ImportError`` without the package cryptography."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError as error:
        raise ImportError(
            f"tls=True needs the package cryptography on the listening side ({error}); pip "
            "install 'flowchan[tls]'"
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
    """Yield a pidfd of this process for its child, or None if the kernel does not support pidfds."""
    pidfd = open_pidfd(os.getpid())
    try:
        yield pidfd
    finally:
        if pidfd is not None:
            os.close(pidfd)


class TlsProxy:
    """Process that takes over the connection ``sock`` and encrypts its data.

    ``end`` is the socket to use instead of ``sock``. The process ends after ``end`` is closed.

    Args:
        sock: Connection to encrypt.
        ours: Listening end's certificate; None at the dialling end.
        fingerprint: Fingerprint that the dialling end must find.
        timeout: Seconds for the TLS handshake.
    """

    def __init__(
        self, sock: socket.socket, ours: Certificate | None, fingerprint: bytes, timeout: float
    ) -> None:
        self.end, other = socket.socketpair()
        for side in (self.end, other):
            side.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        try:
            with other, _own_pidfd() as parent_fd:
                settings = {
                    "local": other.fileno(),
                    "net": sock.fileno(),
                    "pem": ours.pem if ours else "",
                    "fingerprint": fingerprint.hex(),
                    "timeout": timeout,
                    "parent": os.getpid(),
                    "parent_fd": parent_fd,
                }
                handles = () if parent_fd is None else (parent_fd,)
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(PROGRAM)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    pass_fds=(other.fileno(), sock.fileno(), *handles),
                    start_new_session=True,  # Ctrl-C in the terminal must not reach the proxy
                )
        except BaseException:
            self.end.close()
            raise
        sock.close()
        assert process.stdin is not None
        assert process.stdout is not None
        self._reason_pipe = process.stdout
        # If the proxy has died, this process will notice the end of the connection.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(settings).encode() + b"\n")
            process.stdin.flush()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        # Reap the process when it ends. The thread refers only to the process, so it does not keep this
        # object alive.
        threading.Thread(target=process.wait, name="flowchan: end of a TLS proxy", daemon=True).start()

    def reason(self) -> str:
        """Return why the proxy ended, or "" if TLS had begun. Call this after ``end`` reads as closed."""
        return self._reason_pipe.readline().decode().strip()

    def forget(self) -> None:
        """Close the pipe from which :meth:`reason` reads."""
        self._reason_pipe.close()
