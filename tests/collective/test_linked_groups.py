"""Test groups that span several hosts: forming, failing and splitting them.

The other files in this folder check that operations give the same results on several hosts as on one host.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from support.group_members import SECRET, OverHosts, die, free_address, over_hosts, raised
from support.waiting import wait_until

from flowchan import collective
from flowchan.collective import leader_links
from flowchan.collective.leader_links import Links
from flowchan.collective.rendezvous import forming
from flowchan.collective.rendezvous.address import meet_at
from flowchan.errors import GroupError, MemberDied, MemberLeft, Mismatch


@pytest.mark.parametrize("hosts", ["ab", "aab", "abb", "abcabc", "aaaab"])
def test_results_have_equal_bits_on_any_number_of_hosts(hosts: str) -> None:
    def body(g: Any) -> Any:
        chance = np.random.default_rng(g.rank)
        small, large = (chance.standard_normal(n, np.float32) for n in (100, 200_000))
        g.allreduce(small)
        g.allreduce(large, op="mean")
        return small.tobytes(), large.tobytes(), g.allgather(g.rank)

    found = OverHosts(hosts, body).results(len(hosts))
    assert len({answer[:2] for answer in found.values()}) == 1
    assert all(answer[2] == list(range(len(hosts))) for answer in found.values())


@pytest.mark.parametrize("hosts", ["ab", "abc"])
@pytest.mark.parametrize(("whole", "block"), [(1 << 20, 1 << 20), (0, 1 << 20), (0, 1 << 16)])
def test_sum_is_equal_for_whole_sliced_and_blocked_exchange(
    hosts: str, whole: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in (("WHOLE", whole), ("WHOLE_OF_TWO", whole), ("BLOCK", block)):
        monkeypatch.setattr(leader_links, name, size)
    parts = [np.random.default_rng(rank).standard_normal(100_003, np.float32) for rank in range(len(hosts))]

    def body(g: Any) -> Any:
        return g.allreduce(parts[g.rank]).tobytes(), g.allreduce(np.ones(1)).item()

    total = functools.reduce(np.add, parts).tobytes()
    assert set(OverHosts(hosts, body).results(len(hosts)).values()) == {(total, float(len(hosts)))}


@pytest.mark.parametrize("victim", [1, 2, 3])
def test_death_raises_on_all_hosts(victim: int) -> None:
    """The victim is a leader or another member."""

    def body(g: Any) -> Any:
        x = np.ones(300_000, np.float32)
        for number in range(10**9):
            if (g.rank, number) == (victim, 3):
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                g.allreduce(x)
            except MemberDied as died:
                with pytest.raises(MemberDied) as again:
                    g.barrier()
                return died.ranks, again.value.ranks, again.value.operation
        return None

    found = OverHosts("aabb", body).results(3)
    assert set(found.values()) == {((victim,), (victim,), "barrier")}


def test_local_ranks_count_the_members_of_each_host() -> None:
    def body(g: Any) -> Any:
        with g.split(g.rank % 2) as part:  # ranks 0, 2, 4 and ranks 1, 3
            return g.local_rank, g.local_size, part.local_rank, part.local_size

    found = OverHosts("abbab", body).results(5)
    assert [found[rank] for rank in range(5)] == [
        (0, 2, 0, 1), (0, 3, 0, 1), (1, 3, 0, 2), (1, 2, 0, 1), (2, 3, 1, 2)
    ]  # fmt: skip


def test_error_arrives_from_a_host_that_stopped_reading() -> None:
    local, remote = socket.socketpair()
    own_links, other_links = Links({1: local}, {1: 1}, 0), Links({0: remote}, {0: 0}, 1)
    call = ("allreduce", 4, 0)
    other_links.fail(MemberDied("rank 2 died", (2,), "allreduce"), call, goes_on=False)
    with pytest.raises(MemberDied, match="rank 2 died"):
        own_links.swap(call, lambda _: [bytes(10_000_000)])
    own_links.close()


def test_member_left_is_raised_on_all_hosts() -> None:
    def body(g: Any) -> Any:
        total = g.allreduce(1)
        if g.rank == 3:
            return total
        with pytest.raises(MemberLeft) as left:
            g.barrier()
        return total, left.value.ranks

    found = OverHosts("aabb", body).results(4)
    assert found.pop(3) == 4
    assert set(found.values()) == {(4, (3,))}


def test_mismatch_between_hosts_names_both_calls() -> None:
    def body(g: Any) -> Any:
        with pytest.raises(Mismatch) as info:
            g.allreduce(np.ones(3 if g.rank < 2 else 4))
        return str(info.value), g.allreduce(1)

    for text, total in OverHosts("aabb", body).results(4).values():
        assert "ranks 0, 1 called allreduce(float64[3], 'sum')" in text
        assert "ranks 2, 3 called allreduce(float64[4], 'sum')" in text
        assert total == 4


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("most", "one"),
    [
        (lambda g: g.allreduce(np.ones(3)), lambda g: g.allreduce(np.ones(3), op="mean")),
        (lambda g: g.allreduce(np.ones(3, "f4")), lambda g: g.allreduce(np.ones(3, "f2"))),
        (lambda g: g.reduce(np.ones(3), 1), lambda g: g.reduce(np.ones(3), 2)),
        (lambda g: g.broadcast(np.ones(3), 0), lambda g: g.allreduce(np.ones(3))),
        (lambda g: g.broadcast(np.ones(3), 2), lambda g: g.broadcast(np.ones(3), 1)),
        (lambda g: g.broadcast(np.ones(3), 0), lambda g: g.broadcast(np.ones((3, 1)), 0)),
        (lambda g: g.split(0), lambda g: g.barrier()),
        (lambda g: g.barrier(), lambda g: g.split(0)),
    ],
)
@pytest.mark.parametrize("hosts", ["aabb", "abb", "aab"])
def test_mismatch_on_one_host_is_raised_before_other_hosts_complete(hosts: str, most: Any, one: Any) -> None:
    """All members get the error, and the group stays usable."""

    def body(g: Any) -> Any:
        with pytest.raises(Mismatch):
            (one if g.rank == 1 else most)(g)
        return g.allreduce(1)

    found = OverHosts(hosts, body).results(len(hosts))
    assert found == dict.fromkeys(range(len(hosts)), len(hosts))


def test_mismatch_on_one_host_raises_on_all_hosts() -> None:
    def body(g: Any) -> Any:
        with pytest.raises(Mismatch) as info:
            g.barrier() if g.rank == 3 else g.allreduce(np.ones(3))
        return str(info.value), g.allreduce(1)

    for text, total in OverHosts("aabb", body).results(4).values():
        assert "rank 2 called allreduce(float64[3], 'sum')" in text
        assert "rank 3 called barrier()" in text
        assert total == 4


def test_waiting_call_ends_only_at_its_own_timeout() -> None:
    def body(g: Any) -> Any:
        if g.rank == 0:
            with pytest.raises(MemberDied):
                g.receive(1)
            return None
        if g.rank == 1:
            return None
        with pytest.raises(
            TimeoutError, match=r"barrier timed out: no message arrived from the host of rank 0"
        ):
            g.barrier(timeout=0.3)
        return None

    OverHosts("aab", body).results(3)


def test_subgroup_on_one_host_uses_shared_memory() -> None:
    def body(g: Any) -> Any:
        with g.split(g.rank % 2) as pair:
            most = g.split("all" if g.rank else None)
            found = pair.allgather(g.rank), most and most.allgather(g.rank)
            if most:
                most.close()
            return *found, type(pair).__name__

    found = OverHosts("abab", body).results(4)
    assert found[0] == ([0, 2], None, "SharedGroup")
    assert found[3] == ([1, 3], [1, 2, 3], "SharedGroup")
    assert OverHosts("aabb", body).results(4)[3] == ([1, 3], [1, 2, 3], "LinkedGroup")


def test_close_ends_started_operations() -> None:
    """Operations that wait for another host end, both on the leader and on other members.

    Rank 0 can still complete the first barrier, because all data for it has already arrived.
    """

    def body(g: Any) -> Any:
        if g.rank == 0:  # rank 0 makes its calls after the other ranks have left
            with pytest.raises(MemberDied):
                g.receive(2)
            g.barrier()
            with pytest.raises(MemberLeft) as left:
                g.barrier()
            return left.value.ranks
        handle = g.barrier(wait=False)
        if g.rank == 1:
            wait_until(lambda: g.stats()[0].sent > 0)  # the leader sends only after rank 2 has also called
            g.send("both wait", 2)
        else:
            g.receive(1)
        g.close()
        with pytest.raises(GroupError):
            handle.wait()
        return None

    assert OverHosts("abb", body).results(3)[0] == (1,)


@pytest.mark.parametrize("victim", [0, 2, 3])
def test_death_while_subgroups_connect_raises(victim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The victim is a leader that connects or accepts, or another member."""

    def body(g: Any) -> Any:
        if g.rank == victim:
            monkeypatch.setattr(forming, "RemotePeers" if victim == 3 else "connect", die)
        with pytest.raises(MemberDied), g.split("all") as part:
            part.barrier()

    assert OverHosts("aabb", body).results(3) == dict.fromkeys({0, 1, 2, 3} - {victim})


