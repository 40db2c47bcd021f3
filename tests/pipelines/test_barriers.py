"""Test ``Barrier``, ``Event`` and ``Condition``, shared by threads in one or several processes.

The processes run on one machine or on several hosts.
"""

from __future__ import annotations

import functools
import os
import pickle
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from between import PEERS, between, everywhere, start
from support.peers import ThreadPeer
from support.waiting import wait_blocked, wait_stats, wait_until

from flowchan import Broken, Channel
from flowchan.hosts import serve
from flowchan.pipelines import Barrier, Condition, Event, Lock, Semaphore, SharedDict, map  # noqa: A004

# Barrier


def test_barrier_releases_no_thread_before_all_arrive() -> None:
    """A shared array changes only after all threads have arrived, as in torch-ipc's only mutex test."""
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
def test_barrier_can_be_reused(across: Any, on: Any) -> None:
    rounds, arrived = 20, Channel[int](1000, across=across)

    def work(barrier: Barrier, worker: int) -> list[int]:
        places = []
        for number in range(rounds):
            arrived.put(number)
            places.append(barrier.wait())
            assert arrived.stats().items_in >= 3 * (number + 1)  # no thread has passed the barrier too early
        return places

    places = start(on, 3, work, Barrier(3, across=across)).join()
    assert [sorted(together) for together in zip(*places, strict=True)] == [[0, 1, 2]] * rounds


@between
def test_threads_and_processes_can_share_one_barrier(across: Any) -> None:
    barrier = Barrier(4, across=across)
    meet: Callable[..., int] = lambda barrier, worker: barrier.wait()  # noqa: E731
    here, there = map(2, meet, barrier), [PEERS[across](meet, barrier, worker) for worker in (1, 2)]
    assert sorted([*here.join(), *(peer.result() for peer in there)]) == [0, 1, 2, 3]


def test_barrier_for_one_party_never_waits() -> None:
    assert [Barrier(1).wait() for _ in range(3)] == [0, 0, 0]


@everywhere
def test_timeout_breaks_the_barrier_for_all_parties(across: Any, on: Any) -> None:
    barrier = Barrier(3, across=across)

    def meet(barrier: Barrier, worker: int) -> str:
        try:
            barrier.wait()
        except threading.BrokenBarrierError:
            return "broken"
        return "met"

    other = start(on, 1, meet, barrier)
    wait_until(lambda: sum(gate.stats().waiting_readers for gate in barrier._generation.gates) == 1)
    with pytest.raises(threading.BrokenBarrierError):
        barrier.wait(timeout=0.01)
    assert other.join() == ["broken"]
    assert barrier.broken
    with pytest.raises(threading.BrokenBarrierError):
        barrier.wait()


@between
def test_death_of_a_participant_does_not_release_the_others_early(across: Any) -> None:
    barrier = Barrier(2, across=across)
    first = PEERS[across](barrier.wait)
    wait_blocked(barrier._generation.gates[0], readers=1)
    os.kill(first.pid(), signal.SIGSTOP)  # keeps the first process inside its first wait
    assert barrier.wait() == 1
    first.kill()
    first.join()
    for _ in range(2):  # in the second and third waits, another process takes the dead process's place
        other = PEERS[across](barrier.wait)
        assert barrier.wait() in (0, 1)
        other.join()
    wait_stats(barrier._generation.arrivals, items_in=6)
    assert [len(gate) for gate in barrier._generation.gates] == [0, 0]


def test_barrier_rejects_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Barrier(0)
    with pytest.raises(TypeError, match="parties"):
        Barrier(2.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="action must be callable"):
        Barrier(2, action=3)  # type: ignore[arg-type]


@everywhere
def test_barrier_action_runs_before_any_thread_is_released(across: Any, on: Any) -> None:
    done = Channel[int](across=across)

    def meet(barrier: Barrier, done: Channel[int], worker: int) -> bool:
        index = barrier.wait()
        return done.stats().items_in == 1 and index < 3

    barrier = Barrier(3, lambda: done.put(1), across=across)
    assert start(on, 3, meet, barrier, done).join() == [True] * 3


def test_an_action_that_raises_breaks_the_barrier() -> None:
    def fail() -> None:
        raise LookupError("nothing there")

    barrier = Barrier(2, fail)
    other = map(1, lambda worker: outcome(barrier.wait))
    wait_until(lambda: barrier.n_waiting == 1)
    with pytest.raises(LookupError, match="nothing there"):
        barrier.wait()
    assert other.join() == ["broken"]
    assert barrier.broken


def outcome(wait: Callable[[], object]) -> object:
    try:
        return wait()
    except threading.BrokenBarrierError:
        return "broken"


@everywhere
def test_barrier_reset_breaks_current_wait_but_not_later_waits(across: Any, on: Any) -> None:
    barrier = Barrier(3, across=across)

    def meet(barrier: Barrier, worker: int) -> object:
        return outcome(barrier.wait), outcome(barrier.wait)

    others = start(on, 2, meet, barrier)
    wait_until(lambda: barrier.n_waiting == 2)
    barrier.reset()
    assert not barrier.broken
    index = barrier.wait()
    reported, met = zip(*others.join(), strict=True)
    assert reported == ("broken", "broken")
    assert sorted([index, *met]) == [0, 1, 2]
    assert barrier.n_waiting == 0


