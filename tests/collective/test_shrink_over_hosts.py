"""Test ``shrink`` across hosts: survivors reconnect at the group's address, and rank 0 lists them."""

from __future__ import annotations

from typing import Any

import pytest
from support.group_members import OverHosts, die, shrunk, work

from flowchan import Channel
from flowchan.collective.rendezvous import address
from flowchan.errors import GroupError, MemberDied


@pytest.mark.parametrize(
    ("hosts", "victims"),
    [
        ("aabb", {1}),
        ("aabb", {2}),
        ("aabb", {3}),
        ("aabb", {1, 2}),
        ("abc", {1}),
        ("ab", {1}),
        ("aabb", {2, 3}),
    ],
)
def test_shrink_keeps_the_order_of_the_survivors(
    hosts: str, victims: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The victims are on one host or several. The wait for a host without survivors has a limit."""
    monkeypatch.setattr(address, "REJOIN_TIMEOUT_S", 2.0)

    def body(g: Any) -> Any:
        g.barrier()
        if g.rank in victims:
            die()
        return shrunk(g)

    survivors = sorted(set(range(len(hosts))) - victims)
    found = OverHosts(hosts, body).results(len(survivors))
    assert found == {
        old: (new, len(survivors), len(survivors), survivors) for new, old in enumerate(survivors)
    }


@pytest.mark.parametrize("at", ["meet_by", "_follow"])
def test_shrink_survives_a_death_during_the_call(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The victim dies before it reaches rank 0, or when all members are about to connect."""
    monkeypatch.setattr(address, "REJOIN_TIMEOUT_S", 1.0)

    def body(g: Any) -> Any:
        g.barrier()
        if g.rank == 1:
            die()
        if g.rank == 3:
            monkeypatch.setattr(address, at, die)
        return shrunk(g)

    survivors = [0, 2]
    found = OverHosts("aabb", body).results(2)
    assert found == {old: (new, 2, 2, survivors) for new, old in enumerate(survivors)}


def test_group_across_hosts_can_shrink_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "REJOIN_TIMEOUT_S", 1.0)

    def body(g: Any) -> Any:
        g.barrier()
        sizes = []
        for victim in (3, 1):
            if g.size > victim and g.rank == victim:
                die()
            with pytest.raises(MemberDied):
                work(g)
            g = g.shrink()
            sizes.append(g.allreduce(1))
        g.close()
        return sizes

    assert OverHosts("abab", body).results(2) == {0: [3, 2], 2: [3, 2]}


@pytest.mark.parametrize(("late", "hosts"), [(0, "abb"), (2, "aab"), (3, "aaab")])
def test_shrink_waits_for_late_members(late: int, hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A late member still accepts connections, so the other members keep waiting for it."""
    monkeypatch.setattr(address, "REJOIN_TIMEOUT_S", 0.2)
    requests: Channel[None] = Channel(across="processes")
    is_late = address._is_late

    def tells(old: Any, ranks: list[int], give_up: float) -> bool:
        found = is_late(old, ranks, give_up)
        if late in ranks and found:
            requests.put(None)
        return found

    monkeypatch.setattr(address, "_is_late", tells)

    def body(g: Any) -> Any:
        g.barrier()
        if g.rank == 1:
            die()
        if g.rank == late:
            for _ in range(4):
                requests.get()
        return shrunk(g)

    survivors = [rank for rank in range(len(hosts)) if rank != 1]
    expected = {old: (new, len(survivors), len(survivors), survivors) for new, old in enumerate(survivors)}
    assert OverHosts(hosts, body).results(len(survivors)) == expected


def test_shrink_retries_if_a_member_arrives_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a timeout, ``shrink`` never raises ``TimeoutError``."""
    monkeypatch.setattr(address, "REJOIN_TIMEOUT_S", 1.0)
    was_late: Channel[None] = Channel(across="processes")
    meet_by = address.meet_by

    def body(g: Any) -> Any:
        tries: list[int] = []

        def meets(*given: Any) -> Any:
            tries.append(g.rank)
            if len(tries) == 1 and g.rank == 2:
                was_late.get()
            try:
                return meet_by(*given)
            finally:
                if len(tries) == 1 and g.rank == 0:
                    was_late.put(None)

        g.barrier()
        if g.rank == 1:
            die()
        monkeypatch.setattr(address, "meet_by", meets)
        return shrunk(g), len(tries)

    found = OverHosts("aab", body).results(2)
    assert found == {0: ((0, 2, 2, [0, 2]), 2), 2: ((1, 2, 2, [0, 2]), 2)}


def test_shrink_timeout_ends_the_wait_for_a_late_member(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even members that have already reached rank 0 get the error."""
    monkeypatch.setattr(address, "REJOIN_TIMEOUT_S", 1.0)
    ended: Channel[None] = Channel(across="processes")

    def body(g: Any) -> Any:
        g.barrier()
        if g.rank == 1:
            die()
        if g.rank == 3:
            ended.get()
            return None
        with pytest.raises(MemberDied):
            work(g)
        if g.rank == 2:
            with pytest.raises(TimeoutError, match=r"shrink of .* timed out"):
                g.shrink(timeout=0.5)
            ended.put(None)
            return None
        with g.shrink() as new:
            return new.size

    assert OverHosts("aaab", body).results(3) == {0: 1, 2: None, 3: None}


def test_shrink_fails_without_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "REJOIN_TIMEOUT_S", 0.5)

    def body(g: Any) -> Any:
        g.barrier()
        if g.rank == 0:
            die()
        with pytest.raises(MemberDied):
            work(g)
        with pytest.raises(
            GroupError,
            match=r"rank 0, which decides which members remain, has not answered.*create a new group",
        ):
            g.shrink()
        return True

    assert OverHosts("aab", body).results(2) == {1: True, 2: True}


def test_shrink_fails_only_on_members_cut_off_from_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the network is partitioned, only the part with rank 0 continues."""
    monkeypatch.setattr(address, "REJOIN_TIMEOUT_S", 1.0)

    def cut(*_: Any, why: str, **__: Any) -> Any:
        raise OSError(why)

    def body(g: Any) -> Any:
        g.barrier()
        if g.rank == 1:
            die()
        if g.rank < 3:
            return shrunk(g)
        monkeypatch.setattr(address, "reach", cut)
        with pytest.raises(MemberDied):
            work(g)
        with pytest.raises(GroupError, match="rank 3 cannot join the smaller group"):
            g.shrink()
        return None

    assert OverHosts("aabb", body).results(3) == {0: (0, 2, 2, [0, 2]), 2: (1, 2, 2, [0, 2]), 3: None}


def test_shrink_without_address_raises_with_remedy() -> None:
    def body(g: Any) -> Any:
        with (
            g.split(0) as part,
            pytest.raises(GroupError, match="was created without an address"),
        ):
            part.shrink()
        return g.allreduce(1)

    assert OverHosts("aab", body).results(3) == dict.fromkeys(range(3), 3)
