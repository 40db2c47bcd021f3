"""``Lock`` and ``Semaphore`` between programs on several hosts."""

from __future__ import annotations

from pathlib import Path

import pytest
from peers import HostPeer
from waiting import wait_blocked

from flowchan import Channel
from flowchan.pipelines import Lock, Semaphore

pytestmark = pytest.mark.usefixtures("impatient")


def test_one_at_a_time_is_inside_on_all_hosts(tmp_path: Path) -> None:
    """A file read and written again in two steps loses nothing."""
    counter = tmp_path / "counter"
    counter.write_text("0")
    lock = Lock(across="hosts")

    def count() -> None:
        for _ in range(30):
            with lock:
                counter.write_text(str(int(counter.read_text()) + 1))

    peers = [HostPeer(count) for _ in range(2)]
    count()
    for peer in peers:
        peer.result()
    assert counter.read_text() == "90"
    assert not lock.locked()


def test_try_and_timeout_give_false_while_another_host_has_it() -> None:
    lock = Lock(across="hosts")

    def attempt() -> list[bool]:
        return [lock.acquire(blocking=False), lock.acquire(timeout=0.01), lock.locked()]

    with lock:
        assert HostPeer(attempt).result() == [False, False, True]
    assert HostPeer(lambda: lock.acquire(blocking=False)).result()


def test_when_the_holder_elsewhere_is_killed_the_next_one_gets_it() -> None:
    """C11."""
    lock, entered = Lock(across="hosts"), Channel(across="hosts")

    def hold() -> None:
        with lock:
            entered.put("first")
            entered.reader().get()

    peer = HostPeer(hold)
    assert entered.get() == "first"
    peer.kill()
    peer.join()
    with lock:
        assert lock.locked()
    assert not lock.locked()


def test_a_semaphore_lets_so_many_be_inside_on_all_hosts() -> None:
    seats, entered = Semaphore(2, across="hosts"), Channel(across="hosts")

    def enter() -> None:
        with seats:
            entered.put("inside")

    with seats:
        seats.acquire()
        peer = HostPeer(enter)
        wait_blocked(seats.channels[0], readers=1)
        assert not len(entered)
        seats.release()
        peer.result()
    assert entered.get() == "inside"
