"""The first message from one member to another makes the way there, which all that follow take."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
from collective_members import SECRET
from peers import ThreadPeer
from waiting import wait_until

from flowchan import GroupError, MemberDied
from flowchan.collective import far_lanes, members
from flowchan.collective.far_lanes import FarLanes, Way
from flowchan.transport.door import Door
from flowchan.transport.tcp import listen as listen_at

WAY = Way(SECRET, "127.0.0.1")
Pair = tuple[Any, Any]


def near(stack: ExitStack) -> Pair:
    """The messages of two members on one host."""
    mine, other = (stack.enter_context(member) for member in members(2))
    mine._take_seat()
    other._take_seat()
    return mine._lanes, other._lanes  # type: ignore[attr-defined]


def far(stack: ExitStack) -> Pair:
    """Those of two members on two hosts."""
    doors = [WAY.door({"rank": rank}) for rank in (0, 1)]
    both = [FarLanes(rank, doors[rank], [door.address for door in doors], WAY) for rank in (0, 1)]
    for one in both:
        stack.callback(one.close, wait=False)
    return both[0], both[1]


@pytest.fixture(params=[near, far])
def pair(request: pytest.FixtureRequest) -> Iterator[Callable[[], Pair]]:
    with ExitStack() as stack:
        yield lambda: request.param(stack)


def test_first_messages_of_several_threads_all_arrive(pair: Callable[[], Pair]) -> None:
    for _ in range(10):
        mine, other = pair()
        together = threading.Barrier(4)

        def send(number: int, mine: Any = mine, together: Any = together) -> None:
            together.wait()
            mine.send(number, 1, None)

        threads = [ThreadPeer(send, number) for number in range(4)]
        for thread in threads:
            thread.result()
        assert sorted(other.receive(0, 20.0) for _ in threads) == [0, 1, 2, 3]


class Interrupted:
    """A member whose first call to show where messages are is cut off by Ctrl-C."""

    def __init__(self, member: Any, when: str) -> None:
        self._member, self._when = member, when

    def __getattr__(self, name: str) -> Any:
        return getattr(self._member, name)

    def _show_lane(self, *lane: Any) -> None:
        when, self._when = self._when, ""
        if when != "before":
            self._member._show_lane(*lane)
        if when:
            raise KeyboardInterrupt


@pytest.mark.parametrize("when", ["before", "after"])
def test_after_a_first_message_that_ctrl_c_cut_off_the_next_ones_arrive(when: str) -> None:
    with ExitStack() as stack:
        mine, other = near(stack)
        mine._member = Interrupted(mine._member, when)
        with pytest.raises(KeyboardInterrupt):
            mine.send("cut off", 1, None)
        mine.send("next", 1, None)
        assert other.receive(0, 20.0) == "next"


def test_after_a_first_message_to_another_host_that_ctrl_c_cut_off_the_next_ones_arrive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There must be no other connection: that might be the one that is listened to."""
    threads: list[threading.Thread] = []

    class Outgoing(far_lanes._Outgoing):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            threads.append(self._thread)
            if len(threads) == 1:
                raise KeyboardInterrupt

    monkeypatch.setattr(far_lanes, "_Outgoing", Outgoing)
    with ExitStack() as stack:
        mine, other = far(stack)
        with pytest.raises(KeyboardInterrupt):
            mine.send("cut off", 1, None)
        wait_until(lambda: not threads[0].is_alive())
        mine.send("next", 1, None)
        assert other.receive(0, 20.0) == "next"


def test_who_has_left_sends_nothing_to_another_host() -> None:
    with ExitStack() as stack:
        mine, _ = far(stack)
        mine.send("before", 1, None)
        mine.close(wait=False)
        with pytest.raises(GroupError, match="send was not done: this member has left"):
            mine.send("after", 1, None)


@contextmanager
def stranger() -> Iterator[Door]:
    """Another program at a port of this host, which knows another secret."""
    over = threading.Event()

    def listen() -> None:
        while not over.is_set():
            with suppress(TimeoutError):
                door.accept(0.02)

    with Door(listen_at("127.0.0.1:0"), b"of another program", {}) as door:
        listener = ThreadPeer(listen)
        try:
            yield door
        finally:
            over.set()
            listener.result()


def test_a_member_whose_port_another_program_has_now_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has sent to it ends, and waits no longer for it."""
    monkeypatch.setattr(far_lanes, "STRANGE", 0.0)
    with stranger() as there, WAY.door({}) as door:
        mine = FarLanes(0, door, ["", there.address], WAY)
        mine.send("in vain", 1, None)
        ThreadPeer(mine.close).result()
    assert there.refused


@pytest.mark.parametrize("call", ["receive", "receive_any"])
def test_nor_is_it_waited_for_by_who_receives(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(far_lanes, "STRANGE", 0.0)
    monkeypatch.setattr(far_lanes, "BRIEF", 20.0)

    def receive() -> Any:
        if call == "receive":
            return mine.receive(1, None)
        while True:
            with suppress(TimeoutError):
                return mine.receive_any([1], 0.1, far_lanes.LONG + time.monotonic())

    with stranger() as there, WAY.door({}) as door:
        mine = FarLanes(0, door, ["", there.address], WAY)
        with pytest.raises(MemberDied, match=r"rank 1, on another host, (died|has left)"):
            ThreadPeer(receive).result()
        mine.close()


def test_who_only_looks_is_none_who_has_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is let in by a member that is there, waits for one that is not, and either way that is not gone."""
    monkeypatch.setattr(far_lanes, "STRANGE", 0.0)
    with ExitStack() as stack:
        mine, other = far(stack)
        give_up = time.monotonic() + 1000
        assert not mine._is_gone(1, give_up)  # it does not look at its door now
        monkeypatch.setattr(far_lanes, "BRIEF", 20.0)
        peer = ThreadPeer(other.receive, 0, None)
        assert not mine._is_gone(1, give_up)
        assert not mine._strange_since
        mine.send("at last", 1, None)
        assert peer.result() == "at last"
