"""Test ``Lock`` and ``Semaphore``, shared by threads in one or several processes.

The processes run on one machine or on several hosts.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from between import PEERS, between, everywhere, start
from support.scripted_clock import ScriptedClock
from support.waiting import wait_blocked, wait_until

from flowchan import Broken, Channel, Empty
from flowchan.pipelines import Lock, Semaphore, locks, map  # noqa: A004


def fork(work: Callable[[], object]) -> Any:
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    return child


# Lock


@everywhere
def test_lock_admits_one_user_at_a_time(across: Any, on: Any, tmp_path: Path) -> None:
    """Although the file is read and written in two separate steps, no change is lost."""
    counter = tmp_path / "counter"
    counter.write_text("0")

    def count(lock: Lock, worker: int) -> None:
        for _ in range(50):
            with lock:
                counter.write_text(str(int(counter.read_text()) + 1))

    lock = Lock(across=across)
    start(on, 4, count, lock).join()
    assert counter.read_text() == "200"
    assert not lock.locked()


@between
def test_threads_and_processes_share_one_lock(across: Any, tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    counter.write_text("0")

    def count(lock: Lock, worker: int) -> None:
        for _ in range(50):
            with lock:
                counter.write_text(str(int(counter.read_text()) + 1))

    lock = Lock(across=across)
    here, there = map(2, count, lock), [PEERS[across](count, lock, worker) for worker in (1, 2)]
    here.join()
    for peer in there:
        peer.result()
    assert counter.read_text() == "200"


@between
def test_a_thread_can_acquire_its_lock_again(across: Any) -> None:
    lock = Lock(across=across)
    with lock, lock:
        assert lock.locked()
    assert not lock.locked()


@between
def test_acquire_returns_false_while_another_holds_the_lock(across: Any) -> None:
    lock = Lock(across=across)

    def attempt(worker: int) -> tuple[bool, bool, bool]:
        return lock.locked(), lock.acquire(blocking=False), lock.acquire(timeout=0.01)

    with lock:
        assert map(1, attempt).join() == [(True, False, False)]
        assert PEERS[across](attempt, 1).result() == (True, False, False)
    assert lock.acquire(blocking=False)
    lock.release()


class TimedTurn:
    """Stand-in for the lock between the threads of this process. Acquiring it takes 4 s."""

    def __init__(self, clock: ScriptedClock) -> None:
        self._clock = clock
        self.free = True

    def acquire(self, blocking: bool, timeout: float) -> bool:
        self._clock.now += 4.0
        self.free = False
        return True

    def release(self) -> None:
        self.free = True


class TokenPort:
    """Stand-in for a port without a token. It records how long its reader would wait."""

    def __init__(self) -> None:
        self.timeouts: list[float] = []

    def get(self, timeout: float) -> None:
        self.timeouts.append(timeout)
        raise Empty

    def __exit__(self, *_: object) -> None:
        """Accept a token that is returned."""


@pytest.mark.parametrize(("timeout", "remaining"), [(10.0, 6.0), (4.0, 0.0), (3.0, 0.0)])
def test_waiting_for_threads_of_the_process_counts_towards_the_timeout(
    timeout: float, remaining: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, port, lock = ScriptedClock(), TokenPort(), Lock()
    turn = TimedTurn(clock)
    monkeypatch.setattr(locks, "time", clock)
    monkeypatch.setattr(lock, "_turn", turn)
    monkeypatch.setattr(lock, "channels", (SimpleNamespace(reader=lambda: port),))
    assert lock.acquire(timeout=timeout) is False
    assert port.timeouts == [remaining]
    assert turn.free


def test_only_the_holder_can_release_the_lock() -> None:
    lock = Lock()
    with pytest.raises(RuntimeError):
        lock.release()
    with lock, pytest.raises(Exception, match="1 of 1 workers"):
        map(1, lambda worker: lock.release()).join()


@between
def test_lock_received_twice_is_one_lock(across: Any) -> None:
    lock = Lock(across=across)
    assert pickle.loads(pickle.dumps(lock)) is lock
    with lock, pickle.loads(pickle.dumps(lock)):
        pass


ENDS: dict[str, Callable[[], object]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exited": lambda: os._exit(3),
    "left": lambda: sys.exit(0),
}
"""Ways in which a process can end."""


@between
@pytest.mark.parametrize("end", ENDS)
def test_next_waiter_gets_the_lock_when_its_holder_dies(across: Any, end: str) -> None:
    lock = Lock(across=across)

    def hold() -> None:
        lock.acquire()
        ENDS[end]()

    child = PEERS[across](hold)
    child.join()
    with lock:
        assert lock.locked()
    assert not lock.locked()


@between
def test_waiting_process_gets_the_lock_when_its_holder_is_killed(across: Any) -> None:
    lock, entered = Lock(across=across), Channel[str](2, across=across)

    def hold() -> None:
        with lock:
            entered.put("first")
            signal.pause()

    def follow() -> None:
        with lock:
            entered.put("second")

    first = PEERS[across](hold)
    assert entered.get() == "first"
    second = PEERS[across](follow)
    wait_blocked(lock.channels[0], readers=1)
    first.kill()
    assert entered.get() == "second"
    first.join()
    second.result()


@between
def test_forked_child_does_not_hold_its_parents_lock(across: Any) -> None:
    lock = Lock(across=across)
    reported = Channel[bool](2, across="processes")

    def attempt() -> None:
        reported.put(lock.acquire(blocking=False))
        with lock:
            reported.put(True)

    with lock:
        child = fork(attempt)
        assert reported.get() is False
        wait_blocked(lock.channels[0], readers=1)
        assert lock.locked()
    assert reported.get() is True
    child.join()


def take(lock: Lock, inside: Any) -> None:
    """Take the lock in a spawned process."""
    with lock:
        inside.put("inside")


def test_lock_can_be_an_argument_of_a_spawned_process() -> None:
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


@pytest.mark.usefixtures("impatient")
def test_silent_process_loses_the_lock_after_peer_timeout() -> None:
    """C11: a silent process counts as lost with its host, so it loses its lock."""
    lock, silence = Lock(across="hosts"), Channel[None](across="hosts")

    def hold() -> None:
        lock.acquire()
        with pytest.raises(Broken):
            silence.get()

    holder = PEERS["hosts"](hold)
    wait_blocked(silence, readers=1)
    os.kill(holder.pid(), signal.SIGSTOP)
    with lock:
        os.kill(holder.pid(), signal.SIGCONT)
        holder.result()
        assert not PEERS["hosts"](lock.acquire, False).result()


# Semaphore


@everywhere
def test_semaphore_limits_the_number_of_users_inside(across: Any, on: Any) -> None:
    inside = Channel[int](2, across=across)  # a third user would find the channel full

    def enter(semaphore: Semaphore, inside: Channel[int], worker: int) -> None:
        for _ in range(20):
            with semaphore:
                inside.put_nowait(worker)
                inside.get_nowait()

    semaphore = Semaphore(2, across=across)
    start(on, 4, enter, semaphore, inside).join()
    assert repr(semaphore) == "<Semaphore, 2 of 2 free>"


@between
def test_semaphore_can_be_acquired_with_and_without_blocking(across: Any) -> None:
    semaphore = Semaphore(2, across=across)
    assert semaphore.acquire()
    assert semaphore.acquire(timeout=0.01)
    assert not semaphore.acquire(blocking=False)
    assert not semaphore.acquire(timeout=0.01)
    waiting = PEERS[across](semaphore.acquire)
    wait_blocked(semaphore.channels[0], readers=1)
    semaphore.release()
    assert waiting.result()


def test_process_cannot_release_more_permits_than_it_acquired() -> None:
    """A process counts the permits of all its threads together."""
    semaphore = Semaphore(2)
    semaphore.acquire()
    map(1, lambda worker: semaphore.release()).join()
    with pytest.raises(ValueError, match="does not hold a permit"):
        semaphore.release()
    with pytest.raises(ValueError, match="at least 1"):
        Semaphore(0)


@between
@pytest.mark.parametrize("end", ENDS)
def test_permits_of_dead_process_become_free(across: Any, end: str) -> None:
    semaphore, others = Semaphore(3, across=across), Channel[None](across=across)

    def hold() -> None:
        semaphore.acquire()
        semaphore.acquire()
        others.put(None)
        others.flush()  # a killed process loses the items that its port has not sent
        ENDS[end]()

    with semaphore:
        child = PEERS[across](hold)
        others.get()
        assert semaphore.acquire()
        assert semaphore.acquire()
        assert not semaphore.acquire(blocking=False)  # this process still holds its permits
        for _ in range(2):
            semaphore.release()
        child.join()
    wait_until(lambda: len(semaphore.channels[0]) == 3)


@between
def test_forked_child_holds_no_permits(across: Any) -> None:
    semaphore, reported = Semaphore(1, across=across), Channel[str](across="processes")

    def release() -> None:
        try:
            semaphore.release()
        except ValueError:
            reported.put("nothing to release")
        reported.put(f"{semaphore.acquire(blocking=False)}")

    with semaphore:
        child = fork(release)
        assert [reported.get(), reported.get()] == ["nothing to release", "False"]
        child.join()
    assert semaphore.acquire(blocking=False)
    semaphore.release()
