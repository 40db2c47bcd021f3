"""Test the trees over a group's hosts: how measured times determine them, and how data moves on them."""

from __future__ import annotations

import itertools
import math
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.group_members import OverHosts
from support.network_proxy import Wire
from support.waiting import wait_until

from flowchan.collective import exchange, trees
from flowchan.collective.exchange import HEADER
from flowchan.collective.leader_links import Links
from flowchan.collective.trees import Table, Times, Tree, grown, meetings
from flowchan.errors import MemberDied, Mismatch
from flowchan.transport.tcp import dial

NEAR, DISTANT = Times(3e-5, 2e-4), Times(1e-2, 2e-4)
EMPTY = 20 * HEADER.size
"""Upper limit for the bytes of all messages without data in these tests."""


def all_alike(hosts: int, times: Times) -> Table:
    return dict.fromkeys(itertools.combinations(range(hosts), 2), times)


def depth(tree: Tree, host: int) -> int:
    return 0 if host == tree.root else 1 + depth(tree, tree.parent[host])


# the machine, not the test, determines how quickly examples are generated
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.integers(2, 9), st.booleans())
def test_tree_connects_all_hosts_to_its_root(data: Any, hosts: int, small: bool) -> None:
    seconds = st.floats(1e-6, 10)
    table = {pair: Times(data.draw(seconds), data.draw(seconds)) for pair in all_alike(hosts, NEAR)}
    root = data.draw(st.integers(0, hosts - 1))
    tree = grown(hosts, root, table, small)
    assert set(tree.parent) == set(range(hosts)) - {root}
    assert all(depth(tree, host) < hosts for host in range(hosts))
    for host, children in tree.children.items():
        assert sorted(children) == [child for child in sorted(tree.parent) if tree.parent[child] == host]


def test_tree_is_binomial_if_sending_dominates() -> None:
    """The number of hosts that have the data doubles in each round."""
    tree = grown(8, 0, all_alike(8, Times(1e-6, 1e-2)))
    assert Counter(depth(tree, host) for host in range(8)) == {0: 1, 1: 3, 2: 3, 3: 1}


