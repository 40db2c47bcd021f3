"""Form a group at an address that all members know. After a failure, let the survivors meet there again.

When a group across hosts shrinks, rank 0 decides which members remain. Rank 0 listens on the address again,
and waits for all members known to be alive. Each member that arrives reports which members on its host are
alive, according to their shared memory. After ``REJOIN_TIMEOUT_S`` seconds, rank 0 tries to connect to the
members that are still missing. A member that accepts the connection is merely late, so rank 0 waits longer
for it. Finally, rank 0 sends the list of survivors to all that have arrived, and they form a group as usual.
If another member dies before the new group is complete, all survivors start over.

In a partitioned network, only the part with rank 0 continues, because only rank 0 decides. A member that
cannot reach rank 0 fails, and if rank 0 is gone, all members fail. While rank 0 is merely late, the other
members wait.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import logging
import math
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from flowchan.collective.connector import Connector
from flowchan.collective.deadline import RemainingTime, countdown
from flowchan.collective.group import Group
from flowchan.collective.many_hosts import LinkedGroup
from flowchan.collective.one_host import Gather
from flowchan.collective.rendezvous.forming import meet_by
from flowchan.errors import GroupError, MemberDied
from flowchan.transport.dial import reach
from flowchan.transport.interrupts import is_interrupt, unless_interrupted
from flowchan.transport.listener import AuthenticatedListener
from flowchan.transport.rendezvous import Coordinator, Participant, RendezvousEnded
from flowchan.transport.tcp import Listener, listen, split

REJOIN_TIMEOUT_S = 10.0
"""Seconds to wait for missing survivors before rank 0 tries to connect to them.

