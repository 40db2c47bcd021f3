"""Form the group of a gang's workers on several hosts, with the help of the run's driver."""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import threading
from dataclasses import dataclass

from flowchan.collective.connector import Connector
from flowchan.collective.group import Group
from flowchan.collective.rendezvous.forming import meet_by
from flowchan.errors import MemberDied
from flowchan.transport.dial import reach
from flowchan.transport.rendezvous import Participant, RendezvousEnded

WITHIN = 60.0
"""Seconds that a member has to reach the driver and, once all have arrived, the other members.

The driver waits for late members without a limit, because it notices deaths.
"""


@dataclass
class Membership:
    """Rank in a group that the driver forms, for a process on ``host``.

    If ``elastic`` is true, the driver may end the group. The member connects to the driver at ``at`` with
    ``secret``, over TLS if ``tls`` is true.
    """

    group: int
    rank: int
    size: int
    name: str
    host: str
    elastic: bool = False
    at: str = ""
    secret: bytes = dataclasses.field(default=b"", repr=False)
    tls: bool = False
    _member: Group | None = None
    _listener: _Listener | None = None

    def reached(self, at: str, secret: bytes, tls: bool) -> Membership:
        """Return a copy of this membership that knows how to reach the driver.

        The worker's host adds the address and the secret. The secret is therefore never sent with the
        membership.
        """
        return dataclasses.replace(self, at=at, secret=secret, tls=tls)

    def __enter__(self) -> Group:
        """Join the group.

        Returns:
            This process's member.

        Raises:
            MemberDied: Another member ended before all had met.
            OSError: The driver is unreachable.
        """
        why = f"rank {self.rank} of group {self.name!r} cannot reach the driver"
        hello = {"group": self.group, "rank": self.rank}
        sock, _, ours = reach(self.at, self.secret, hello, why=why, within=WITHIN, tls=self.tls)
        secret = hmac.digest(self.secret, f"group {self.group}".encode(), "sha256")
        connector = Connector(secret, ours, self.tls)
        with contextlib.ExitStack() as stack:
            participant = stack.enter_context(contextlib.closing(Participant(sock, "the driver")))
            try:
                self._member = meet_by(participant.gather, self.rank, connector, WITHIN, self.name, self.host)
                if self.elastic:
                    participant.settle()
                    self._listener = _Listener(participant, self._member)
                    stack.pop_all()
            except (RendezvousEnded, TimeoutError) as error:
                if self._member is not None:
                    self._member._abandon()
                if not isinstance(error, RendezvousEnded) and participant.goes_on():
                    raise
                raise MemberDied(f"group {self.name!r} cannot be formed: {error}", (), "joining") from None
        return self._member

    def close(self) -> None:
        """Leave the group, if it has been joined."""
        self._stop_listener()
        if self._member is not None:
            self._member.close()

    def _abandon(self) -> None:
        """Leave the group after a failure; the other members then raise ``MemberDied``."""
        self._stop_listener()
        if self._member is not None:
            self._member._abandon()

    def _stop_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None


class _Listener:
    """Ends a member's group when the driver asks for this or is lost.

    Otherwise, members might not notice that a member on another host has died, or that a new member is to
    join.
    """

    def __init__(self, participant: Participant, member: Group) -> None:
        self._participant, self._disband = participant, member._disbanding()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="flowchan-collective-membership", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._participant.wait_for_end()
        if not self._closing:
            self._disband()

    def close(self) -> None:
        self._closing = True
        self._participant.interrupt()
        self._thread.join()
        self._participant.close()