def test_split_that_fails_on_one_leader_raises_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 dies while the leaders connect. Rank 2 shares a host with rank 0 and does not connect itself."""

    def body(g: Any) -> Any:
        if g.rank == 1:
            monkeypatch.setattr(forming, "connect", die)
        with pytest.raises(MemberDied) as raised:
            g.split(g.rank % 2)
        new = g.shrink(timeout=20)
        return new.size, new.allreduce(1), raised.value.ranks  # the error keeps the frames of ``split`` alive

    assert OverHosts("aba", body).results(2) == dict.fromkeys([0, 2], (2, 2, (1,)))


def test_split_raises_on_all_if_one_leader_cannot_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """No member has died, so the members can try again."""
    connect = forming.connect

    def fail(remote: Any, hosts: Any, *more: Any) -> Any:
        if remote.rank == 0:
            raise OSError("no route to the other leader")
        return connect(remote, hosts, *more)

    def body(g: Any) -> Any:
        monkeypatch.setattr(forming, "connect", fail)
        with pytest.raises(GroupError, match="rank 0: no route to the other leader"):
            g.split(g.rank % 2)
        monkeypatch.undo()
        with g.split(g.rank % 2) as part:
            return part.allgather(g.rank)

    assert OverHosts("aba", body).results(3) == {0: [0, 2], 1: [1], 2: [0, 2]}


def test_group_that_cannot_connect_raises_on_all_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 shares memory with rank 0 and need not connect, but it must not wait for rank 0 either."""
    connect, at = forming.connect, free_address()

    def fail(remote: Any, *more: Any) -> Any:
        if remote.rank == 0:
            raise OSError("no route to the other leader")
        return connect(remote, *more)

    def member(rank: int) -> None:
        with meet_at(at, SECRET, rank, 4, 60, host=f"host {rank % 2}") as g:
            g.barrier()

    monkeypatch.setattr(forming, "connect", fail)
    with ThreadPoolExecutor(4) as pool:
        errors = [future.exception() for future in [pool.submit(member, rank) for rank in range(4)]]
    assert all(isinstance(error, OSError | GroupError) for error in errors), errors


