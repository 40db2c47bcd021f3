"""``shrink``: the survivors of a group agree on who is left, whoever dies meanwhile, and go on."""

from __future__ import annotations

import os
import random
import signal
import threading
from typing import Any

import pytest
from collective_members import Processes, in_threads

from flowchan.collective import GroupError, MemberDied, MemberLeft
from flowchan.collective.shared import SharedGroup
from flowchan.collective.shrinking import Shrinking


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def work(g: Any) -> None:
    while True:
        g.barrier()


def shrunk(g: Any) -> Any:
    with pytest.raises(MemberDied):
        work(g)
    with g.shrink() as new:
        total = new.allreduce(1)
        with pytest.raises(GroupError, match="was closed"):
            g.barrier()
        return new.rank, new.size, total, new.allgather(g.rank)


@pytest.mark.parametrize("victims", [{0}, {2}, {0, 1}, {1, 3}, {0, 1, 2}])
def test_the_survivors_become_a_group_in_their_order(victims: set[int]) -> None:
    def body(g: Any) -> Any:
        g.barrier()
        if g.rank in victims:
            die()
        return shrunk(g)

    left = sorted({0, 1, 2, 3} - victims)
    found = Processes(4, body).results(len(left))
    assert found == {old: (new, len(left), len(left), left) for new, old in enumerate(left)}


@pytest.mark.parametrize(
    ("victim", "at"),
    [
        (0, "_lead"), (1, "_follow"), (3, "_follow"),
        *((rank, call) for rank in (0, 1, 3) for call in ("_take_seat", "_wait_for_all")),
    ],
)  # fmt: skip
def test_a_death_during_it_is_survived(victim: int, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first one, who makes the group, and of others: before it is offered or taken, before they have
    a seat in it, before all have met."""

    def body(g: Any) -> Any:
        g.barrier()
        if g.rank == 2:
            die()
        if g.rank == victim:
            monkeypatch.setattr(Shrinking if at in ("_lead", "_follow") else SharedGroup, at, dies)
        return shrunk(g)

    before = getattr(SharedGroup, at, None)

    def dies(self: Any, *arguments: Any) -> Any:
        """In what belongs to the new group."""
        if isinstance(self, SharedGroup) and self.size == 4:
            assert before is not None
            return before(self, *arguments)
        return die()

    left = sorted({0, 1, 3} - {victim})
    found = Processes(4, body).results(2)
    assert found == {old: (new, 2, 2, left) for new, old in enumerate(left)}


def test_who_has_left_is_not_waited_for_and_who_works_on_hears_of_it() -> None:
    """Whether it has left before, or after it gave up."""
    left = threading.Event()

    def body(g: Any) -> Any:
        if g.rank == 0:
            g.close()
            return None
        if g.rank == 1:
            with pytest.raises(MemberLeft):
                g.barrier()
            g.close()
            left.set()
            return None
        if g.rank == 2:
            left.wait()
            return g.shrink(name="rest").allgather(g.rank)
        with pytest.raises(MemberDied):
            g.barrier()
        new = g.shrink(name="rest")
        return new.allgather(g.rank)

    assert in_threads(5, body)[2:] == [[2, 3, 4]] * 3


def test_a_timeout_names_who_has_not_come_and_is_only_that_one_s() -> None:
    late = threading.Event()

    def body(g: Any) -> Any:
        if g.rank == 2:
            late.wait()
        if g.rank == 0:
            with pytest.raises(TimeoutError, match=r"shrink of a group of 3 .*: \[1, 2\] have not come"):
                g.shrink(timeout=0.05)
            late.set()
            return None
        late.wait()
        return g.shrink().allgather(g.rank)

    assert in_threads(3, body)[1:] == [[1, 2]] * 2


def test_a_group_that_has_been_shrunk_can_be_shrunk_again_until_one_is_left() -> None:
    """Killed at any moment: all survivors have done the same number of operations, each with all members."""
    chance = random.Random(3)

    def body(g: Any) -> Any:
        sizes = []
        while g.size > 1:
            try:
                total = g.allreduce(1)
            except MemberDied:
                g = g.shrink()
                sizes.append(g.size)
            else:
                assert total == g.size
        g.close()
        return sizes

    members = Processes(6, body)
    order = chance.sample(members.children, 6)
    for child in order[:-1]:
        for _ in range(chance.randrange(20)):
            os.sched_yield()
        child.kill()
    (sizes,) = members.results(1).values()
    assert sizes[-1] == 1
    assert sizes == sorted(sizes, reverse=True)