@between
def test_reset_repairs_the_barrier_for_processes_that_saw_it_broken(across: Any) -> None:
    barrier, states = Barrier(2, across=across), Channel[bool](across=across)

    def look() -> None:
        states.put(outcome(barrier.wait) == "broken")
        go.get()
        states.put(barrier.broken)
        barrier.wait()

    go = Channel[None](across=across)
    barrier.abort()
    child = PEERS[across](look)
    assert states.get()
    barrier.reset()
    go.put(None)
    barrier.wait()
    assert not states.get()
    child.result()


# Event


@everywhere
def test_set_event_releases_current_and_later_waiters(across: Any, on: Any) -> None:
    event = Event(across=across)
    assert not event.wait(timeout=0.01)
    waiting = start(on, 3, lambda event, worker: event.wait(), event)
    wait_blocked(event._gates["now"], readers=3)
    assert repr(event) == "<Event not set>"
    event.set()
    event.set()
    assert waiting.join() == [True] * 3
    assert event.is_set()
    assert event.wait()


@between
def test_wait_blocks_after_the_event_is_cleared(across: Any) -> None:
    event = Event(across=across)
    for _ in range(3):
        waiting = PEERS[across](event.wait)
        wait_blocked(event._gates["now"], readers=1)
        event.set()
        assert waiting.result()
        event.clear()
        event.clear()
        assert not event.is_set()


@between
def test_waiter_of_set_event_continues_after_immediate_clear(across: Any) -> None:
    event = Event(across=across)
    waiting = [PEERS[across](event.wait) for _ in range(2)]
    wait_blocked(event._gates["now"], readers=2)
    event.set()
    event.clear()
    assert [peer.result() for peer in waiting] == [True, True]


@between
def test_death_of_a_process_does_not_change_the_event(across: Any) -> None:
    """One process dies while it waits for the event, and another after setting it."""
    event = Event(across=across)
    waiting = PEERS[across](event.wait)
    wait_blocked(event._gates["now"], readers=1)
    waiting.kill()
    waiting.join()
    assert not event.is_set()

    def set_and_die() -> None:
        event.clear()
        event.set()
        os.kill(os.getpid(), signal.SIGKILL)

    PEERS[across](set_and_die).join()
    assert event.wait()
    event.clear()
    assert not event.is_set()


@between
def test_condition_and_event_can_be_pickled_within_a_program(across: Any) -> None:
    event, condition = Event(across=across), Condition(across=across)
    pickle.loads(pickle.dumps(event)).set()
    assert event.is_set()
    with condition:
        assert repr(pickle.loads(pickle.dumps(condition))) == "<Condition, 0 waiting>"


# Condition


def waiters(condition: Condition) -> int:
    with condition:
        return len(condition._waiting)


@everywhere
def test_condition_waiters_take_one_shared_item_each(across: Any, on: Any) -> None:
    """A waiting thread holds the lock while it tests the predicate, as with any condition."""
    condition, store = Condition(across=across), SharedDict[str, Any]({"items": []}, across=across)

    def take(condition: Condition, store: SharedDict[str, Any], worker: int) -> list[int]:
        taken = []
        for _ in range(5):
            with condition:
                condition.wait_for(lambda: store["items"])
                items = store["items"]
                taken.append(items.pop())
                store["items"] = items
        return taken

    takers = start(on, 3, take, condition, store)
    for number in range(15):
        with condition:
            store["items"] = [*store["items"], number]
            condition.notify()
    assert sorted(item for taken in takers.join() for item in taken) == list(range(15))


@everywhere
def test_notify_wakes_n_waiters_in_fifo_order(across: Any, on: Any) -> None:
    condition, woken = Condition(across=across), Channel[int](across=across)

    def wait(condition: Condition, woken: Channel[int], worker: int) -> None:
        with condition:
            condition.wait()
            woken.put(worker)

    workers = []
    for number in range(4):
        workers.append(start(on, 1, lambda c, w, n, _: wait(c, w, n), condition, woken, number))
        wait_until(lambda number=number: waiters(condition) == number + 1)  # type: ignore[misc]
    with condition:
        condition.notify()
    assert woken.get() == 0
    with condition:
        condition.notify(2)
    assert sorted([woken.get(), woken.get()]) == [1, 2]
    with condition:
        condition.notify_all()
        condition.notify(5)
    assert woken.get() == 3
    for worker in workers:
        worker.join()
    assert waiters(condition) == 0


@between
def test_wait_that_times_out_reacquires_lock_and_removes_waiter(across: Any) -> None:
    condition = Condition(across=across)
    with condition, condition:  # wait() releases the lock completely, although it was acquired twice
        assert condition.wait(timeout=0.01) is False
        assert condition.wait_for(lambda: 0, timeout=0.01) == 0
        assert PEERS[across](condition.acquire, False).result() is False
    assert waiters(condition) == 0