def test_tree_is_a_star_if_delay_dominates() -> None:
    assert grown(8, 2, all_alike(8, DISTANT)).children[2] == [0, 1, 3, 4, 5, 6, 7]
    assert grown(8, 2, all_alike(8, NEAR), small=True).children[2] == [0, 1, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("small", [False, True])
def test_tree_avoids_a_slow_connection(small: bool) -> None:
    for slow in itertools.combinations(range(5), 2):
        table = all_alike(5, NEAR) | {slow: Times(1e-2, 1e-1)}
        for root in range(5):
            parent = grown(5, root, table, small).parent
            assert not {(host, other) for host, other in parent.items() if {host, other} == set(slow)}


def test_tree_joins_two_sites_with_one_connection() -> None:
    site = "aabba"
    between = Times(DISTANT.delay, 1.0)
    table = {pair: NEAR if site[pair[0]] == site[pair[1]] else between for pair in all_alike(5, NEAR)}
    for root in range(5):
        parent = grown(5, root, table).parent
        assert sum(site[host] != site[other] for host, other in parent.items()) == 1


def test_noise_does_not_change_the_tree() -> None:
    chance = np.random.default_rng(1)
    plain = grown(8, 0, all_alike(8, NEAR))
    for _ in range(50):
        noisy = {
            pair: Times(*(float(one * chance.uniform(0.95, 1.05)) for one in (NEAR.delay, NEAR.sending)))
            for pair in all_alike(8, NEAR)
        }
        assert grown(8, 0, noisy) == plain


@pytest.mark.parametrize("hosts", range(2, 10))
def test_each_pair_of_hosts_is_measured_once(hosts: int) -> None:
    lists = [list(meetings(hosts, host)) for host in range(hosts)]
    assert all(sorted(met) == [x for x in range(hosts) if x != host] for host, met in enumerate(lists))
    # two hosts measure once each is next on the other's list; without such a pair, all hosts would wait
    # forever
    while any(lists):
        pairs = {tuple(sorted((host, met[0]))) for host, met in enumerate(lists) if met}
        meeting = [(low, high) for low, high in pairs if lists[low][0] == high and lists[high][0] == low]
        assert meeting
        for host in itertools.chain(*meeting):
            lists[host].pop(0)


def joined(hosts: int, slow: tuple[int, int] = (-1, -1), wire: Wire | None = None) -> list[Links]:
    """Connect the leaders of ``hosts`` hosts. The leaders of the two ``slow`` hosts use ``wire``."""
    sockets: list[dict[int, socket.socket]] = [{} for _ in range(hosts)]
    for low, high in itertools.combinations(range(hosts), 2):
        with socket.create_server(("127.0.0.1", 0)) as server:
            at = "127.0.0.1:{1}".format(*server.getsockname())
            if wire is not None and (low, high) == slow:
                at = wire.to(at)
            sockets[low][high] = dial(at, 60)
            sockets[high][low], _ = server.accept()
    return [Links(own, {host: host for host in own}, host) for host, own in enumerate(sockets)]


def at_all(links: list[Links], do: Any) -> list[Any]:
    found: list[Any] = [None] * len(links)

    def one(host: int) -> None:
        found[host] = do(links[host])

    threads = [threading.Thread(target=one, args=(host,)) for host in range(len(links))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.fixture
def links() -> Iterator[list[Links]]:
    wire = Wire(delay=0.002, rate=10e6)
    made = joined(4, (0, 3), wire)
    yield made
    for one in made:
        one.close()
    wire.close()


def test_large_messages_avoid_a_slow_connection(links: list[Links]) -> None:
    at_all(links, lambda one: one.measure(None))
    grown_trees = at_all(links, lambda one: [one.tree(root) for root in range(4)])
    assert all(one == grown_trees[0] for one in grown_trees)  # all leaders build the same tree
    for tree in grown_trees[0]:
        assert not {pair for pair in tree.parent.items() if set(pair) == {0, 3}}
    slow, quick = links[0].edges[3], links[0].edges[1]
    assert (slow.delay or 0) >= 0.002
    assert (slow.bytes_per_second or math.inf) < (quick.bytes_per_second or 0)

    call, large = ("broadcast", 2, 0), os.urandom(3_000_000)

    def do(one: Links) -> Any:
        spread_values = one.spread(call, large if one.host == 0 else None, one.tree(0), None)
        brought = one.gather(call, bytes([one.host]) * 500_000, one.tree(3), None)
        return bytes(spread_values), {host: bytes(part) for host, part in brought.items()}

    found = at_all(links, do)
    assert [spread_values for spread_values, _ in found] == [large] * 4
    assert [brought for _, brought in found] == [
        *({} for _ in range(3)),
        {host: bytes([host]) * 500_000 for host in range(3)},
    ]
    assert links[0].edges[3].sent + links[0].edges[3].received < EMPTY


def test_delay_to_a_late_host_is_not_underestimated() -> None:
    """In every second exchange, the other host's data has already arrived."""
    delay = 0.03
    wire = Wire(delay)
    links = joined(2, (0, 1), wire)
    first = threading.Thread(target=lambda: links[0].measure(None))
    first.start()
    wait_until(lambda: wire.passed)
    links[1].measure(None)
    first.join()
    for one in links:
        assert delay <= (one.edges[1 - one.host].delay or 0)
        one.close()
    wire.close()


def test_data_is_forwarded_while_it_arrives() -> None:
    """The middle host of a chain forwards the start of a message before its end arrives."""
    table = {(0, 1): NEAR, (1, 2): NEAR, (0, 2): Times(10, 10)}
    links = joined(3)
    call, size = ("broadcast", 2, 0), 30_000_000
    tree = grown(3, 0, table)
    assert tree.parent == {1: 0, 2: 1}
    first, last = links[0].sockets, links[2].sockets
    thread = threading.Thread(target=lambda: links[1].spread(call, None, tree, None))
    thread.start()
    for sock in (first[1], first[2], last[0], last[1]):
        sock.setblocking(True)
    data, empty = os.urandom(size), HEADER.pack(0, 2, 0, 0)
    first[1].sendall(HEADER.pack(0, 2, 0, size) + data[: size // 2])
    passed_on = last[1].recv(HEADER.size + size // 4, socket.MSG_WAITALL)
    assert passed_on == HEADER.pack(0, 2, 0, size) + data[: size // 4]
    last[1].sendall(empty)
    first[1].sendall(data[size // 2 :])
    assert last[1].recv(size - size // 4, socket.MSG_WAITALL) == data[size // 4 :]
    thread.join()
    for one in links:
        one.close()


class Willing(socket.socket):
    """A connection that accepts all bytes at once, like one with a large buffer."""

    def sendmsg(self, parts: Iterable[Any], *_: Any) -> int:
        data = b"".join(parts)
        self.setblocking(True)
        self.sendall(data)
        self.setblocking(False)
        return len(data)


def test_gathered_data_is_complete_for_any_write_size() -> None:
    links, call, sizes = (
        joined(3),
        ("allreduce_with", 12, 0),
        [0, 3 * exchange.PIECE // 2, 2 * exchange.PIECE + 1],
    )
    for one in links:
        one.sockets = {host: Willing(fileno=sock.detach()) for host, sock in one.sockets.items()}
    tree = grown(3, 0, {(0, 1): NEAR, (1, 2): NEAR, (0, 2): Times(10, 10)})
    given = [os.urandom(size) for size in sizes]
    found = at_all(links, lambda one: one.gather(call, given[one.host], tree, None))[0]
    assert {host: bytes(part) for host, part in found.items()} == {1: given[1], 2: given[2]}
    for one in links:
        one.close()


SLOW = (0, 3)


@pytest.fixture
def uneven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the measurement with a function that reports the connection ``SLOW`` as slow."""

    def measure(links: Links, timeout: float | None) -> None:
        hosts = len(links.sockets) + 1
        links._table = trees.alike(hosts) | {SLOW: Times(1.0, 1.0)}

    monkeypatch.setattr(Links, "measure", measure)


@pytest.mark.usefixtures("uneven")
def test_explain_shows_the_tree_on_leaders() -> None:
    def body(g: Any) -> Any:
        return g.explain("broadcast", np.ones(10)), g.explain("allreduce_with")

    found = OverHosts("aabcd", body).results(5)
    along = "over connections between the 4 hosts' leaders, along a tree"
    assert found[0][0].endswith(f"{along} chosen from measurements: 0 to 2 and 3, 2 to 4")
    assert found[1][1].endswith(along)


@pytest.mark.usefixtures("uneven")
def test_tree_operations_avoid_a_slow_connection() -> None:
    def body(g: Any) -> Any:
        texts = g.allreduce_with({"x": f"{g.rank}{'.' * 100_000}"}, lambda a, b: f"({a[:9]}{b[:9]})")
        rests = list(g.join(max)) if g.rank == 2 else g.allreduce_with(g.rank, max)
        if g.rank != 2:
            rests = [rests, *g.join(max)]
        arrays = []
        for root in range(g.size):
            x = np.full(100_000, g.rank)
            arrays.append(int(g.broadcast(x, root=root)[-1]))
        spread_values = g.broadcast("x" * 100_000 if g.rank == 4 else None, root=4)
        lists = g.gather("y" * (100_000 + g.rank), root=3)
        slow = g.stats().get(SLOW[1] if g.rank == SLOW[0] else SLOW[0])
        moved = slow.sent + slow.received if slow and g.rank in SLOW else 0
        return (
            texts[0]["x"][:12],
            texts[1],
            rests,
            arrays,
            len(spread_values),
            lists and [*map(len, lists)],
            moved,
        )

    found = OverHosts("abcde", body).results(5)
    for rank, (text, count, rests, arrays, spread_values, lists, moved) in found.items():
        assert (text, count, spread_values) == (found[0][0], 5, 100_000)
        assert rests == [(4, 4)]
        assert arrays == [0, 1, 2, 3, 4]
        assert lists == ([100_000 + one for one in range(5)] if rank == 3 else None)
        assert moved < 2 * EMPTY
    assert found[0][0].startswith("((((0")  # combined in rank order, one value at a time


@pytest.mark.usefixtures("uneven")
@pytest.mark.parametrize("victim", range(8))
def test_death_of_a_forwarding_host_raises_on_all_hosts(victim: int) -> None:
    def work(g: Any) -> None:
        for number in itertools.count():
            if (g.rank, number) == (victim, 3):
                os.kill(os.getpid(), signal.SIGKILL)
            g.allreduce_with(np.ones(100), np.maximum)

    def body(g: Any) -> Any:
        with pytest.raises(MemberDied) as died:
            work(g)
        with pytest.raises(MemberDied):
            g.barrier()
        return died.value.ranks

    found = OverHosts("abcdefgh", body).results(7)
    assert set(found.values()) == {(victim,)}


@pytest.mark.usefixtures("uneven")
def test_errors_in_tree_operations_raise_on_all_members() -> None:
    def fails(a: Any, b: Any) -> Any:
        raise LookupError("no such thing")

    def body(g: Any) -> Any:
        with pytest.raises(LookupError, match="no such thing"):
            g.allreduce_with("x" * 100_000, fails)
        with pytest.raises(Mismatch) as info:
            g.allreduce(np.ones(3)) if g.rank == 3 else g.allreduce_with(1, lambda a, b: a)
        with pytest.raises(Mismatch):
            g.broadcast(np.ones(100_000 if g.rank != 1 else 100_001), root=2)
        return str(info.value), g.allreduce_with(1, lambda a, b: a + b)

    for text, total in OverHosts("abcdd", body).results(5).values():
        assert "rank 3" in text or "ranks 3, 4" in text
        assert total == (5, 5)


def test_timeout_names_the_late_host_and_no_waiting_host(
    links: list[Links], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 2 is late. Rank 1, which forwards the data of rank 2, is only waiting for it."""
    monkeypatch.setattr(exchange, "STALLED", 0.1)
    table = {pair: Times(9.0, 9.0) for pair in all_alike(4, NEAR)} | {
        (0, 1): NEAR,
        (1, 2): NEAR,
        (0, 3): NEAR,
    }
    tree, call = grown(4, 0, table), ("allreduce_with", 12, 0)
    assert tree.parent == {1: 0, 2: 1, 3: 0}

    def do(one: Links) -> Any:
        if one.host == 2:
            wait_until(lambda: len(caplog.records) >= 3)
        return sorted(one.gather(call, b"x", tree, None))

    assert at_all(links, do)[0] == [1, 2, 3]
    message = {record.getMessage() for record in caplog.records}
    assert message
    assert all(text.endswith("for the host of rank 2") for text in message), message
