"""Let users register transports for the connections between a group's hosts.

A group's rendezvous stays on TCP. The rendezvous distributes the members' addresses, which may have any form,
because only the transport interprets them. Everything else between hosts uses the transport's sockets:
collectives, messages, and notices of members that leave. The two ends of each connection authenticate each
other as over TCP.
"""

from __future__ import annotations

import socket
from typing import Protocol

from flowchan.items.arguments import refuses_misspelt
from flowchan.items.text import shown
from flowchan.transport.tcp import Listener, accept_waiting


class GroupTransport(Protocol):
    """Interface of a transport between hosts, for :func:`register_transport`.

    The sockets must be operating-system stream sockets, such as ``AF_UNIX`` or ``AF_VSOCK`` sockets, or
    sockets connected through a proxy. Other protocols need a thread that copies bytes to and from one end of
    ``socket.socketpair()``. ``ssl.SSLSocket`` is not allowed, because it cannot send parts of several buffers
    at once.

    Attributes:
        name: Name of the transport in errors, which must be the same on all members.

    Example:
        >>> import socket
        >>> class Tcp:
        ...     name = "plain TCP"
        ...     def listen(self, host: str) -> tuple[str, socket.socket]:
        ...         sock = socket.create_server((host, 0))
        ...         return f"{host} {sock.getsockname()[1]}", sock
        ...     def connect(self, address: str, timeout: float) -> socket.socket:
        ...         host, port = address.split()
        ...         return socket.create_connection((host, int(port)), timeout)
        >>> transport = Tcp()
        >>> address, listener = transport.listen("127.0.0.1")
        >>> with listener, transport.connect(address, timeout=5) as sock:
        ...     sock.getpeername()[0]
        '127.0.0.1'
    """

    name: str

    def listen(self, host: str) -> tuple[str, socket.socket]:
        """Listen for the other members.

        Args:
            host: IP address or name of this host on its route to rank 0.

        Returns:
            The address (any text) to pass to ``connect``, and the listening socket. The group closes the
            socket.
        """

    def connect(self, address: str, timeout: float) -> socket.socket:
        """Connect to the member that listens on an address.

        Args:
            address: Address that ``listen`` returned on that member.
            timeout: Seconds for this attempt. If an attempt takes longer, the group calls this method again.

        Returns:
            The connected socket.

        Raises:
            ConnectionRefusedError: Nothing listens there, so the member is gone.
            TimeoutError: The attempt took longer than ``timeout``.
        """


_registered: GroupTransport | None = None


@refuses_misspelt("register_transport")
def register_transport(transport: GroupTransport | None) -> None:
    """Use a transport between hosts in all groups that this process joins from now on.

    All members must register transports with the same name. Members on the same host share memory and do not
    use the transport. Existing groups keep their transport.

    Args:
        transport: Object with the methods of :class:`GroupTransport`; None for TCP, the default.

    Raises:
        TypeError: ``transport`` lacks a name or a method.

    Example:
        >>> import socket
        >>> from flowchan.collective import group, register_transport
        >>> class UnixSockets:
        ...     name = "Unix sockets"
        ...     def listen(self, host):
        ...         sock = socket.socket(socket.AF_UNIX)
        ...         sock.bind("")  # the kernel chooses a free address
        ...         sock.listen()
        ...         return sock.getsockname().hex(), sock
        ...     def connect(self, address, timeout):
        ...         sock = socket.socket(socket.AF_UNIX)
        ...         sock.settimeout(timeout)
        ...         sock.connect(bytes.fromhex(address))
        ...         return sock
        >>> register_transport(UnixSockets())
        >>> with group() as g:
        ...     g.allreduce(1)
        1
        >>> register_transport(None)
    """
    global _registered
    usable = isinstance(getattr(transport, "name", None), str) and all(
        callable(getattr(transport, method, None)) for method in ("listen", "connect")
    )
    if transport is not None and not usable:
        raise TypeError(
            "register_transport: transport must have a name and the methods listen and connect, got "
            f"{shown(transport)}; see flowchan.collective.GroupTransport"
        )
    _registered = transport


def registered() -> GroupTransport | None:
    """Return the transport for new groups; None means TCP."""
    return _registered


class TransportListener(Listener):
    """Listening socket of a registered transport."""

    def __init__(self, address: str, sock: socket.socket) -> None:
        self._socket, self.address = sock, address
        sock.setblocking(False)

    def accept_now(self) -> socket.socket | None:
        """Return a connection that is ready to be accepted, or None."""
        accepted = accept_waiting(self._socket)
        if accepted is None:
            return None
        accepted[0].setblocking(True)
        return accepted[0]
