"""``Lock`` and ``Barrier``: between the threads of one process and of several."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import wait_blocked, wait_stats, wait_until

from flowchan import Channel
from flowchan.pipelines import Barrier, Lock, map  # noqa: A004

everywhere = pytest.mark.parametrize("on", ["thread", "process"])


def fork(work: Callable[[], object]) -> Any:
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    return child


# Lock


@everywhere
def test_one_at_a_time_is_inside(on: Any, tmp_path: Path) -> None:
    """A file read and written again in two steps loses nothing."""
    counter = tmp_path / "counter"
    counter.write_text("0")

    def count(lock: Lock, worker: int) -> None:
        for _ in range(50):
            with lock:
                counter.write_text(str(int(counter.read_text()) + 1))

    lock = Lock()
    map(4, count, lock, on=on).join()
    assert counter.read_text() == "200"
    assert not lock.locked()


def test_threads_and_processes_share_one_lock(tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    counter.write_text("0")

    def count(lock: Lock, worker: int) -> None:
        for _ in range(50):
            with lock:
                counter.write_text(str(int(counter.read_text()) + 1))

    lock = Lock()
    here, there = map(2, count, lock), map(2, count, lock, on="process")
    here.join()
    there.join()
    assert counter.read_text() == "200"


def test_a_thread_may_take_it_again() -> None:
    lock = Lock()
    with lock, lock:
        assert lock.locked()
    assert not lock.locked()


def test_try_and_timeout_give_false_while_another_has_it() -> None:
    lock = Lock()

    def attempt(worker: int) -> tuple[bool, bool]:
        return lock.acquire(blocking=False), lock.acquire(timeout=0.01)

    with lock:
        assert map(1, attempt).join() == [(False, False)]
        assert map(1, attempt, on="process").join() == [(False, False)]
    assert lock.acquire(blocking=False)
    lock.release()


def test_only_the_holder_releases() -> None:
    lock = Lock()
    with pytest.raises(RuntimeError):
        lock.release()
    with lock, pytest.raises(Exception, match="1 of 1 workers"):
        map(1, lambda worker: lock.release()).join()


def test_a_lock_that_arrives_twice_is_one_lock() -> None:
    lock = Lock()
    assert pickle.loads(pickle.dumps(lock)) is lock
    with lock, pickle.loads(pickle.dumps(lock)):
        pass


@pytest.mark.parametrize(
    "end",
    [lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: os._exit(3), lambda: sys.exit(0)],
    ids=["killed", "exited", "left"],
)
def test_when_the_holder_dies_the_next_one_gets_it(end: Callable[[], object]) -> None:
    lock = Lock()

    def hold() -> None:
        lock.acquire()
        end()

    child = fork(hold)
    child.join()
    with lock:
        assert lock.locked()
    assert not lock.locked()


def test_a_waiting_process_gets_it_when_the_holder_is_killed() -> None:
    lock, entered = Lock(), Channel[str](2, across="processes")

    def hold() -> None:
        with lock:
            entered.put("first")
            signal.pause()

    def follow() -> None:
        with lock:
            entered.put("second")

    first = fork(hold)
    assert entered.get() == "first"
    second = fork(follow)
    wait_blocked(lock.channels[0], readers=1)
    first.kill()
    assert entered.get() == "second"
    first.join()
    second.join()


def test_a_forked_child_does_not_hold_what_its_parent_holds() -> None:
    lock = Lock()
    told = Channel[bool](2, across="processes")

    def attempt() -> None:
        told.put(lock.acquire(blocking=False))
        with lock:
            told.put(True)

    with lock:
        child = fork(attempt)
        assert told.get() is False
        wait_blocked(lock.channels[0], readers=1)
        assert lock.locked()
    assert told.get() is True
    child.join()


def take(lock: Lock, inside: Any) -> None:
    """Runs in a spawned process."""
    with lock:
        inside.put("inside")


def test_a_lock_is_an_argument_of_a_spawned_process() -> None:
    lock, inside = Lock(), Channel[str](across="processes")
    child = multiprocessing.get_context("spawn").Process(target=take, args=(lock, inside))
    with lock:
        child.start()
        wait_blocked(lock.channels[0], readers=1)
        assert len(inside) == 0
    assert inside.get() == "inside"
    child.join()
    child.close()
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


# Barrier


def test_nobody_passes_before_all_are_there_and_writers_do_not_mix() -> None:
    """As torch-ipc's one test of its mutex: a shared array is seen unchanged before and changed after a
    meeting."""
    lock, barrier, shared = Lock(), Barrier(4), np.zeros(10_000)

    def work(worker: int) -> bool:
        before = shared.any()
        barrier.wait()
        with lock:
            shared.fill(worker)
        barrier.wait()
        after = shared.all()
        with lock:
            shared.fill(worker)
        return bool(after and not before)

    workers = map(3, work)
    assert not shared.any()
    barrier.wait()
    barrier.wait()
    assert shared.all()
    assert workers.join() == [True] * 3
    assert len(set(shared.tolist())) == 1


@everywhere
def test_a_barrier_is_used_again_and_again(on: Any) -> None:
    rounds, arrived = 50, Channel[int](1000, across="processes")

    def work(barrier: Barrier, worker: int) -> list[int]:
        places = []
        for number in range(rounds):
            arrived.put(number)
            places.append(barrier.wait())
            assert arrived.stats().items_in >= 3 * (number + 1)  # nobody has passed too early
        return places

    places = map(3, work, Barrier(3), on=on).join()
    assert [sorted(together) for together in zip(*places, strict=True)] == [[0, 1, 2]] * rounds


def test_threads_and_processes_meet_at_one_barrier() -> None:
    barrier = Barrier(4)
    meet: Callable[..., int] = lambda barrier, worker: barrier.wait()  # noqa: E731
    here, there = map(2, meet, barrier), map(2, meet, barrier, on="process")
    assert sorted(here.join() + there.join()) == [0, 1, 2, 3]


def test_a_barrier_of_one_never_waits() -> None:
    assert [Barrier(1).wait() for _ in range(3)] == [0, 0, 0]


@everywhere
def test_a_timeout_breaks_it_for_all(on: Any) -> None:
    barrier = Barrier(3)

    def meet(barrier: Barrier, worker: int) -> str:
        try:
            barrier.wait()
        except threading.BrokenBarrierError:
            return "broken"
        return "met"

    other = map(1, meet, barrier, on=on)
    wait_until(lambda: sum(gate.stats().waiting_readers for gate in barrier._gates) == 1)
    with pytest.raises(threading.BrokenBarrierError):
        barrier.wait(timeout=0.01)
    assert other.join() == ["broken"]
    assert barrier.broken
    with pytest.raises(threading.BrokenBarrierError):
        barrier.wait()


def test_a_place_left_by_a_participant_that_died_lets_nobody_pass_too_early() -> None:
    barrier = Barrier(2)
    first = fork(barrier.wait)
    wait_blocked(barrier._gates[0], readers=1)
    os.kill(first.pid, signal.SIGSTOP)  # it will not take its leave of the first meeting
    assert barrier.wait() == 1
    first.kill()
    first.join()
    for _ in range(2):  # its successor takes part in the second meeting and the third
        other = fork(barrier.wait)
        assert barrier.wait() in (0, 1)
        other.join()
    wait_stats(barrier._arrivals, items_in=6)
    assert [len(gate) for gate in barrier._gates] == [0, 0]


def test_wrong_parties_raise_at_the_call() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Barrier(0)
    with pytest.raises(TypeError, match="parties"):
        Barrier(2.0)  # type: ignore[arg-type]
