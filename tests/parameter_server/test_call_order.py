"""Test that all shards perform the same calls in the same order, even if clients die during a call."""

from __future__ import annotations

import random
from collections import deque

import pytest

from flowchan.pipelines.parameter_server.call_order import CallId, CallOrder, KeeperOrder, Notice


def test_call_is_performed_after_all_shards_have_staged_it() -> None:
    order = CallOrder(2)
    assert order.after(Notice(0, "staged", ("a", 0))) == []
    assert order.after(Notice(1, "staged", ("a", 0))) == [KeeperOrder(True, ("a", 0))]


def test_next_call_follows_when_all_shards_have_performed_one() -> None:
    order = CallOrder(2)
    for call in (("a", 0), ("b", 0)):
        order.after(Notice(0, "staged", call))
        order.after(Notice(1, "staged", call))
    assert order.after(Notice(0, "performed", ("a", 0))) == []
    assert order.after(Notice(1, "performed", ("a", 0))) == [KeeperOrder(True, ("b", 0))]


@pytest.mark.parametrize("lost_first", [True, False])
def test_call_that_a_shard_never_got_is_discarded(lost_first: bool) -> None:
    notices = [Notice(0, "staged", ("a", 0)), Notice(1, "lost", ("a", 0))]
    order = CallOrder(2)
    found = [order.after(notice) for notice in (reversed(notices) if lost_first else notices)]
    assert found == [[], [KeeperOrder(False, ("a", 0))]]


class Keeper:
    """Simulated keeper, with one queue of calls per client and a queue of orders."""

    def __init__(self) -> None:
        self.sent: dict[str, deque[CallId]] = {}
        self.staged: set[CallId] = set()
        self.orders: deque[KeeperOrder] = deque()
        self.performed: list[CallId] = []


class Simulation:
    """Clients that send calls to keepers and die at random. Messages of different senders interleave."""

    def __init__(self, seed: int, shards: int, clients: int, calls: int) -> None:
        self.chance, self.order = random.Random(seed), CallOrder(shards)
        self.keepers = [Keeper() for _ in range(shards)]
        self.notices: deque[Notice] = deque()
        self.complete: set[CallId] = set()
        for client in map(str, range(clients)):
            sent = [(shard, (client, call)) for call in range(calls) for shard in range(shards)]
            kept = sent[: self.chance.randrange(len(sent) + 1)]  # the client dies after these messages
            for shard, keeper in enumerate(self.keepers):
                keeper.sent[client] = deque(call for number, call in kept if number == shard)
            self.complete |= {call for shard, call in kept if shard == shards - 1}

    def steps(self) -> list[tuple[str, int, str]]:
        """Return all steps that are possible now."""
        found = [("order", 0, "")] if self.notices else []
        for shard, keeper in enumerate(self.keepers):
            found += [("stage", shard, client) for client in keeper.sent]
            found += [("follow", shard, "")] if keeper.orders else []
        return found

    def step(self, kind: str, shard: int, client: str) -> None:
        """Take one step."""
        keeper = self.keepers[shard]
        if kind == "order":
            for order in self.order.after(self.notices.popleft()):
                for one in self.keepers:
                    one.orders.append(order)
        elif kind == "follow":
            perform, call = keeper.orders.popleft()
            if perform:
                keeper.staged.remove(call)
                keeper.performed.append(call)
                self.notices.append(Notice(shard, "performed", call))
            else:
                keeper.staged.discard(call)
        elif keeper.sent[client]:
            keeper.staged.add(call := keeper.sent[client].popleft())
            self.notices.append(Notice(shard, "staged", call))
        elif not any(call[0] == client for call in keeper.staged):  # a session first finishes its calls
            del keeper.sent[client]
            self.notices.append(Notice(shard, "lost", (client, 0)))


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_shards_perform_complete_calls_in_one_order(shards: int) -> None:
    for seed in range(300):
        world = Simulation(seed, shards, clients=4, calls=5)
        while steps := world.steps():
            world.step(*world.chance.choice(steps))
        assert len({tuple(keeper.performed) for keeper in world.keepers}) == 1
        assert set(world.keepers[0].performed) == world.complete
        assert not any(keeper.staged for keeper in world.keepers)
        assert not world.order._staged
        assert not world.order._lost
