"""Connect the members of a group across hosts."""

from __future__ import annotations

import errno
import math
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from flowchan.collective.group_transport import GroupTransport, TransportListener, registered
from flowchan.errors import Refused
from flowchan.transport.authentication import Hello, meet
from flowchan.transport.interrupts import unless_interrupted
from flowchan.transport.listener import AuthenticatedListener
from flowchan.transport.tcp import dial, joined, listen, split

PAUSE_S, TRY_S = 0.01, 5.0
"""Seconds between attempts to connect, and time limit of one attempt."""
REFUSED_QUICKLY_S, REJECTION_TIMEOUT_S = 1.0, 30.0
"""A peer that rejects attempts for ``REJECTION_TIMEOUT_S`` seconds is not a member, but another program.

Each rejection must come within ``REFUSED_QUICKLY_S`` seconds. A member rejects attempts only while too many
peers dial it at once.
"""


@dataclass(frozen=True)
class Connector:
    """Secret and listening address that members on different hosts use to connect.

    Each member listens through ``transport`` or, if that is None, on a free port of the address
    ``listen_at``.
    """

    secret: bytes = field(repr=False)
    listen_at: str
    tls: bool = False
    transport: GroupTransport | None = field(default_factory=registered)

    @property
    def transport_name(self) -> str:
        """Return the transport's name, which must be the same on all members."""
        return "TCP" if self.transport is None else self.transport.name

    def listen(self, hello: Hello) -> AuthenticatedListener:
        """Start listening for other members."""
        if self.transport is None:
            listener = listen(joined((self.listen_at, 0)))
        else:
            listener = TransportListener(*self.transport.listen(self.listen_at))
        return AuthenticatedListener(listener, self.secret, hello, tls=self.tls)

    def dial(self, address: str, timeout: float) -> socket.socket:
        """Connect to an address in one attempt, without authentication."""
        return dial(address, timeout) if self.transport is None else self.transport.connect(address, timeout)

    def host_of(self, address: str) -> str:
        """Return the IP address or name of this host, which listens on ``address``."""
        return split(address)[0] if self.transport is None else self.listen_at

    def connect(
        self, address: str, hello: Hello, wanted: Callable[[], bool], give_up: float = math.inf
    ) -> socket.socket:
        """Connect to the member that listens on an address.

        Args:
            address: Address of the member.
            hello: This member's hello message.
            wanted: Returns whether the connection is still needed.
            give_up: Monotonic time at which to stop trying (default: never).

        Returns:
            The connection.

        Raises:
            ConnectionRefusedError: The member is gone, or another program uses its port.
            OSError: The member is unreachable, the time is up, or ``wanted`` returns False.
        """
        refused_since = math.inf
        while wanted() and (remaining := give_up - (begun := time.monotonic())) > 0:
            try:
                sock = self.dial(address, min(TRY_S, remaining))
            except unless_interrupted(TimeoutError):
                continue
            try:
                within = min(TRY_S, remaining)
                return meet(sock, self.secret, dialled=True, hello=hello, timeout=within, tls=self.tls)[0]
            # The peer is gone, the peer has rejected this member, or another program uses the peer's port.
            except unless_interrupted(OSError) as error:
                is_quick = isinstance(error, Refused) and time.monotonic() - begun < REFUSED_QUICKLY_S
                refused_since = min(refused_since, begun) if is_quick else math.inf
                if time.monotonic() - refused_since > REJECTION_TIMEOUT_S:
                    reason = f"another program listens at {address} ({error})"
                    raise ConnectionRefusedError(errno.ECONNREFUSED, reason) from error
            time.sleep(PAUSE_S)
        raise TimeoutError(f"{address} did not answer in time")
