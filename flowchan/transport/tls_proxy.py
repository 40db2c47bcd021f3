"""Run TLS for one connection, with plain bytes on one side and encrypted bytes on the other.

This is a separate program that ``tls.py`` starts. The program uses only the standard library, so it starts
fast and never waits for user code. The program ends when one side has ended and all remaining bytes have been
passed on, or when its parent dies. The proxy does not receive Ctrl-C, because the program may still need the
connection.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import select
import signal
import socket
import ssl
import sys
import time
from typing import cast

AT_ONCE = 256 * 1024
FAREWELL_S = 2.0  # seconds for passing on the remaining bytes at the end
PARENT_CHECK_MS = 500  # milliseconds between checks of a parent without a pidfd


class ProxyFailed(Exception):
    """Raised when the connection cannot be encrypted; the message says why."""


def context(pem: str) -> ssl.SSLContext:
    """Return a TLS 1.3 context with the certificate in ``pem``, or for the dialling end if ``pem`` is empty.

    No authority has signed the certificates. Instead, :func:`check_certificate` compares the peer's
    certificate with the fingerprint authenticated in the handshake.
    """
    if not pem:
        settings = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        settings.check_hostname = False
        settings.verify_mode = ssl.CERT_NONE
    else:
        settings = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        settings.num_tickets = 0
        file = os.memfd_create("certificate")  # the key is never written to disk
        os.write(file, pem.encode())
        settings.load_cert_chain(f"/proc/self/fd/{file}")
        os.close(file)
    settings.minimum_version = ssl.TLSVersion.TLSv1_3
    return settings


class Encrypted:
    """Connection to the other host: its socket, and TLS between two memory buffers."""

    def __init__(self, sock: socket.socket, pem: str) -> None:
        self.sock = sock
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context(pem).wrap_bio(self._received, self._to_send, server_side=bool(pem))
        self._plain = bytearray(2 * AT_ONCE)
        self.over = False

    def do_handshake(self, timeout: float) -> None:
        """Block until the connection is encrypted. Raise :class:`ProxyFailed` on failure."""
        give_up = time.monotonic() + timeout
        try:
            while True:
                wants = False
                try:
                    self._tls.do_handshake()
                except ssl.SSLWantReadError:
                    wants = True
                self.sock.settimeout(max(0.001, give_up - time.monotonic()))
                self.sock.sendall(self._to_send.read())
                if not wants:
                    return
                if not (came := self.sock.recv(AT_ONCE)):
                    raise ProxyFailed("it closed the connection at the start of TLS")
                self._received.write(came)
        except OSError as error:
            raise ProxyFailed(f"TLS could not start ({error})") from None

    def check_certificate(self, fingerprint: bytes) -> None:
        """Raise :class:`ProxyFailed` unless the peer presents the certificate with which it authenticated."""
        certificate = self._tls.getpeercert(binary_form=True) or b""
        if not hmac.compare_digest(hashlib.sha256(certificate).digest(), fingerprint):
            raise ProxyFailed(
                "its certificate is not the certificate that it authenticated, so the connection is being "
                "intercepted"
            )

    def encrypt(self, plain: memoryview) -> bytes:
        while plain:
            plain = plain[self._tls.write(plain) :]
        return self._to_send.read()

    def receive(self) -> tuple[memoryview, bytes]:
        """Receive data. Return the decrypted bytes, and the bytes that TLS itself must send."""
        came = self.sock.recv(AT_ONCE)
        if came:
            self._received.write(came)
        else:
            self.over = True
        return self.decrypt()

    def decrypt(self) -> tuple[memoryview, bytes]:
        """Decrypt all received bytes, and return a pair like that of :meth:`receive`.

        At most the beginning of a record stays undecrypted, so the plain bytes always fit.
        """
        size = 0
        view = memoryview(self._plain)
        try:
            while more := cast(int, self._tls.read(len(view) - size, view[size:])):
                size += more
            self.over = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError:  # raised if the peer has sent close_notify or a record was manipulated
            self.over = True
        return view[:size], self._to_send.read()

    def farewell(self) -> bytes:
        with contextlib.suppress(ssl.SSLError):
            self._tls.unwrap()
        return self._to_send.read()


class Pump:
    """Passes bytes on in both directions until one side ends.

    The pump does not read from a side while earlier bytes from it still wait to be sent. ``parent_fd`` is the
    parent's pidfd, or None if only the parent's pid is known.
    """

    def __init__(self, local: socket.socket, net: Encrypted, parent: int, parent_fd: int | None) -> None:
        local.setblocking(False)
        net.sock.setblocking(False)
        self._local, self._net = local, net
        self._parent, self._parent_fd = parent, parent_fd
        self._local_over = False
        self._give_up: float | None = None  # set once the proxy is about to end
        self._plain = bytearray(AT_ONCE)
        self._to_net = memoryview(b"")
        # Some bytes may have arrived together with the last message of the TLS handshake.
        self._to_local, more = net.decrypt()
        self._send(more)

    def run(self) -> None:
        while not self._done():
            for fd, events in self._wait():
                if fd == self._parent_fd:
                    self._end_soon()
                elif fd == self._local.fileno():
                    self._serve_local(events)
                else:
                    self._serve_net(events)
            if self._local_over or self._net.over:
                self._end_soon()
        if not self._net.over:
            self._send_farewell()

    def _done(self) -> bool:
        return (
            (self._net.over and not self._to_local)
            or (self._local_over and not self._to_net)
            or (self._give_up is not None and time.monotonic() > self._give_up)
        )

    def _end_soon(self) -> None:
        if self._give_up is None:
            self._give_up = time.monotonic() + FAREWELL_S

    def _wait(self) -> list[tuple[int, int]]:
        """Wait for the sockets, and return their events.

        The events report the end of each side, even while the pump neither reads from the side nor writes to
        it.
        """
        both = not (self._local_over or self._net.over)
        waiting = select.poll()
        for fd, reading, writing in (
            (self._local.fileno(), both and not self._to_net, self._to_local and not self._local_over),
            (self._net.sock.fileno(), both and not self._to_local, self._to_net and not self._net.over),
        ):
            if reading or writing or self._give_up is None:
                waiting.register(fd, select.POLLIN * bool(reading) | select.POLLOUT * bool(writing))
        if self._give_up is None:
            if self._parent_fd is not None:
                waiting.register(self._parent_fd, select.POLLIN)
                return waiting.poll()
            ready = waiting.poll(PARENT_CHECK_MS)
            if os.getppid() != self._parent:
                self._end_soon()
            return ready
        return waiting.poll(max(0.0, self._give_up - time.monotonic()) * 1000)

    def _serve_local(self, events: int) -> None:
        try:
            if events & select.POLLOUT:
                self._to_local = self._to_local[self._local.send(self._to_local) :]
            if events & select.POLLIN:
                if size := self._local.recv_into(self._plain):
                    self._send(self._net.encrypt(memoryview(self._plain)[:size]))
                else:
                    self._local_over = True
        except BlockingIOError:
            return
        except OSError:
            self._local_over = True
        if events & select.POLLHUP:
            self._end_soon()

    def _serve_net(self, events: int) -> None:
        try:
            if events & select.POLLOUT:
                self._to_net = self._to_net[self._net.sock.send(self._to_net) :]
            if events & select.POLLIN:
                self._to_local, more = self._net.receive()
                self._send(more)
        except BlockingIOError:
            return
        except OSError:
            self._net.over = True
        if events & (select.POLLHUP | select.POLLERR):
            self._end_soon()

    def _send(self, encrypted: bytes) -> None:
        if encrypted:
            self._to_net = memoryview(bytes(self._to_net) + encrypted)

    def _send_farewell(self) -> None:
        """End the connection so that the peer gets all bytes sent so far.

        If a socket with unread bytes is closed, bytes in flight are lost. This method therefore first reads
        the unread bytes.
        """
        sock = self._net.sock
        with contextlib.suppress(OSError):
            sock.settimeout(FAREWELL_S)
            sock.sendall(self._net.farewell())
            sock.shutdown(socket.SHUT_WR)
            give_up = time.monotonic() + FAREWELL_S
            while sock.recv(AT_ONCE) and time.monotonic() < give_up:
                pass


def main() -> int:
    """Run the TLS proxy with the settings on standard input, and return its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        settings = json.loads(sys.stdin.readline() or "{}")
        parent, parent_fd = settings["parent"], settings["parent_fd"]
    except KeyError:  # the process that started the proxy has died
        return 1
    if os.getppid() != parent:
        return 1
    with socket.socket(fileno=settings["local"]) as local, socket.socket(fileno=settings["net"]) as sock:
        net = Encrypted(sock, settings["pem"])
        try:
            net.do_handshake(settings["timeout"])
            if not settings["pem"]:
                net.check_certificate(bytes.fromhex(settings["fingerprint"]))
        except ProxyFailed as failed:
            # If the pipe is closed, the parent does not ask for the reason.
            with contextlib.suppress(BrokenPipeError):
                os.write(1, f"{failed}\n".encode())
            return 1
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # no more messages follow on standard output
        Pump(local, net, parent, parent_fd).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