The rendezvous of the members that have arrived has the same time limit.
"""
POLL_INTERVAL_S = 0.02


log = logging.getLogger("flowchan.collective")

Publish = Callable[[str], object]
"""Tells the other members the address of rank 0."""


def meet_at(
    at: str,
    secret: bytes,
    rank: int | None,
    size: int,
    timeout: float,
    name: str = "",
    host: str | None = None,
    publish: Publish | None = None,
) -> Group:
    """Return this process's member of the group that meets at the address ``at`` with this secret.

    If ``rank`` is None, the order of arrival decides: the first member to listen on ``at`` is rank 0.
    ``host`` identifies the host (default: detected). Rank 0 calls ``publish`` once it listens. Raise
    ``ValueError`` if the other members cannot learn which port rank 0 has picked.
    """
    _, port = split(at)
    if port == 0 and size > 1 and (rank != 0 or publish is None):
        remedy = "pass the address that rank 0 publishes" if rank != 0 else "pass publish=, or a free port"
        raise ValueError(f"group: at must have a port that all members know, got {at!r}; {remedy}")
    remaining = countdown(timeout)

    def form(gather: Gather, own: int, connector: Connector) -> Group:
        return meet_by(gather, own, connector, remaining() or 0.0, name, host)

    try:
        if (first := _first_listener(rank, at, remaining)) is not None:
            ours = split(first.address)[0]
            with contextlib.closing(Coordinator(size, time.monotonic() + timeout)) as coordinator:
                with AuthenticatedListener(first, secret, {"rank": 0}) as listener:
                    at = listener.address if port == 0 else at
                    log.info("rank 0 of %d waits for the other members at %s", size, at)
                    if publish is not None:
                        publish(at)
                    coordinator.assemble(listener.accept)
                met = form(coordinator.gather, 0, Connector(secret, ours))
        else:
            sock, ours = _reached(at, secret, rank, size, remaining() or 0.0)
            sock.settimeout(max(0.001, remaining() or 0.0))
            with contextlib.closing(Participant(sock, "rank 0")) as participant:
                own = participant.receive() if rank is None else rank
                met = form(participant.gather, own, Connector(secret, ours))
    except RendezvousEnded as ended:
        raise GroupError(str(ended)) from None
    return Place(at, secret, host).of(met)


def _first_listener(rank: int | None, at: str, remaining: RemainingTime) -> Listener | None:
    """Return the listener of rank 0, or ``None`` on the other members."""
    if rank:
        return None
    try:
        return listen(at, remaining())
    except OSError as error:
        if rank is None and error.errno == errno.EADDRINUSE:  # the member that listens here is rank 0
            return None
        # The address belongs to another host, or its name cannot be resolved yet.
        if rank is None and error.errno == errno.EADDRNOTAVAIL and remaining():
            return None
        raise


def _reached(
    at: str, secret: bytes, rank: int | None, size: int, timeout: float
) -> tuple[socket.socket, str]:
    """Return a connection to rank 0, and the IP address of this host in the connection."""
    why = f"{'a member' if rank is None else f'rank {rank}'} of {size} timed out: rank 0 has not answered"
    try:
        sock, _, ours = reach(at, secret, {"rank": rank, "size": size}, why=why, within=timeout, tls=False)
        return sock, ours
    except unless_interrupted(OSError) as error:
        raise TimeoutError(str(error)) from None


@dataclass(frozen=True)
class Place:
    """Address where a group met, and where its survivors can meet again.

    ``number`` is the number of times that the original group has shrunk.
    """

    at: str
    secret: bytes = field(repr=False)
    host: str | None
    number: int = 0

    def of(self, group: Group) -> Group:
        """Let the survivors of ``group`` meet here again, and return the group."""
        if isinstance(group, LinkedGroup):
            group._meet_again = self._meet_again
        return group

    def _meet_again(self, old: LinkedGroup, name: str, give_up: float) -> Group:
        """Return a group of the survivors of ``old``, which has failed."""
        number = self.number + 1
        # The new secret keeps out members that are still in another rendezvous.
        secret = hmac.digest(self.secret, f"again {number}".encode(), "sha256")
        meet = _lead if old.rank == 0 else _follow
        for _ in range(old.size):
            try:
                met = meet(old, self, secret, name, give_up)
                if met._has_met(_rejoin_timeout(give_up)):
                    return replace(self, number=number).of(met)
            except (RendezvousEnded, MemberDied):
                continue
            except TimeoutError as error:  # a member that had arrived earlier did not arrive again in time
                if is_interrupt(error) or time.monotonic() >= give_up:
                    raise
        raise GroupError(
            f"{old!r} cannot be shrunk: a survivor died in each of {old.size} attempts; {REMEDY}"
        )


REMEDY = "create a new group, or run a graph with an elastic gang"


def _lead(old: LinkedGroup, place: Place, secret: bytes, name: str, give_up: float) -> Group:
    came: dict[int, socket.socket] = {}
    try:
        with AuthenticatedListener(_listener(old, place.at, give_up), secret, {"rank": 0}) as listener:
            ours = split(listener.address)[0]
            _let_in(old, listener, came, give_up)
        survivors = sorted([0, *came])
        within = _rejoin_timeout(give_up)
        coordinator = Coordinator(len(survivors), time.monotonic() + within)
        for rank, sock in came.items():
            coordinator.come(survivors.index(rank), sock)
        coordinator.tell(survivors)
        connector = Connector(secret, ours)
        return meet_by(coordinator.gather, 0, connector, within, name, place.host)
    finally:
        for sock in came.values():
            sock.close()


def _listener(old: LinkedGroup, at: str, give_up: float) -> Listener:
    try:
        return listen(at, _rejoin_timeout(give_up))
    except unless_interrupted(OSError) as error:
        if time.monotonic() >= give_up:
            raise TimeoutError(f"shrink of {old._title()} timed out: {error}") from None
        raise GroupError(f"{old!r} cannot be shrunk: {error}; {REMEDY}") from None


def _let_in(
    old: LinkedGroup, listener: AuthenticatedListener, came: dict[int, socket.socket], give_up: float
) -> None:
    """Accept members until all possible survivors have arrived."""
    alive: dict[int, list[int]] = {}
    patient = time.monotonic() + REJOIN_TIMEOUT_S
    while True:
        alive[old._host] = old._local_alive()
        expected = {rank for ranks in alive.values() for rank in ranks} - {0}
        now = time.monotonic()
        if len(alive) == len(old._hosts) and expected <= came.keys():
            return
        if now > patient:
            missing = [[rank for rank in ranks if rank and rank not in came] for ranks in old._hosts]
            if not any(_is_late(old, ranks, give_up) for ranks in missing) and time.monotonic() < give_up:
                return
            patient = time.monotonic() + REJOIN_TIMEOUT_S
        if (remaining := give_up - time.monotonic()) <= 0:
            late = sorted(expected - came.keys())
            names = f"ranks {late}" if late else "the members on other hosts"
            raise TimeoutError(f"shrink of {old._title()} timed out: {names} did not arrive")
        try:
            sock, hello = listener.accept(min(POLL_INTERVAL_S, remaining))
        except unless_interrupted(TimeoutError):
            continue
        rank = hello["rank"]
        if rank in came:
            came[rank].close()  # this member has connected again; only its new connection counts
        came[rank] = sock
        alive[old._host_of(rank)] = hello["alive"]


def _is_late(old: LinkedGroup, ranks: list[int], give_up: float) -> bool:
    """Return whether any of these members still listens for the old group. All of them are on one host.

    A member that still listens is alive and merely late. If an attempt to connect times out, the host counts
    as unreachable.
    """
    for rank in ranks:
        try:
            within = max(0.0, min(1.0, give_up - time.monotonic()))
            old._remote.connector.dial(old._remote.addresses[rank], within).close()
            return True
        except unless_interrupted(OSError) as error:
            if isinstance(error, TimeoutError):
                return False
    return False


def _rejoin_timeout(give_up: float) -> float:
    """Return the timeout of a step in seconds: at most ``REJOIN_TIMEOUT_S``, and not beyond ``give_up``."""
    return max(0.0, min(REJOIN_TIMEOUT_S, give_up - time.monotonic()))


def _follow(old: LinkedGroup, place: Place, secret: bytes, name: str, give_up: float) -> Group:
    hello = {"rank": old.rank, "alive": old._local_alive()}
    why = (
        f"rank {old.rank} cannot join the smaller group: rank 0, which decides which members remain, "
        "has not answered"
    )
    while True:
        within = _rejoin_timeout(give_up)
        try:
            sock, _, ours = reach(place.at, secret, hello, why=why, within=within, tls=False)
            break
        except unless_interrupted(OSError) as error:
            late = _is_late(old, [0], give_up)
            if time.monotonic() > give_up:
                raise TimeoutError(f"shrink of {old._title()} timed out: {error}") from None
            if not late:
                raise GroupError(f"{error}; {REMEDY}") from None
    with contextlib.closing(Participant(sock, "rank 0")) as participant:
        # If the call has no time limit, wait as long as rank 0 waits for late members, possibly forever. If
        # rank 0 dies, the connection ends.
        sock.settimeout(None if give_up == math.inf else max(0.001, give_up - time.monotonic()))
        try:
            survivors = participant.receive()
        except unless_interrupted(TimeoutError) as error:
            raise TimeoutError(f"shrink of {old._title()} timed out: {error}") from None
        within = _rejoin_timeout(give_up)
        sock.settimeout(max(0.001, min(2 * REJOIN_TIMEOUT_S, give_up - time.monotonic())))
        connector = Connector(secret, ours)
        return meet_by(participant.gather, survivors.index(old.rank), connector, within, name, place.host)
