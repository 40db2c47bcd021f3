"""How processes on several hosts become members of one group.

They need a way to tell each other a few words beforehand: all come to rank 0, at an address that everybody
knows, and prove a secret. Then those of one host meet there; that they can is what makes it one host. Each
part's leader connects to those of the other parts.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable
from typing import Any, NoReturn

from flowchan.collective.far_lanes import FarLanes
from flowchan.collective.group import Group
from flowchan.collective.linked import LinkedGroup
from flowchan.collective.links import Links
from flowchan.collective.meeting import meet
from flowchan.collective.shared import SharedGroup
from flowchan.errors import GroupError
from flowchan.transport.dialling import reach
from flowchan.transport.door import Door
from flowchan.transport.tcp import joined, listen, route_to, split

Gather = Callable[[Any], list[Any]]
"""Tells all members a value that JSON has, and gives what all have told, by rank."""


class Rendezvous:
    """Rank 0 listens at ``at``; the others dial. Raises ``TimeoutError`` naming who has not come,
    :class:`GroupError` when two come as one."""

    def __init__(self, at: str, secret: bytes, rank: int, size: int, timeout: float) -> None:
        self._rank, self._size = rank, size
        self._give_up = time.monotonic() + timeout
        self._ends = contextlib.ExitStack()
        self._files: dict[int, Any] = {}
        try:
            if rank == 0:
                self._welcome(at, secret)
            else:
                why = f"rank {rank} of {size} has waited in vain for rank 0"
                hello = {"rank": rank, "size": size}
                sock, _ = reach(at, secret, hello, why=why, within=timeout, tls=False)
                self._keep(0, sock)
        except BaseException:
            self.close()
            raise

    def _welcome(self, at: str, secret: bytes) -> None:
        with Door(listen(at), secret, {"rank": 0}) as door:
            while len(self._files) < self._size - 1:
                try:
                    sock, hello = door.accept(max(0.0, self._give_up - time.monotonic()))
                except TimeoutError:
                    missing = sorted(set(range(1, self._size)) - set(self._files))
                    raise TimeoutError(
                        f"of {self._size} members, these have not come in time: {missing}"
                    ) from None
                rank, size = hello.get("rank"), hello.get("size")
                if (
                    size == self._size
                    and isinstance(rank, int)
                    and 0 < rank < size
                    and rank not in self._files
                ):
                    self._keep(rank, sock)
                    continue
                self._keep(self._size, sock)
                self._refuse(
                    f"rank 0 is one of {self._size} members, rank {rank} one of {size}"
                    if size != self._size
                    else f"two processes have come as rank {rank}"
                )

    def _refuse(self, reason: str) -> NoReturn:
        """Tells all that have come. Closing a connection with words unread would drop this one, too."""
        self._say({"error": reason})
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.readline()
        raise GroupError(reason)

    def _keep(self, rank: int, sock: Any) -> None:
        sock.settimeout(max(0.001, self._give_up - time.monotonic()))
        self._ends.callback(sock.close)
        self._files[rank] = self._ends.enter_context(sock.makefile("rw"))

    def _say(self, word: Any) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.write(json.dumps(word) + "\n")
                file.flush()

    def gather(self, value: Any) -> list[Any]:
        """See :data:`Gather`."""
        if self._rank:
            self._say(value)
            said = self._hear(0)
            if isinstance(said, dict):
                raise GroupError(said["error"])
            return list(said)
        found = [value, *(self._hear(rank) for rank in range(1, self._size))]
        self._say(found)
        return found

    def _hear(self, rank: int) -> Any:
        try:
            line = self._files[rank].readline()
        except TimeoutError as error:
            raise TimeoutError(f"rank {rank} has said nothing while the members met") from error
        except OSError:
            line = ""
        if not line:
            raise GroupError(f"rank {rank} ended while the members met")
        return json.loads(line)

    def close(self) -> None:
        self._ends.close()


def meet_at(
    at: str, secret: bytes, rank: int, size: int, timeout: float, name: str = "", host: str | None = None
) -> Group:
    """This process's member of the group of all that come to the address ``at`` with the secret. ``host``:
    what is told of which one this is."""
    where, _ = split(at)
    rendezvous = Rendezvous(at, secret, rank, size, timeout)
    try:
        listen_at = where if rank == 0 else route_to(where)
        return meet_by(rendezvous.gather, rank, secret, listen_at, timeout, name, host)
    finally:
        rendezvous.close()


def meet_by(
    gather: Gather,
    rank: int,
    secret: bytes,
    listen_at: str,
    timeout: float,
    name: str = "",
    host: str | None = None,
) -> Group:
    """The same by any way to tell each other a few words. A leader listens at ``listen_at``, for those that
    know the secret."""
    said = gather([host or this_host(), secrets.token_hex(16)])
    by_host: dict[str, list[int]] = {}
    for other, (place, _) in enumerate(said):
        by_host.setdefault(place, []).append(other)
    hosts = list(by_host.values())
    (mine,) = (number for number, ranks in enumerate(hosts) if rank in ranks)
    job = f"{said[0][1]} {mine}"
    title = name if len(hosts) == 1 else name or f"of {len(said)} over {len(hosts)} hosts"
    node = meet(job, hosts[mine].index(rank), len(hosts[mine]), timeout, title)
    return linked(node, hosts, mine, gather, secret, listen_at, timeout, name)


def linked(
    node: SharedGroup,
    hosts: list[list[int]],
    host: int,
    gather: Gather,
    secret: bytes,
    listen_at: str,
    timeout: float,
    name: str,
) -> Group:
    """A group of these parts; of one, that part."""
    if len(hosts) == 1:
        gather(None)
        return node
    rank = hosts[host][node.rank]
    door = Door(listen(joined((listen_at, 0))), secret, {"rank": rank})
    try:
        lanes = FarLanes(rank, door, gather(door.address), secret)
        links = connect(lanes, hosts, host, secret, timeout) if node.rank == 0 else None
    except BaseException:
        door.close()
        raise

    def link_up(
        whole: LinkedGroup, part: SharedGroup | None, key: Any, name: str, timeout: float | None
    ) -> Group | None:
        return within(whole, part, key, secret, listen_at, name, 60.0 if timeout is None else timeout)

    return LinkedGroup(node, hosts, host, links, lanes, link_up, name)


def connect(lanes: FarLanes, hosts: list[list[int]], host: int, secret: bytes, timeout: float) -> Links:
    """A leader dials those of the hosts before its own, and lets in those of the hosts behind."""
    give_up = time.monotonic() + timeout
    with contextlib.ExitStack() as stack:
        sockets = {}
        for other in range(host):
            leader = hosts[other][0]
            why = f"the connection to rank {leader} can't be made"
            left = max(0.001, give_up - time.monotonic())
            sock, _ = reach(lanes.addresses[leader], secret, {"host": host}, why=why, within=left, tls=False)
            sockets[other] = stack.enter_context(sock)
        while len(sockets) < len(hosts) - 1:
            sock, hello = lanes.door.accept(max(0.0, give_up - time.monotonic()))
            if "host" in hello:
                sockets[hello["host"]] = stack.enter_context(sock)
            else:
                lanes.adopt(sock, hello)  # it is quick, and has sent us something already
        stack.pop_all()
    return Links(dict(sorted(sockets.items())), {other: hosts[other][0] for other in sockets})


def within(
    whole: LinkedGroup,
    part: SharedGroup | None,
    key: Any,
    secret: bytes,
    listen_at: str,
    name: str,
    timeout: float,
) -> Group | None:
    """The group of all members of ``whole`` that have an equal key. ``part``: those of this host."""
    keys = whole._gathered(key, timeout)
    ranks = [rank for rank, other in enumerate(keys) if other == key and key is not None]
    old = [[rank for rank in of_host if rank in ranks] for of_host in whole._hosts]
    hosts = [[ranks.index(rank) for rank in of_host] for of_host in old if of_host]

    def gather(value: Any) -> list[Any]:
        said = whole._gathered(value, timeout)
        return [said[rank] for rank in ranks]

    if part is None:
        whole._gathered(None, timeout)
        return None
    mine = [of_host for of_host in old if of_host].index(
        [rank for rank in whole._hosts[whole._host] if rank in ranks]
    )
    return linked(part, hosts, mine, gather, secret, listen_at, timeout, name)


def this_host() -> str:
    """Which boot of which machine, and which network namespace: a Unix socket leads no farther."""
    with open("/proc/sys/kernel/random/boot_id") as boot:
        return f"{boot.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
