"""How processes on several hosts become members of one group.

They need a way to tell each other a few words beforehand: all come to rank 0, at an address that everybody
knows, and prove a secret. Then those that can open the same memory, as :func:`this_host` says, meet there.
Each part's leader connects to those of the other parts.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import time
from collections.abc import Callable
from typing import Any

from flowchan.collective.countdown import Left, countdown
from flowchan.collective.far_lanes import FarLanes, Way
from flowchan.collective.group import Group
from flowchan.collective.linked import LinkedGroup
from flowchan.collective.links import Links
from flowchan.collective.meeting import always, meet
from flowchan.collective.shared import SharedGroup
from flowchan.errors import GroupError
from flowchan.transport.circle import LATE, Circle, Over
from flowchan.transport.door import Door
from flowchan.transport.interrupts import unless_interrupted
from flowchan.transport.tcp import listen

WITHIN = 60.0
Gather = Callable[[Any], list[Any]]
"""Tells all members a value that JSON has, and gives what all have told, by rank."""


class Middle:
    """Rank 0's of a circle: passes on what the others and it tell each other, until ``give_up``."""

    def __init__(self, circle: Circle, give_up: float) -> None:
        self._circle, self._give_up = circle, give_up

    def gather(self, value: Any) -> list[Any]:
        """See :data:`Gather`. Raises :class:`Over` when one of them leaves, ``TimeoutError``."""
        told = self._circle.say(0, json.dumps(value).encode() + b"\n")
        while not told:
            told = self._look()
            if self._circle.over:
                raise Over(self._circle.over)
        return list(json.loads(told))

    def _look(self) -> bytes:
        """What all have said, if that is heard next."""
        waiting, ranks = select.poll(), {sock.fileno(): rank for rank, sock in self._circle.sockets.items()}
        for fd in ranks:
            waiting.register(fd, select.POLLIN)
        ready = waiting.poll(max(0.0, self._give_up - time.monotonic()) * 1000)
        if not ready:
            raise TimeoutError(LATE)
        return [self._circle.hear(ranks[fd]) for fd, _ in ready][-1]

    def close(self) -> None:
        self._circle.close()


class Rendezvous(Middle):
    """Rank 0 listens at ``at`` until all others have come. Raises ``TimeoutError`` naming who has not come,
    :class:`GroupError` when two come as one."""

    def __init__(self, at: str, secret: bytes, size: int, timeout: float) -> None:
        super().__init__(Circle(size), time.monotonic() + timeout)
        self._size = size
        try:
            with Door(listen(at), secret, {"rank": 0}) as door:
                while missing := sorted(set(range(1, size)) - set(self._circle.sockets)):
                    self._welcome(door, missing)
        except BaseException:
            self.close()
            raise

    def _welcome(self, door: Door, missing: list[int]) -> None:
        try:
            sock, hello = door.accept(max(0.0, self._give_up - time.monotonic()))
        except unless_interrupted(TimeoutError):
            raise TimeoutError(f"of {self._size} members, these have not come in time: {missing}") from None
        rank, size = hello.get("rank"), hello.get("size")
        if size == self._size and rank in missing:
            self._circle.come(rank, sock)
            return
        self._circle.come(self._size, sock)
        self._circle.end(
            f"rank 0 is one of {self._size} members, rank {rank} one of {size}"
            if size != self._size
            else f"two processes have come as rank {rank}"
        )
        while self._circle.sockets:  # until they have heard it
            self._look()
        raise GroupError(self._circle.over)