def test_death_on_another_host_loses_no_sent_message() -> None:
    """A member that ended without sending anything counts as having left."""

    def body(g: Any) -> Any:
        if g.rank == 0:
            with pytest.raises(TimeoutError, match="no member sent anything to rank 0"):
                g.receive_any(timeout=0.01)
            g.barrier()
            found = [g.receive_any() for _ in range(4)]
            g.send("heard", 3)
            with pytest.raises(MemberDied) as died:
                g.receive_any()
            return sorted(found, key=str), died.value.ranks
        g.barrier()
        if g.rank == 1:
            g.send("near", 0)
        if g.rank == 3:
            for number in range(3):
                g.send(number, 0)
            g.receive(0)
            os.kill(os.getpid(), signal.SIGKILL)
        return None

    found = OverHosts("aabb", body).results(3)
    assert found[0] == ([("near", 1), (0, 3), (1, 3), (2, 3)], (3,))


def send_for_ever(g: Any, to: int) -> None:
    while True:
        g.send("nobody hears", to)


def test_receive_from_another_host_raises_after_a_death() -> None:
    """A message that the victim sent before its death still arrives."""

    def body(g: Any) -> Any:
        if g.rank:
            if g.rank == 1:
                g.send("last words", 0)
                g.receive(0)
            g.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        words, errors = g.receive(1), []
        g.send("heard", 1)
        g.barrier()
        for source in (1, 2):
            with pytest.raises(MemberDied, match=f"rank {source}, on another host, died") as died:
                g.receive(source)
            assert type(died.value) is MemberDied
            errors.append(died.value.ranks)
        with pytest.raises(MemberDied):
            send_for_ever(g, 1)
        return words, errors

    assert OverHosts("abb", body).results(1) == {0: ("last words", [(1,), (2,)])}


