"""How the leaders of a group's hosts combine arrays: small ones each of them whole, of large ones a slice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flowchan import _core
from flowchan.collective import arrays
from flowchan.collective.countdown import Left
from flowchan.collective.links import Links
from flowchan.collective.operations import (
    ALLTOALL,
    BARRIER,
    BROADCAST,
    COMBINING,
    NAMES,
    REDUCE_SCATTER,
    SCATTER,
)
from flowchan.collective.steps import Call

WHOLE, WHOLE_OF_TWO = 64 * 1024, 1 << 20
"""Bytes up to which leaders give each other all they have; of more, each combines a slice for all. Two
send as much either way, and the first way is one step in place of two."""
BLOCK = 8 << 20
"""Bytes that are sliced at a time: what comes is combined while it is still in the caches."""
_BETWEEN_HOSTS = {
    NAMES[BARRIER]: "a word of each",
    NAMES[BROADCAST]: "what the root has",
    NAMES[SCATTER]: "to each what is for it",
    NAMES[ALLTOALL]: "to each what is for it",
}


def whole(hosts: int) -> int:
    """Up to how many bytes so many hosts combine whole arrays."""
    return WHOLE_OF_TWO if hosts == 2 else WHOLE


def shown(operation: str, size: int | None, hosts: int) -> str:
    """What goes over the connections, where that is not along a tree. ``size``: of arrays, in bytes."""
    if operation in (*COMBINING, NAMES[REDUCE_SCATTER]) and size is not None and size > whole(hosts):
        return "a slice for each"
    return _BETWEEN_HOSTS.get(operation, "all that each has")


def combine(links: Links, call: Call, total: Any, op: str, left: Left) -> None:
    """``total``, which holds what this host has, becomes the combination of all hosts'."""
    flat, size = total.reshape(-1), int(total.nbytes)
    if size <= whole(len(links.sockets) + 1):
        _add_others(links, call, lambda _: flat, flat, op, left)
        return
    length = BLOCK * len(flat) // size
    for at in range(0, len(flat), length):
        _combine_slices(links, call, flat[at : at + length], op, left)


def _combine_slices(links: Links, call: Call, flat: Any, op: str, left: Left) -> None:
    hosts, count = len(links.sockets) + 1, len(flat)
    slices = [flat[count * i // hosts : count * (i + 1) // hosts] for i in range(hosts)]
    mine = slices[links.host]
    _add_others(links, call, slices.__getitem__, mine, op, left)
    links.swap(
        call,
        lambda _: [arrays.memory(mine)],
        lambda host: arrays.memory(slices[host]),
        left(),
    )


def _add_others(links: Links, call: Call, out: Callable[[int], Any], mine: Any, op: str, left: Left) -> None:
    """Gives each other host ``out(host)``, and combines ``mine`` with what they give, in the order of the
    hosts."""
    found = {host: arrays.empty_like(mine) for host in links.sockets}
    links.swap(
        call,
        lambda host: [arrays.memory(out(host))],
        lambda host: arrays.memory(found[host]),
        left(),
    )
    _core._combine(mine, [found.get(host, mine) for host in range(len(found) + 1)], op)
