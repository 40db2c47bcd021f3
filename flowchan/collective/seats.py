"""How the workers of a gang on several hosts become members of one group: by the driver of their run, whom
all of them reach."""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
from dataclasses import dataclass

from flowchan.collective.far_lanes import Way
from flowchan.collective.gathering import meet_by
from flowchan.collective.group import Group
from flowchan.errors import MemberDied
from flowchan.transport.circle import Over, Voice
from flowchan.transport.dialling import reach
from flowchan.transport.tcp import route_to, split

WITHIN = 60.0
"""Seconds within which the driver must be reached, and the members each other once all have come. For those
that come late the driver waits, which hears of deaths."""


@dataclass
class Seat:
    """A place in ``group``, as the driver numbers it, which takes part on ``host``. ``at``, ``secret``,
    ``tls``: how the driver is reached."""

    group: int
    rank: int
    size: int
    name: str
    host: str
    at: str = ""
    secret: bytes = dataclasses.field(default=b"", repr=False)
    tls: bool = False
    _member: Group | None = None

    def reached(self, at: str, secret: bytes, tls: bool) -> Seat:
        """The same on its host, which knows the way to the driver. So the secret does not cross."""
        return dataclasses.replace(self, at=at, secret=secret, tls=tls)

    def __enter__(self) -> Group:
        """Raises :class:`MemberDied` when another one ends before all have met, ``OSError``."""
        why = f"rank {self.rank} of group {self.name!r} can't reach the driver"
        hello = {"group": self.group, "rank": self.rank}
        sock, _ = reach(self.at, self.secret, hello, why=why, within=WITHIN, tls=self.tls)
        secret = hmac.digest(self.secret, f"group {self.group}".encode(), "sha256")
        way = Way(secret, route_to(split(self.at)[0]), self.tls)
        with contextlib.closing(Voice(sock)) as voice:
            meeting = self.name, self.host, voice.goes_on
            try:
                self._member = meet_by(voice.gather, self.rank, way, WITHIN, *meeting)
            except (Over, TimeoutError) as error:
                if not isinstance(error, Over) and voice.goes_on():
                    raise
                raise MemberDied(f"group {self.name!r} can't begin: {error}", (), "joining") from None
        return self._member

    def close(self) -> None:
        """The member leaves, if it has come."""
        if self._member is not None:
            self._member.close()