def test_message_waits_for_receiver_and_receive_can_time_out() -> None:
    def body(g: Any) -> Any:
        if g.rank:
            x = np.arange(1_000_000)
            for _ in range(3):
                g.send(x, 0)  # the receiver has not made its call yet
            g.barrier()
            return g.receive(0)
        g.barrier()
        found = [g.receive(1).sum() for _ in range(3)]
        with pytest.raises(TimeoutError, match="rank 1 sent nothing to rank 0 in time"):
            g.receive(1, timeout=0.05)
        g.send("enough", 1)
        with pytest.raises(MemberLeft):
            g.receive(1)
        return found

    assert OverHosts("ab", body).results(2)[0] == [499_999_500_000] * 3


def test_error_names_missing_and_duplicate_members() -> None:
    with pytest.raises(TimeoutError, match=r"rank 0 of 3 timed out: ranks \[1, 2\]"):
        collective.group(rank=0, size=3, at=free_address(), secret=SECRET, timeout=0.1)
    at, errors = free_address(), []

    def come(rank: int) -> None:
        try:
            collective.group(rank=rank, size=3, at=at, secret=SECRET, timeout=30)
        except GroupError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (0, 1, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == ["each rank must be used once, got two processes with rank 1"] * 3


def test_explain_describes_operations_across_hosts() -> None:
    def body(g: Any) -> Any:
        found = (g.explain(name, 1) for name in ("scatter", "broadcast", "barrier"))
        assert [one.rpartition(", ")[2] for one in found] == [
            "the data for each host",
            "the data of the root",
            "one word from each host",
        ]
        return g.explain("allreduce", np.ones(10)), g.explain("reduce_scatter", np.ones(10**6))

    small, large = OverHosts("ab", body).results(2)[0]
    assert small.endswith("over connections between the 2 hosts' leaders, all data from each host")
    assert small.startswith(
        "allreduce: exchange: each member reads the inputs of the others; shared memory, 1 member on"
    )
    assert large.startswith("reduce_scatter: slices: ")
    assert large.endswith("over connections between the 2 hosts' leaders, one slice for each host")


def test_stats_report_traffic_of_each_connection() -> None:
    """Each side has received as many bytes as the other side has sent.

    Only leaders have connections, one to each other host.
    """

    def body(g: Any) -> Any:
        g.allreduce(np.ones(100_000))
        g.barrier()
        before = g.stats()
        g.allreduce(np.ones(100_000))
        return before, g.stats()

    found = OverHosts("aabc", body).results(4)
    assert found[1] == ({}, {})
    stats = {rank: now for rank, (_, now) in found.items() if rank != 1}
    assert {rank: set(edges) for rank, edges in stats.items()} == {0: {2, 3}, 2: {0, 3}, 3: {0, 2}}
    for rank, edges in stats.items():
        for other, edge in edges.items():
            assert (edge.sent, edge.steps) == (stats[other][rank].received, stats[other][rank].steps)
            before = found[rank][0][other]
            assert edge.sent - before.sent > 100_000 * 8 * 2 / 3 - 1000
            assert edge.steps - before.steps == 2
            assert edge.seconds > before.seconds


def test_timeout_covers_all_blocks_of_an_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_links, "WHOLE_OF_TWO", 0)
    monkeypatch.setattr(leader_links, "BLOCK", 4096)

    def body(g: Any) -> Any:
        lefts: list[float] = []
        swap = g._links.swap

        def noting(call: Any, out: Any, into: Any, timeout: float) -> Any:
            lefts.append(timeout)
            return swap(call, out, into, timeout)

        g._links.swap = noting
        g.allreduce(np.ones(4096, "f4"), timeout=60)
        return lefts

    for lefts in raised(over_hosts(2, body)):
        assert len(lefts) == 8
        assert lefts == sorted(lefts, reverse=True)
        assert lefts[-1] < lefts[0] <= 60


@pytest.mark.parametrize(
    "error", [MemberDied("rank 3 died", (3,), "allreduce"), TimeoutError("it was not done in time")]
)
def test_failed_connection_raises_the_error_that_the_sender_reported(error: Exception) -> None:
    """The receiver must not report that the sender died."""

    def body(g: Any) -> Any:
        if g.rank:
            g._links.fail(error, ("allreduce", 4, 0), False)
            return None
        wait_until(lambda: g._links.ended() is not None)
        with pytest.raises(type(error)) as caught:
            g._cut_off("allreduce")
        return str(caught.value), getattr(caught.value, "ranks", None)

    assert raised(over_hosts(2, body))[0] == (str(error), getattr(error, "ranks", None))
