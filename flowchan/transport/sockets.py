"""Provide authenticated TCP connections between programs."""

from __future__ import annotations

import socket
from types import TracebackType

from flowchan.errors import HostError
from flowchan.items.arguments import finite_seconds, flag, refuses_misspelt, seconds, secret_bytes, text
from flowchan.items.tracebacks import methods_end_at_caller
from flowchan.transport import tcp
from flowchan.transport.dial import reach
from flowchan.transport.listener import AuthenticatedListener


@refuses_misspelt("connect")
def connect(address: str, secret: bytes, *, timeout: float = 10.0, tls: bool = False) -> socket.socket:
    """Connect to a program that called :func:`listen`, and authenticate both ends.

    Neither end sends the secret. The call retries until the program listens or ``timeout`` seconds have
    passed. The connection sends small messages at once. Reading fails within 15 seconds after the other host
    disappears.

    Args:
        address: Address of the listener as ``host:port``, such as its attribute ``address``.
        secret: Listener's secret, at least 16 bytes.
        timeout: Seconds to keep trying (default: 10).
        tls: Encrypt the connection with TLS 1.3 (default: False). The listener must use the same setting.

    Returns:
        A connected stream socket in blocking mode.

    Raises:
        HostError: The listener did not accept this program in time, for example because the secrets differ.
        TypeError: An argument has the wrong type, or its name is unknown.
        ValueError: ``address`` is not an address, or ``secret`` is too short.

    Example:
        >>> import secrets, threading
        >>> from flowchan.transport import connect, listen
        >>> secret = secrets.token_bytes(16)
        >>> with listen("127.0.0.1:0", secret) as listener:
        ...     def answer():
        ...         with listener.accept() as peer:
        ...             peer.sendall(b"hello")
        ...     server = threading.Thread(target=answer)
        ...     server.start()
        ...     with connect(listener.address, secret) as sock:
        ...         print(sock.recv(5, 256))  # 256: MSG_WAITALL
        ...     server.join()
        b'hello'
    """
    tcp.split(text("connect", "address", address))
    secret_bytes("connect", secret)
    within = finite_seconds("connect", "timeout", timeout)
    try:
        return reach(
            address, secret, {}, why="connect: no connection", within=within, tls=flag("connect", "tls", tls)
        )[0]
    except OSError as error:
        raise HostError(str(error), address) from None


@refuses_misspelt("listen")
def listen(address: str, secret: bytes, *, tls: bool = False) -> SocketListener:
    """Listen for programs that know a secret.

    Args:
        address: Address of this machine to listen on, as ``host:port``. Port 0 picks a free port. Only this
            address accepts connections; ``"0.0.0.0:4711"`` accepts them on all IPv4 addresses.
        secret: Secret of both ends, at least 16 bytes.
        tls: Encrypt the connections with TLS 1.3 (default: False). Requires the package cryptography:
            ``pip install 'flowchan[tls]'``.

    Returns:
        The listener. Use it as a context manager, or close it.

    Raises:
        OSError: This machine cannot listen on the address.
        ImportError: The package for TLS is not installed.
        TypeError: An argument has the wrong type, or its name is unknown.
        ValueError: ``address`` is not an address, or ``secret`` is too short.

    Example:
        >>> import secrets
        >>> from flowchan.transport import listen
        >>> with listen("127.0.0.1:0", secrets.token_bytes(16)) as listener:
        ...     listener.address.startswith("127.0.0.1:")
        True
    """
    secret_bytes("listen", secret)
    encrypts = flag("listen", "tls", tls)
    listener = tcp.listen(text("listen", "address", address))
    try:
        return SocketListener(AuthenticatedListener(listener, secret, {}, tls=encrypts))
    except BaseException:
        listener.close()
        raise


@methods_end_at_caller
class SocketListener:
    """Listener that accepts only programs that know its secret; created by :func:`listen`.

    Other programs can neither delay nor end a call of :meth:`accept`.

    Attributes:
        address: Address for :func:`connect`, with the actual port.

    Example:
        >>> import secrets
        >>> from flowchan.transport import listen
        >>> listener = listen("127.0.0.1:0", secrets.token_bytes(16))
        >>> try:
        ...     listener.accept(timeout=0.01)
        ... except TimeoutError:
        ...     print("no program has connected")
        no program has connected
        >>> listener.close()
    """

    def __init__(self, listener: AuthenticatedListener) -> None:
        self._listener = listener
        self.address = listener.address

    def accept(self, timeout: float | None = None) -> socket.socket:
        """Accept the next program that proves that it knows the secret.

        Args:
            timeout: Seconds to wait (default: no limit).

        Returns:
            A connected stream socket in blocking mode.

        Raises:
            TimeoutError: No program proved the secret in time.
        """
        return self._listener.accept(seconds("accept", "timeout", timeout))[0]

    def close(self) -> None:
        """Stop listening. Accepted connections stay open."""
        self._listener.close()

    def __enter__(self) -> SocketListener:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
