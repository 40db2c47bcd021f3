"""Form a group of processes on several hosts.

The processes exchange a few short values with a :data:`Gather` function. Processes that can open the same
memory share it; :func:`this_host` recognises them. The leader of each host connects to all other leaders.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from typing import Any

from flowchan.collective.connector import Connector
from flowchan.collective.deadline import RemainingTime, countdown
from flowchan.collective.group import Group
from flowchan.collective.leader_links import Links
from flowchan.collective.many_hosts import LinkedGroup
from flowchan.collective.messages_remote import RemotePeers
from flowchan.collective.one_host import Gather, SharedGroup, share
from flowchan.errors import GroupError

WITHIN = 60.0


def meet_by(
    gather: Gather, rank: int, connector: Connector, timeout: float, name: str = "", host: str | None = None
) -> Group:
    """Form a group of all processes that ``gather`` connects, and return this process's member.

    ``host`` identifies this host (default: detected).
    """
    remaining = countdown(timeout)
    by_host: dict[str, list[int]] = {}
    for other, place in enumerate(gather(host or this_host())):
        by_host.setdefault(place, []).append(other)
    hosts = list(by_host.values())
    (own_host,) = (number for number, ranks in enumerate(hosts) if rank in ranks)
    size = sum(map(len, hosts))
    title = name if len(hosts) == 1 else name or f"of {size} over {len(hosts)} hosts"
    node = share(gather, rank, hosts[own_host], title)
    assert node is not None
    try:
        return linked(node, hosts, own_host, gather, connector, remaining, name)
    except BaseException:
        node._abandon()
        raise


def linked(
    node: SharedGroup,
    hosts: list[list[int]],
    host: int,
    gather: Gather,
    connector: Connector,
    remaining: RemainingTime,
    name: str,
) -> Group:
    """Connect the nodes on several hosts into a group; return a single node unchanged.

    Members must connect within ``WITHIN`` seconds, even if the call itself has no time limit.
    """
    if len(hosts) == 1:
        gather(None)
        return node
    rank = hosts[host][node.rank]
    listener = connector.listen({"rank": rank})
    try:
        transports, addresses = zip(*gather([connector.transport_name, listener.address]), strict=True)
        _check_transports(transports)
    except BaseException:
        listener.close()
        raise
    remote, limit = RemotePeers(rank, listener, addresses, connector), remaining()
    try:
        links = connect(remote, hosts, host, WITHIN if limit is None else limit) if node.rank == 0 else None
    except BaseException:
        remote.close(wait=False)
        raise

    def link_up(
        parent: LinkedGroup, part: SharedGroup | None, key: Any, name: str, timeout: float | None
    ) -> Group | None:
        return within(parent, part, key, connector, name, countdown(timeout))

    return LinkedGroup(node, hosts, host, links, remote, link_up, name)


def _check_transports(names: Sequence[str]) -> None:
    """Raise an error on all members unless all use the same transport."""
    if len(set(names)) > 1:
        registered = ", ".join(f"rank {rank} {name!r}" for rank, name in enumerate(names))
        raise GroupError(
            f"group: all members must use the same transport, got {registered}; call register_transport on "
            "all of them"
        )


def connect(remote: RemotePeers, hosts: list[list[int]], host: int, timeout: float) -> Links:
    """Connect this host's leader to all others: dial earlier hosts, and accept later ones."""
    give_up = time.monotonic() + timeout
    with contextlib.ExitStack() as stack:
        sockets = {}
        for other in range(host):
            sockets[other] = stack.enter_context(remote.peer(hosts[other][0]).connect_leader(host, give_up))
        while missing := set(range(len(hosts))) - {host, *sockets}:
            other, sock = remote.next_leader([hosts[one][0] for one in missing], give_up)
            sockets[other] = stack.enter_context(sock)
        links = Links(dict(sorted(sockets.items())), {other: hosts[other][0] for other in sockets}, host)
        if len(hosts) > 2:
            links.measure(max(0.0, give_up - time.monotonic()))
        stack.pop_all()
    return links


def within(
    parent: LinkedGroup,
    part: SharedGroup | None,
    key: Any,
    connector: Connector,
    name: str,
    remaining: RemainingTime,
) -> Group | None:
    """Return the group of all members of ``parent`` with this ``key``.

    ``part`` is the subgroup of these members on this host. If a member cannot connect, all members of
    ``parent`` raise its error and close their parts.
    """
    made: Group | None = part
    failed: Exception | None = None
    try:
        keys = parent._gathered(key, remaining())
        try:
            made = _connected(parent, part, [other == key for other in keys], connector, name, remaining)
        except Exception as error:
            failed = error
        errors = parent._gathered(failed and f"rank {parent.rank}: {failed}", remaining())
        if texts := [text for text in errors if text]:
            raise GroupError(f"split: {'; '.join(texts)}") from failed
    except BaseException:
        if made is not None:
            made._abandon()
        raise
    return made


def _connected(
    parent: LinkedGroup,
    part: SharedGroup | None,
    belongs: Sequence[bool],
    connector: Connector,
    name: str,
    remaining: RemainingTime,
) -> Group | None:
    """Connect ``part`` to the parts on the other hosts.

    ``belongs`` lists, for each member of ``parent``, whether it joins.
    """

    def gather(value: Any) -> list[Any]:
        return [
            found for found, joins in zip(parent._gathered(value, remaining()), belongs, strict=True) if joins
        ]

    if part is None:
        gather(None)
        return None
    members = [rank for rank, joins in enumerate(belongs) if joins]
    hosts = [[members.index(rank) for rank in of_host if rank in members] for of_host in parent._hosts]
    host = sum(map(bool, hosts[: parent._host]))
    return linked(part, [ranks for ranks in hosts if ranks], host, gather, connector, remaining, name)


def this_host() -> str:
    """Return a text that identifies this boot of this machine, and this process's namespaces and user.

    Processes can share memory only if all of these are equal. A Unix socket can be reached only in its
    network namespace, and a process ID is valid only in its PID namespace. Start times, which identify
    processes, differ between time namespaces. A user cannot open another user's memory.
    """
    with open("/proc/sys/kernel/random/boot_id") as boot:
        paths = (f"/proc/self/ns/{kind}" for kind in ("net", "pid", "user", "time"))
        # 0 stands for a kind of namespace that the kernel does not support. All processes then count as being
        # in the same namespace of this kind.
        spaces = (os.stat(path).st_ino if os.path.exists(path) else 0 for path in paths)
        return "/".join([boot.read().strip(), *map(str, spaces), str(os.getuid())])
