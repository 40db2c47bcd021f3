"""Trees over the hosts of a group: the way from one to all others, and from all to one.

When the hosts' leaders have connected they measure, of each two, how long one byte takes and how long
``REFERENCE`` bytes. From these times a tree is grown by the greedy rule "earliest completion first" of Bhat,
Raghavendra and Prasanna, Efficient collective communication in distributed heterogeneous systems, J. Parallel
Distrib. Comput. 63 (2003). Where all links are alike it is a binomial tree if sending takes the most time,
and a star if the way does. A link that is much slower than the others is left out.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

REFERENCE = 256 * 1024
"""Bytes of the message for which a tree is grown; for small ones it is the way of the first byte."""
LEAST = 1e-4
"""Seconds, below which times say more about what else runs than about the link."""
HARDLY = 1.25
"""By how much a message may arrive later than the first one."""
_TIMES = struct.Struct("<dd")


@dataclass(frozen=True)
class Times:
    """Of a connection, in seconds: until a byte is there, and for which sending ``REFERENCE`` bytes keeps the
    sender."""

    delay: float
    sending: float

    @property
    def bytes_per_second(self) -> float:
        return REFERENCE / self.sending


@dataclass(frozen=True)
class Tree:
    """By hosts: whom each has what it gets from, and whom it passes it on to, in the order of sending."""

    root: int
    parent: dict[int, int]
    children: dict[int, list[int]]

    def shown(self, names: Sequence[object]) -> str:
        """As ``0 to 1 and 2, 2 to 3``, each host by its name."""
        passing = {host: children for host, children in self.children.items() if children}
        return ", ".join(
            f"{names[host]} to {' and '.join(str(names[child]) for child in children)}"
            for host, children in passing.items()
        )


Table = dict[tuple[int, int], Times]
"""By two hosts, in either order; equal on all leaders."""


def times_between(quick: float, large: float) -> Times:
    """``quick`` and ``large``: what one byte and ``REFERENCE`` bytes took."""
    return Times(quick, max(large - quick, 1e-6))


def least(exchanges: Sequence[float]) -> float:
    """What an exchange takes one way, of how long several took one after the other. Who began later finds in
    every second one that all has come, and waits twice as long in the next: so two are halved."""
    return min(first + second for first, second in itertools.pairwise(exchanges)) / 2


def alike(hosts: int) -> Table:
    """Of hosts of which nothing has been measured."""
    return {(low, high): Times(LEAST, LEAST) for high in range(hosts) for low in range(high)}


def grown(hosts: int, root: int, table: Table, small: bool = False) -> Tree:
    """The tree of that ``root``: next is always the message that arrives first, or one that arrives hardly
    later over a quicker link, for slow ones often share a wire. ``small``: of messages that take no time to
    send. Times are rounded to powers of two from ``LEAST`` on, and among equals the sender that was reached
    first is taken, so noise in what was measured makes no detours."""
    tree = Tree(root, {}, {host: [] for host in range(hosts)})
    free_at = {root: 0.0}

    def sending(edge: tuple[int, int]) -> float:
        return 0.0 if small else _rounded(table[min(edge), max(edge)].sending)

    def arrival(edge: tuple[int, int]) -> float:
        return free_at[edge[0]] + sending(edge) + _rounded(table[min(edge), max(edge)].delay)

    def cost(edge: tuple[int, int]) -> tuple[float, float]:
        return sending(edge) + _rounded(table[min(edge), max(edge)].delay), arrival(edge)

    while len(free_at) < hosts:
        waiting = [host for host in range(hosts) if host not in free_at]
        edges = [(source, to) for to in waiting for source in free_at]
        latest = HARDLY * min(map(arrival, edges))
        edge = source, to = min((one for one in edges if arrival(one) <= latest), key=cost)
        free_at[to] = arrival(edge)
        free_at[source] += sending(edge)
        tree.parent[to] = source
        tree.children[source].append(to)
    return tree


def _rounded(seconds: float) -> float:
    return 2.0 ** round(math.log2(max(seconds, LEAST)))


def meetings(hosts: int, host: int) -> Iterator[int]:
    """Whom this host meets, one after the other, so that each two meet once and at any time each meets one at
    most: the circle method of tournaments."""
    seats = hosts + hosts % 2
    for turn in range(seats - 1):
        if host == seats - 1:
            other = turn * (seats // 2) % (seats - 1)
        else:
            other = (turn - host) % (seats - 1)
            other = seats - 1 if other == host else other
        if other < hosts:
            yield other


def packed(measured: dict[int, Times], hosts: int) -> bytes:
    """What one host has measured, for the others."""
    none = Times(0.0, 0.0)
    return b"".join(
        _TIMES.pack(one.delay, one.sending) for one in (measured.get(host, none) for host in range(hosts))
    )


def table_of(rows: dict[int, bytes]) -> Table:
    """Of what all hosts have measured: the slower of both ends."""
    times = {host: [Times(*one) for one in _TIMES.iter_unpack(row)] for host, row in rows.items()}
    return {
        (low, high): Times(
            max(times[low][high].delay, times[high][low].delay),
            max(times[low][high].sending, times[high][low].sending),
        )
        for low in times
        for high in times
        if low < high
    }