def meet_by(
    gather: Gather,
    rank: int,
    way: Way,
    timeout: float,
    name: str = "",
    host: str | None = None,
    wanted: Callable[[], bool] = always,
) -> Group:
    """The group of all who ``gather``, which is any way to tell each other a few words, as long as it is
    ``wanted``."""
    left = countdown(timeout)
    said = gather([host or this_host(), secrets.token_hex(16)])
    by_host: dict[str, list[int]] = {}
    for other, (place, _) in enumerate(said):
        by_host.setdefault(place, []).append(other)
    hosts = list(by_host.values())
    (mine,) = (number for number, ranks in enumerate(hosts) if rank in ranks)
    job = f"{said[0][1]} {mine}"
    title = name if len(hosts) == 1 else name or f"of {len(said)} over {len(hosts)} hosts"
    node = meet(job, hosts[mine].index(rank), len(hosts[mine]), left() or 0.0, title, wanted)
    return linked(node, hosts, mine, gather, way, left, name)


def linked(
    node: SharedGroup,
    hosts: list[list[int]],
    host: int,
    gather: Gather,
    way: Way,
    left: Left,
    name: str,
) -> Group:
    """A group of these parts; of one, that part. Who does not connect within ``WITHIN`` seconds is late, also
    where there is no limit."""
    if len(hosts) == 1:
        gather(None)
        return node
    rank = hosts[host][node.rank]
    door = way.door({"rank": rank})
    try:
        lanes = FarLanes(rank, door, gather(door.address), way)
        limit = left()
        links = connect(lanes, hosts, host, WITHIN if limit is None else limit) if node.rank == 0 else None
    except BaseException:
        door.close()
        raise

    def link_up(
        whole: LinkedGroup, part: SharedGroup | None, key: Any, name: str, timeout: float | None
    ) -> Group | None:
        return within(whole, part, key, way, name, countdown(timeout))

    return LinkedGroup(node, hosts, host, links, lanes, link_up, name)


def connect(lanes: FarLanes, hosts: list[list[int]], host: int, timeout: float) -> Links:
    """A leader dials those of the hosts before its own, and lets in those of the hosts behind."""
    give_up = time.monotonic() + timeout
    with contextlib.ExitStack() as stack:
        sockets = {}
        for other in range(host):
            sockets[other] = stack.enter_context(lanes.dial(hosts[other][0], {"host": host}, give_up))
        while missing := set(range(len(hosts))) - {host, *sockets}:
            sock, hello = lanes.let_in([hosts[other][0] for other in missing], give_up, "connecting")
            if "host" in hello:
                sockets[hello["host"]] = stack.enter_context(sock)
            else:
                lanes.adopt(sock, hello)  # it is quick, and has sent us something already
        links = Links(dict(sorted(sockets.items())), {other: hosts[other][0] for other in sockets}, host)
        if len(hosts) > 2:
            links.measure(max(0.0, give_up - time.monotonic()))
        stack.pop_all()
    return links


def within(
    whole: LinkedGroup, part: SharedGroup | None, key: Any, way: Way, name: str, left: Left
) -> Group | None:
    """The group of all members of ``whole`` that have an equal key. ``part``: those of this host."""
    keys = whole._gathered(key, left())
    mates = [rank for rank, other in enumerate(keys) if other == key]

    def gather(value: Any) -> list[Any]:
        said = whole._gathered(value, left())
        return [said[rank] for rank in mates]

    if part is None:
        gather(None)
        return None
    hosts = [[mates.index(rank) for rank in of_host if rank in mates] for of_host in whole._hosts]
    host = sum(map(bool, hosts[: whole._host]))
    return linked(part, [ranks for ranks in hosts if ranks], host, gather, way, left, name)


def this_host() -> str:
    """Which boot of which machine, which namespaces, and which user: a Unix socket leads no farther than that
    of its network, a process's number says nothing outside its own, and no user opens another one's
    memory."""
    with open("/proc/sys/kernel/random/boot_id") as boot:
        paths = (f"/proc/self/ns/{kind}" for kind in ("net", "pid", "user"))
        spaces = (os.stat(path).st_ino if os.path.exists(path) else 0 for path in paths)  # or all have one
        return "/".join([boot.read().strip(), *map(str, spaces), str(os.getuid())])
