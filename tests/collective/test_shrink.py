"""Test that a group's survivors agree on the remaining members and form a new group.

More members may die during ``shrink``.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.group_members import Processes, die, in_threads, raised, shrunk
from support.waiting import wait_until

from flowchan.collective import shrink
from flowchan.collective.one_host import SharedGroup
from flowchan.collective.shrink import Shrinking
from flowchan.errors import MemberDied, MemberLeft


@pytest.mark.parametrize("victims", [{0}, {2}, {0, 1}, {1, 3}, {0, 1, 2}])
def test_shrink_keeps_the_order_of_the_survivors(victims: set[int]) -> None:
    def body(g: Any) -> Any:
        g.barrier()
        if g.rank in victims:
            die()
        return shrunk(g)

    survivors = sorted({0, 1, 2, 3} - victims)
    found = Processes(4, body).results(len(survivors))
    assert found == {
        old: (new, len(survivors), len(survivors), survivors) for new, old in enumerate(survivors)
    }


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("victim", "at"),
    [
        (0, "_lead"), (1, "_follow"), (3, "_follow"),
        *((rank, call) for rank in (0, 1, 3) for call in ("_take_slot", "_wait_for_all")),
    ],
)  # fmt: skip
def test_shrink_survives_a_death_during_the_call(
    victim: int, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The victim is the member that creates the new group, or another member.

    The victim dies before the offer, before joining, or before all members have joined.
    """

    def body(g: Any) -> Any:
        g.barrier()
        if g.rank == 2:
            die()
        if g.rank == victim:
            monkeypatch.setattr(Shrinking if at in ("_lead", "_follow") else SharedGroup, at, dies)
        return shrunk(g)

    before = getattr(SharedGroup, at, None)

    def dies(self: Any, *arguments: Any) -> Any:
        """Kill this member when it calls this function."""
        if isinstance(self, SharedGroup) and self.size == 4:
            assert before is not None
            return before(self, *arguments)
        return die()

    survivors = sorted({0, 1, 3} - {victim})
    found = Processes(4, body).results(2)
    assert found == {old: (new, 2, 2, survivors) for new, old in enumerate(survivors)}


def test_shrink_ignores_members_that_left_and_interrupts_waiting_members() -> None:
    """Two members have left. Other members still wait in an operation, and their waits are interrupted."""
    survivors = threading.Event()

    def body(g: Any) -> Any:
        if g.rank == 0:
            g.close()
            return None
        if g.rank == 1:
            with pytest.raises(MemberLeft):
                g.barrier()
            g.close()
            survivors.set()
            return None
        if g.rank == 2:
            survivors.wait()
            return g.shrink(name="rest").allgather(g.rank)
        with pytest.raises(MemberDied):
            g.barrier()
        new = g.shrink(name="rest")
        return new.allgather(g.rank)

    assert in_threads(5, body)[2:] == [[2, 3, 4]] * 3


WAITS: dict[str, Callable[[Any], Any]] = {
    "receive": lambda g: g.receive(0),
    "receive_any": lambda g: g.receive_any(),
    "send": lambda g: [g.send(number, 0) for number in range(1000)],
}


@pytest.mark.parametrize("call", WAITS)
def test_shrink_interrupts_a_waiting_receive(call: str) -> None:
    """All members are alive and have already exchanged messages."""

    def body(g: Any) -> Any:
        assert g.sendreceive(g.rank, to=1 - g.rank, source=1 - g.rank) == 1 - g.rank
        g.barrier()  # otherwise, rank 1 might still be receiving the message
        if g.rank == 1:
            with pytest.raises(MemberDied):
                WAITS[call](g)
        return g.shrink().allgather(g.rank)

    assert in_threads(2, body) == [[0, 1]] * 2


def test_shrink_does_not_wait_for_unread_messages() -> None:
    gave_up = threading.Event()

    def body(g: Any) -> None:
        if g.rank == 1:
            gave_up.wait()
            return
        g.send("never received", 1)
        with pytest.raises(TimeoutError):
            g.shrink(timeout=0)
        gave_up.set()

    raised(in_threads(2, body))


