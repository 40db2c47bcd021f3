"""Decide the order in which all shards on a pool perform the calls of all clients.

Algorithm. A client sends each push, and each pull that must not race with pushes, to the keepers of all
shards. A keeper *stages* the call and tells the program. When all keepers have staged a call, the program
tells them to perform it. The next call follows when all keepers have performed this call. All shards
therefore perform the same calls in the same order, and their versions differ by at most one.

Lost clients. A client may die before all keepers have its call. Each keeper tells the program when its
session with the client has ended. A call that such a keeper has not staged by then can never be complete. The
program therefore tells the other keepers to discard it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Literal, NamedTuple

CallId = tuple[str, int]
"""Id of a client, and the number of its call."""


class Notice(NamedTuple):
    """Notice that a keeper sends to the program.

    Attributes:
        shard: Number of the keeper's shard.
        kind: Whether the keeper has staged or performed a call, or has lost a client.
        call: ID of the call. If a client was lost, the number in this ID is 0.
    """

    shard: int
    kind: Literal["staged", "performed", "lost"]
    call: CallId


class KeeperOrder(NamedTuple):
    """Order from the program to all keepers to perform or discard a call."""

    perform: bool
    call: CallId


class CallOrder:
    """Decide which orders to send to the keepers.

    Args:
        shards: Number of shards.
    """

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._staged: dict[CallId, set[int]] = {}
        self._complete: deque[CallId] = deque()
        self._performing: set[int] = set()  # shards that have not performed the current call yet
        self._lost: defaultdict[str, set[int]] = defaultdict(set)

    def after(self, notice: Notice) -> list[KeeperOrder]:
        """Process a notice, and return the orders that all keepers must get next."""
        shard, kind, call = notice
        if kind == "performed":
            self._performing.discard(shard)
            return self._next()
        if kind == "staged":
            staged = self._staged.setdefault(call, set())
            staged.add(shard)
            if len(staged) == self._shards:
                del self._staged[call]
                self._complete.append(call)
                return self._next()
            return self._discarded(call)
        client = call[0]
        self._lost[client].add(shard)
        calls = [one for one in self._staged if one[0] == client]
        orders = [order for one in calls for order in self._discarded(one)]
        if len(self._lost[client]) == self._shards:  # no keeper will mention the client again
            del self._lost[client]
        return orders

    def _next(self) -> list[KeeperOrder]:
        if self._performing or not self._complete:
            return []
        self._performing = set(range(self._shards))
        return [KeeperOrder(True, self._complete.popleft())]

    def _discarded(self, call: CallId) -> list[KeeperOrder]:
        """Discard a call if a keeper has lost the call's client before it staged the call."""
        if self._lost.get(call[0], set()) <= self._staged[call]:
            return []
        del self._staged[call]
        return [KeeperOrder(False, call)]