@between
def test_notification_between_timeout_and_lock_counts(across: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has the lock when the wait times out, and notifies before it releases the lock."""
    condition = Condition(across=across)
    acquire = condition._lock._acquire_restore

    def acquire_late(depth: int) -> None:
        PEERS[across](notify_in, condition).result()
        acquire(depth)

    monkeypatch.setattr(condition._lock, "_acquire_restore", acquire_late)
    with condition:
        assert condition.wait(timeout=0.01) is True
    assert waiters(condition) == 0


def notify_in(condition: Condition) -> None:
    with condition:
        condition.notify()


def test_condition_methods_raise_without_the_lock() -> None:
    condition = Condition()
    for call in (condition.wait, condition.notify, condition.notify_all):
        with pytest.raises(RuntimeError, match="does not hold the lock"):
            call()
    with pytest.raises(TypeError, match=r"flowchan\.pipelines\.Lock"):
        Condition(threading.Lock())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Lock\(across='hosts'\)"):
        Condition(Lock(), across="hosts")


@between
def test_two_conditions_can_share_a_lock(across: Any) -> None:
    lock = Lock(across=across)
    first, second = Condition(lock), Condition(lock)
    waiting = PEERS[across](wait_in, first)
    wait_until(lambda: waiters(first) == 1)
    with second:
        second.notify_all()
        assert waiters(first) == 1
        first.notify_all()
    assert waiting.result()


def wait_in(condition: Condition) -> bool:
    with condition:
        return condition.wait()


@between
def test_killed_waiter_does_not_consume_a_notification(across: Any) -> None:
    """The next waiter gets the notification as soon as the death is noticed."""
    condition = Condition(across=across)
    first = PEERS[across](wait_in, condition)
    wait_until(lambda: waiters(condition) == 1)
    second = PEERS[across](wait_in, condition)
    wait_until(lambda: waiters(condition) == 2)
    with condition:
        gate = condition._waiting[next(iter(condition._waiting))]
    first.kill()
    first.join()
    wait_until(lambda: gate.closed)
    with condition:
        condition.notify()
    assert second.result()
    assert waiters(condition) == 0


@between
def test_killed_notifier_releases_lock_and_keeps_waiters(across: Any) -> None:
    condition, reported = Condition(across=across), Channel[None](across=across)
    waiting = PEERS[across](wait_in, condition)
    wait_until(lambda: waiters(condition) == 1)

    def hold() -> None:
        with condition:
            reported.put(None)
            signal.pause()

    child = PEERS[across](hold)
    reported.get()
    child.kill()
    child.join()
    with condition:
        condition.notify()
    assert waiting.result()


# Across hosts


def owner_of_all(reported: Channel[Any]) -> None:
    """Create objects on another host, and own them until this process ends."""
    serve(peer_timeout=2)
    condition = Condition(across="hosts")
    reported.put([Barrier(2, across="hosts"), Event(across="hosts"), condition, SharedDict(across="hosts")])
    with condition:
        condition.wait()


def test_waiters_raise_after_death_of_creating_process() -> None:
    """C11: calls on a channel raise in the same way after the death of the channel's owner."""
    reported: Channel[Any] = Channel(across="hosts")
    owner = PEERS["hosts"](owner_of_all, reported)
    barrier, event, condition, shared = reported.get()
    wait_until(lambda: waiters(condition) == 1)
    waiting = [ThreadPeer(barrier.wait), ThreadPeer(event.wait), ThreadPeer(wait_in, condition)]
    wait_until(lambda: barrier.n_waiting == 1 and waiters(condition) == 2)
    wait_blocked(event._gates["now"], readers=1)
    owner.kill()
    owner.join()
    for peer, raised in zip(waiting, (threading.BrokenBarrierError, Broken, Broken), strict=True):
        with pytest.raises(raised):
            peer.result()
    with pytest.raises(threading.BrokenBarrierError):
        barrier.wait()
    assert barrier.broken
    assert barrier.n_waiting == 0
    with pytest.raises(Broken):
        shared.copy()


@everywhere
def test_unused_wait_queues_are_freed(across: Any, on: Any) -> None:
    """C12: every process frees them."""
    event, barrier = Event(across=across), Barrier(1, across=across)

    def use(event: Event, barrier: Barrier, worker: int) -> None:
        for _ in range(4):
            event.set()
            event.clear()
            barrier.reset()

    start(on, 1, use, event, barrier).join()
    before = len(os.listdir("/proc/self/fd"))
    start(on, 2, use, event, barrier).join()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    assert not event.is_set()
    assert barrier.wait() == 0


@pytest.mark.parametrize(
    "pattern", [functools.partial(Barrier, 2), Event, Condition, SharedDict, Lock, Semaphore]
)
@pytest.mark.parametrize("across", ["threads", "planets"])
def test_synchronisation_rejects_threads_as_its_across_argument(pattern: Any, across: Any) -> None:
    name = pattern.func.__name__ if isinstance(pattern, functools.partial) else pattern.__name__
    with pytest.raises(ValueError, match=f"{name}: across must be 'processes' or 'hosts', got '{across}'"):
        pattern(across=across)