def test_shrink_ends_started_operations_first() -> None:
    """After a failed shrink, a started operation must publish nothing more."""
    gave_up = threading.Event()

    def body(g: Any) -> None:
        if g.rank == 1:
            gave_up.wait()
            return
        handle = g.barrier(wait=False)
        wait_until(lambda: bool(g._see(0)[4]))
        with pytest.raises(TimeoutError):
            g.shrink(timeout=0)
        gave_up.set()
        with pytest.raises(MemberDied, match="gave up"):
            handle.wait()

    raised(in_threads(2, body))


def test_interrupted_shrink_releases_members_that_have_joined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupted, done = threading.Event(), threading.Event()
    follow, wait = Shrinking._follow, Shrinking._wait

    def wait_or_interrupt(self: Any, survivors: list[int]) -> None:
        if self._old.rank == 0 and survivors == [2]:  # once member 1 has joined
            raise KeyboardInterrupt
        wait(self, survivors)

    def follow_late(self: Any) -> Any:
        if self._old.rank == 2:
            interrupted.wait()
        return follow(self)

    monkeypatch.setattr(Shrinking, "_wait", wait_or_interrupt)
    monkeypatch.setattr(Shrinking, "_follow", follow_late)

    def body(g: Any) -> Any:
        if g.rank == 0:
            with pytest.raises(KeyboardInterrupt) as caught:
                g.shrink()
            interrupted.set()
            done.wait()
            del caught  # the exception keeps everything that the leader created alive
            return None
        found = g.shrink().allgather(g.rank)
        done.set()
        return found

    assert in_threads(3, body) == [None, [1, 2], [1, 2]]


def test_shrink_raises_only_on_a_member_without_free_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take_over, at_their_limit = shrink.take_over, set()

    def take_over_or_fail(handle: Any) -> Any:
        if threading.get_ident() in at_their_limit:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return take_over(handle)

    monkeypatch.setattr(shrink, "take_over", take_over_or_fail)

    def body(g: Any) -> Any:
        if g.rank == 1:
            at_their_limit.add(threading.get_ident())
            with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
                g.shrink()
            return None
        return g.shrink().allgather(g.rank)

    assert in_threads(3, body) == [[0, 2], None, [0, 2]]


def test_shrink_timeout_names_missing_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting member checks the others at growing intervals."""
    late = threading.Event()
    checks: list[tuple[int, int]] = []
    is_left = Shrinking._is_survivor

    def check(self: Any, member: int) -> bool:
        checks.append((self._old.rank, member))
        return is_left(self, member)

    monkeypatch.setattr(Shrinking, "_is_survivor", check)

    def body(g: Any) -> Any:
        if g.rank == 2:
            late.wait()
        if g.rank == 0:
            with pytest.raises(
                TimeoutError, match=r"shrink of a group of 3 .*: ranks \[1, 2\] did not arrive"
            ):
                g.shrink(timeout=0.05)
            checked = checks.count((0, 1))
            late.set()
            return checked
        late.wait()
        return g.shrink().allgather(g.rank)

    checked, *others = in_threads(3, body)
    assert others == [[1, 2]] * 2
    assert checked < 10


def test_group_can_shrink_until_one_member_is_left() -> None:
    """Members are killed at random times. The survivors always complete the same operations."""
    chance = random.Random(3)

    def body(g: Any) -> Any:
        sizes, done = [], 0
        while g.size > 1:
            try:
                assert g.allreduce(1) == g.size
                done += 1
                assert g.allgather(done) == [done] * g.size
                done += 1
            except MemberDied:
                g = g.shrink()
                sizes.append(g.size)
        g.close()
        return sizes

    members = Processes(6, body)
    order = chance.sample(members.children, 6)
    for child in order[:-1]:
        for _ in range(chance.randrange(20)):
            os.sched_yield()
        child.kill()
    (sizes,) = raised(list(members.results(1).values()))
    assert sizes[-1] == 1
    assert sizes == sorted(sizes, reverse=True)
