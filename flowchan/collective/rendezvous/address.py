"""How the members of a group meet at an address that all of them know; and how, over hosts, those that are
left meet there again.

Then rank 0 says who is left. It listens there once more, and waits for all of whom it hears that they live:
who comes says so of the members on its host, which their memory tells. Members of which it hears nothing it
waits for ``REJOIN_TIMEOUT_S`` seconds, and longer while they can be dialled: they are late. Then it tells
those who
have come who they are, and they meet as at first. When another one dies meanwhile, they come once more.

Of a network that is cut in two at most one part goes on, that with rank 0, for nobody else says who is left.
Who can't reach it fails, and so do all when it is gone; while it only is late, they wait.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import socket
import time
from dataclasses import dataclass, field, replace

from flowchan.collective.deadline import countdown
from flowchan.collective.group import Group
from flowchan.collective.many_hosts import LinkedGroup
from flowchan.collective.messages_remote import Way
from flowchan.collective.rendezvous.forming import meet_by
from flowchan.errors import GroupError, MemberDied
from flowchan.transport.dial import reach
from flowchan.transport.interrupts import is_interrupt, unless_interrupted
from flowchan.transport.listener import AuthenticatedListener
from flowchan.transport.rendezvous import Coordinator, Participant, RendezvousEnded
from flowchan.transport.tcp import Listener, dial, listen, route_to, split

REJOIN_TIMEOUT_S = 10.0
"""Seconds for which who comes waits for those that don't, until it looks whether they can be dialled at all;
and within which all must reach each other that have come."""
POLL_INTERVAL_S = 0.02


def meet_at(
    at: str, secret: bytes, rank: int, size: int, timeout: float, name: str = "", host: str | None = None
) -> Group:
    """This process's member of the group of all that come to the address ``at`` with the secret. ``host``:
    what is told of which one this is."""
    where, _ = split(at)
    left = countdown(timeout)
    try:
        if rank == 0:
            with contextlib.closing(Coordinator(size, time.monotonic() + timeout)) as coordinator:
                with AuthenticatedListener(listen(at), secret, {"rank": 0}) as door:
                    coordinator.assemble(door.accept)
                met = meet_by(coordinator.gather, 0, Way(secret, where), left() or 0.0, name, host)
        else:
            why = f"rank {rank} of {size} has waited in vain for rank 0"
            try:
                sock, _ = reach(at, secret, {"rank": rank, "size": size}, why=why, within=timeout, tls=False)
            except unless_interrupted(OSError) as error:
                raise TimeoutError(str(error)) from None
            sock.settimeout(max(0.001, left() or 0.0))
            with contextlib.closing(Participant(sock, "rank 0")) as participant:
                way = Way(secret, route_to(where))
                met = meet_by(participant.gather, rank, way, left() or 0.0, name, host)
    except RendezvousEnded as ended:
        raise GroupError(str(ended)) from None
    return Place(at, secret, host).of(met)


@dataclass(frozen=True)
class Place:
    """Where a group has met. ``number``: of those before it, each made of what was left of the one before."""

    at: str
    secret: bytes = field(repr=False)
    host: str | None
    number: int = 0

    def of(self, group: Group) -> Group:
        """The same group, which can meet there again."""
        if isinstance(group, LinkedGroup):
            group._meet_again = self._meet_again
        return group

    def _meet_again(self, old: LinkedGroup, name: str, give_up: float) -> Group:
        """The group of those that are left of ``old``, which has been given up."""
        number = self.number + 1
        secret = hmac.digest(self.secret, f"again {number}".encode(), "sha256")  # nobody of another one comes
        meet = _lead if old.rank == 0 else _follow
        for _ in range(old.size):
            try:
                met = meet(old, self, secret, name, give_up)
                if met._has_met(_rejoin_timeout(give_up)):
                    return replace(self, number=number).of(met)
            except (RendezvousEnded, MemberDied):
                continue
            except TimeoutError as error:  # one that had come is late
                if is_interrupt(error) or time.monotonic() >= give_up:
                    raise
        raise GroupError(
            f"{old!r} can't be shrunk: again and again one of those that are left ended; {REMEDY}"
        )


REMEDY = "make a new group, or run a graph, whose gangs begin again by themselves"


def _lead(old: LinkedGroup, place: Place, secret: bytes, name: str, give_up: float) -> Group:
    came: dict[int, socket.socket] = {}
    try:
        with AuthenticatedListener(_listener(old, place.at), secret, {"rank": 0}) as door:
            _let_in(old, door, came, give_up)
        left = sorted([0, *came])
        within = _rejoin_timeout(give_up)
        coordinator = Coordinator(len(left), time.monotonic() + within)
        for rank, sock in came.items():
            coordinator.come(left.index(rank), sock)
        coordinator.tell(left)
        way = Way(secret, split(place.at)[0])
        return meet_by(coordinator.gather, 0, way, within, name, place.host)
    finally:
        for sock in came.values():
            sock.close()


def _listener(old: LinkedGroup, at: str) -> Listener:
    try:
        return listen(at)
    except OSError as error:
        raise GroupError(f"{old!r} can't be shrunk: {error}; {REMEDY}") from None


def _let_in(
    old: LinkedGroup, door: AuthenticatedListener, came: dict[int, socket.socket], give_up: float
) -> None:
    """Until all have come that may be left."""
    alive: dict[int, list[int]] = {}
    patient = time.monotonic() + REJOIN_TIMEOUT_S
    while True:
        alive[old._host] = old._alive_here()
        expected = {rank for ranks in alive.values() for rank in ranks} - {0}
        now = time.monotonic()
        if len(alive) == len(old._hosts) and expected <= came.keys():
            return
        if now > patient:
            missing = [[rank for rank in ranks if rank and rank not in came] for ranks in old._hosts]
            if not any(_is_late(old, ranks, give_up) for ranks in missing) and time.monotonic() < give_up:
                return
            patient = time.monotonic() + REJOIN_TIMEOUT_S
        if (left := give_up - time.monotonic()) <= 0:
            late = sorted(expected - came.keys()) or "all of other hosts"
            raise TimeoutError(f"shrink of {old._title()} was not done in time: {late} have not come")
        try:
            sock, hello = door.accept(min(POLL_INTERVAL_S, left))
        except unless_interrupted(TimeoutError):
            continue
        rank = hello["rank"]
        if rank in came:
            came[rank].close()  # it comes once more
        came[rank] = sock
        alive[old._host_of(rank)] = hello["alive"]


def _is_late(old: LinkedGroup, ranks: list[int], give_up: float) -> bool:
    """Whether one of these, all on one host, still listens as a member of the old group: so it lives, and has
    not come. Where one does not answer at all, none does."""
    for rank in ranks:
        try:
            dial(old._remote.addresses[rank], max(0.0, min(1.0, give_up - time.monotonic()))).close()
            return True
        except unless_interrupted(OSError) as error:
            if isinstance(error, TimeoutError):
                return False
    return False


def _rejoin_timeout(give_up: float) -> float:
    """Seconds for a part of it in which nobody is late any more."""
    return max(0.0, min(REJOIN_TIMEOUT_S, give_up - time.monotonic()))


def _follow(old: LinkedGroup, place: Place, secret: bytes, name: str, give_up: float) -> Group:
    hello = {"rank": old.rank, "alive": old._alive_here()}
    why = f"rank {old.rank} can't go on in a smaller group: rank 0, which says who is left, can't be reached"
    while True:
        within = _rejoin_timeout(give_up)
        try:
            sock, _ = reach(place.at, secret, hello, why=why, within=within, tls=False)
            break
        except unless_interrupted(OSError) as error:
            late = _is_late(old, [0], give_up)
            if time.monotonic() > give_up:
                raise TimeoutError(f"shrink of {old._title()} was not done in time: {error}") from None
            if not late:
                raise GroupError(f"{error}; {REMEDY}") from None
    with contextlib.closing(Participant(sock, "rank 0")) as participant:
        # Rank 0 waits for who is late, however long; when it dies, the connection ends.
        sock.settimeout(None if give_up == math.inf else max(0.001, give_up - time.monotonic()))
        try:
            left = participant.hear()
        except unless_interrupted(TimeoutError) as error:
            raise TimeoutError(f"shrink of {old._title()} was not done in time: {error}") from None
        within = _rejoin_timeout(give_up)
        sock.settimeout(max(0.001, min(2 * REJOIN_TIMEOUT_S, give_up - time.monotonic())))
        way = Way(secret, route_to(split(place.at)[0]))
        return meet_by(participant.gather, left.index(old.rank), way, within, name, place.host)
