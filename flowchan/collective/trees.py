"""Compute the trees through which one host sends data to all hosts, or all hosts send data to one.

When the hosts' leaders have connected, each pair measures how long it takes to send one byte and
``REFERENCE`` bytes. The greedy rule "earliest completion first" builds a tree from these times. The rule is
from Bhat, Raghavendra and Prasanna, Efficient collective communication in distributed heterogeneous systems,
J. Parallel Distrib. Comput. 63 (2003). Equal connections result in a binomial tree if the sending time
dominates, and in a star if the delay dominates. Connections that are much slower than the others remain
unused.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

REFERENCE = 256 * 1024
"""Message size in bytes for which a tree is built. For small messages, only the delay matters."""
LEAST = 1e-4
"""Times below this number of seconds count as equal, because they depend more on other load on the machines
than on the connection."""
HARDLY = 1.25
"""A preferred message may take at most this many times as long to arrive as the earliest message."""
_TIMES = struct.Struct("<dd")


@dataclass(frozen=True)
class Times:
    """Delay of a connection, and the time to send ``REFERENCE`` bytes.

    ``delay`` is the time until one byte arrives; ``sending`` is the time during which the sender is busy.
    Both times are in seconds.
    """

    delay: float
    sending: float

    @property
    def bytes_per_second(self) -> float:
        return REFERENCE / self.sending


@dataclass(frozen=True)
class Tree:
    """Tree of hosts: each host's parent, and its children in the order in which it sends to them."""

    root: int
    parent: dict[int, int]
    children: dict[int, list[int]]

    def shown(self, names: Sequence[object]) -> str:
        """Describe the tree with the hosts' names, such as ``0 to 1 and 2, 2 to 3``."""
        passing = {host: children for host, children in self.children.items() if children}
        return ", ".join(
            f"{names[host]} to {' and '.join(str(names[child]) for child in children)}"
            for host, children in passing.items()
        )


Table = dict[tuple[int, int], Times]
"""Times of each pair of hosts (lower number first), equal on all leaders."""


def times_between(quick: float, large: float) -> Times:
    """Compute a connection's times from the seconds that one byte and ``REFERENCE`` bytes took."""
    return Times(quick, max(large - quick, 1e-6))


def least(exchanges: Sequence[float]) -> float:
    """Return the shortest duration of an exchange, given the durations of consecutive exchanges.

    If one side starts later, the data of every second exchange has already arrived there. That side then
    waits twice as long in the next exchange. Consecutive exchanges are therefore averaged in pairs.
    """
    return min(first + second for first, second in itertools.pairwise(exchanges)) / 2


def alike(hosts: int) -> Table:
    """Return the same times for all pairs of hosts, for use before any measurement."""
    return {(low, high): Times(LEAST, LEAST) for high in range(hosts) for low in range(high)}


def grown(hosts: int, root: int, table: Table, small: bool = False) -> Tree:
    """Build the tree with this ``root`` from the times between the hosts.

    The message that would arrive first is sent next. A message over a faster connection is preferred if it
    takes at most ``HARDLY`` times as long, because slow connections often share a wire. If ``small`` is true,
    sending counts as instantaneous.

    Times are rounded to powers of two, at least ``LEAST``. If several senders are equal, the sender that was
    reached first sends the message. Measurement noise therefore does not change the tree.
    """
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
    """Yield the hosts with which this host measures its connections, one at a time.

    Each pair of hosts meets once, and each host meets at most one other at a time. This is the circle method
    for round-robin tournaments.
    """
    places = hosts + hosts % 2
    for turn in range(places - 1):
        if host == places - 1:
            other = turn * (places // 2) % (places - 1)
        else:
            other = (turn - host) % (places - 1)
            other = places - 1 if other == host else other
        if other < hosts:
            yield other


def packed(measured: dict[int, Times], hosts: int) -> bytes:
    """Serialise one host's measurements for the other hosts."""
    none = Times(0.0, 0.0)
    return b"".join(
        _TIMES.pack(one.delay, one.sending) for one in (measured.get(host, none) for host in range(hosts))
    )


def table_of(rows: dict[int, bytes]) -> Table:
    """Combine the measurements of all hosts.

    The two ends of a connection measure different times. The longer time counts.
    """
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
