"""How the workers of a gang on several hosts become members of one group: by the driver of their run, whom
all of them reach."""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import threading
from dataclasses import dataclass

from flowchan.collective.group import Group
from flowchan.collective.messages_remote import Way
from flowchan.collective.rendezvous.forming import meet_by
from flowchan.errors import MemberDied
from flowchan.transport.dial import reach
from flowchan.transport.rendezvous import Participant, RendezvousEnded
from flowchan.transport.tcp import route_to, split

WITHIN = 60.0
"""Seconds within which the driver must be reached, and the members each other once all have come. For those
that come late the driver waits, which hears of deaths."""


@dataclass
class Membership:
    """A place in ``group``, as the driver numbers it, which takes part on ``host``. ``elastic``: the driver
    may end the group. ``at``, ``secret``, ``tls``: how it is reached."""

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
        """The same on its host, which knows the way to the driver. So the secret does not cross."""
        return dataclasses.replace(self, at=at, secret=secret, tls=tls)

    def __enter__(self) -> Group:
        """Raises :class:`MemberDied` when another one ends before all have met, ``OSError``."""
        why = f"rank {self.rank} of group {self.name!r} can't reach the driver"
        hello = {"group": self.group, "rank": self.rank}
        sock, _ = reach(self.at, self.secret, hello, why=why, within=WITHIN, tls=self.tls)
        secret = hmac.digest(self.secret, f"group {self.group}".encode(), "sha256")
        way = Way(secret, route_to(split(self.at)[0]), self.tls)
        with contextlib.ExitStack() as stack:
            participant = stack.enter_context(contextlib.closing(Participant(sock, "the driver")))
            try:
                self._member = meet_by(participant.gather, self.rank, way, WITHIN, self.name, self.host)
                if self.elastic:
                    participant.settle()
                    self._listener = _Listener(participant, self._member)
                    stack.pop_all()
            except (RendezvousEnded, TimeoutError) as error:
                if self._member is not None:
                    self._member._abandon()
                if not isinstance(error, RendezvousEnded) and participant.goes_on():
                    raise
                raise MemberDied(f"group {self.name!r} can't begin: {error}", (), "joining") from None
        return self._member

    def close(self) -> None:
        """The member leaves, if it has come."""
        self._hear_no_more()
        if self._member is not None:
            self._member.close()

    def _abandon(self) -> None:
        """As the member's."""
        self._hear_no_more()
        if self._member is not None:
            self._member._abandon()

    def _hear_no_more(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None


class _Listener:
    """Ends a member's group when the driver says so, or can't be heard any more: the members may not see
    who has died on another host, nor that one has come who is to join them."""

    def __init__(self, participant: Participant, member: Group) -> None:
        self._participant, self._disband = participant, member._disbanding()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="flowchan-collective-seat", daemon=True)
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
