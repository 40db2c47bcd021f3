"""Test ``workqueue``: one owner, many workers, and items in both directions."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any, Literal

import numpy as np
import pytest
from support.waiting import wait_blocked, wait_until

from flowchan import Closed, Drained, Empty, Full
from flowchan.pipelines import Lock, WorkQueue, workqueue
from flowchan.pipelines import map as start

Across = Literal["threads", "processes"]
everywhere = pytest.mark.parametrize("across", ["threads", "processes"])


def on(across: Across) -> Any:
    return "thread" if across == "threads" else "process"


def echo(queue: WorkQueue, worker: int) -> None:
    for item in queue:
        queue.put(item)


@contextmanager
def echoed(across: Across, workers: int = 1, capacity: int = 64) -> Iterator[WorkQueue]:
    """Yield a work queue with workers that put back every item that they get."""
    queue = workqueue(capacity=capacity, across=across)
    running = start(workers, echo, queue, on=on(across))
    yield queue
    queue.close()
    assert list(queue) == []
    running.join()


class Point:
    def __init__(self, x: int) -> None:
        self.x = x

    def __repr__(self) -> str:
        return f"Point({self.x})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and other.x == self.x


@everywhere
@pytest.mark.parametrize(
    "item",
    [
        True,
        False,
        None,
        0,
        -1,
        2**80,
        1.5,
        "",
        "text",
        b"bytes",
        [1, [2, [None]]],
        {"a": {"b": (1, 2)}},
        Point(3),
    ],
    ids=repr,
)
def test_items_are_returned_unchanged(across: Across, item: Any) -> None:
    with echoed(across) as queue:
        queue.put(item)
        found = queue.get()
    assert found == item
    assert type(found) is type(item)


@everywhere
def test_functions_and_closures_work_after_being_sent(across: Across) -> None:
    factor = 3

    def call(queue: WorkQueue, worker: int) -> None:
        for function in queue:
            queue.put(function(14))

    queue = workqueue(across=across)
    running = start(1, call, queue, on=on(across))
    queue.put_many([lambda number: factor * number, Point(5).__eq__, abs])
    queue.close()
    assert list(queue) == [42, False, 14]
    running.join()


@everywhere
def test_arrays_arrive_equal_alone_and_inside_containers(across: Across) -> None:
    array = np.arange(100_000.0).reshape(100, 1000)
    with echoed(across) as queue:
        queue.put(array)
        assert np.array_equal(queue.get(), array)
        queue.put({"deep": [array, array.T]})
        deep = queue.get()["deep"]
        assert np.array_equal(deep[0], array)
        assert np.array_equal(deep[1], array.T)


def test_array_sent_between_threads_is_the_same_object() -> None:
    queue = workqueue()

    def fill(worker: int) -> None:
        for item in queue:
            item["array"][:] = 7
            queue.put(None)

    running = start(1, fill)
    array = np.zeros(10)
    queue.put({"array": array})
    queue.drain()
    assert array.tolist() == [7] * 10
    queue.close()
    running.join()


@everywhere
def test_drain_waits_for_an_answer_to_every_question(across: Across) -> None:
    with echoed(across) as queue:
        queue.put_many(range(13))
        queue.drain()
        assert [queue.get_nowait() for _ in range(13)] == list(range(13))
        with pytest.raises(Empty):
            queue.get_nowait()


@everywhere
def test_drain_counts_questions_that_a_worker_holds(across: Across) -> None:
    gate = workqueue(across="processes")
    queue = workqueue(across=across)

    def slow(queue: WorkQueue, gate: WorkQueue, worker: int) -> None:
        for item in queue:
            gate.get()
            queue.put(item)

    running = start(1, slow, queue, gate, on=on(across))
    queue.put("held")
    wait_until(lambda: queue._sides.channels[0].stats().leased == 1)
    with pytest.raises(Empty):
        queue.drain(timeout=0.01)
    gate.put(None)
    queue.drain()
    assert queue.get_nowait() == "held"
    queue.close()
    running.join()


def test_only_the_owner_can_drain() -> None:
    queue = workqueue()
    with pytest.raises(Exception, match="1 of 1 workers") as caught:
        start(1, lambda worker: queue.drain()).join()
    assert "must be the owner" in str(caught.value.exceptions[0].__cause__)  # type: ignore[attr-defined]


@everywhere
def test_many_items_arrive_in_order(across: Across) -> None:
    with echoed(across) as queue:
        queue.put_many(range(300))
        assert [queue.get() for _ in range(300)] == list(range(300))


@everywhere
@pytest.mark.parametrize("workers", [1, 3])
def test_queue_full_in_both_directions_does_not_deadlock(across: Across, workers: int) -> None:
    with echoed(across, workers, capacity=1) as queue:
        for number in range(100):
            queue.put(number)  # no thread is reading the answers yet
        assert sum(queue.get() for _ in range(100)) == 4950


@everywhere
@pytest.mark.parametrize("workers", [1, 3])
def test_owner_may_join_threads_before_reading_answers(across: Across, workers: int) -> None:
    queue = workqueue(capacity=4, across=across)
    running = start(workers, echo, queue, on=on(across))
    queue.put_many(range(100))
    queue.close()
    running.join()
    assert sorted(queue) == list(range(100))


def test_owner_may_join_processes_before_reading_answers() -> None:
    queue = workqueue(across="processes")
    children = [multiprocessing.get_context("fork").Process(target=echo, args=(queue, n)) for n in range(2)]
    for child in children:
        child.start()
    queue.put_many(range(200))
    queue.close()
    for child in children:
        child.join()
        child.close()
    assert sorted(queue) == list(range(200))


@everywhere
def test_workers_with_many_answers_do_not_block_on_owner(
    across: Across,
) -> None:
    def repeat(queue: WorkQueue, reported: WorkQueue, worker: int) -> None:
        for number in queue:
            queue.put_many([number] * 500)
            reported.put("done")

    queue, reported = workqueue(capacity=1, across=across), workqueue(across=across)
    running = start(2, repeat, queue, reported, on=on(across))
    queue.put_many([1, 2, 3])
    # the owner may first wait for something else, and only then put more questions
    assert [reported.get() for _ in range(3)] == ["done"] * 3
    queue.put(4)
    queue.close()
    running.join()
    assert sorted(queue) == [number for number in (1, 2, 3, 4) for _ in range(500)]


@everywhere
def test_put_and_get_raise_when_timeout_expires(across: Across) -> None:
    queue = workqueue(capacity=1, across=across)
    queue.put(1)
    with pytest.raises(Full):
        queue.put(2, timeout=0.01)
    with pytest.raises(Empty):
        queue.get(timeout=0.01)


def test_queue_and_lock_reach_worker_after_owner_closed() -> None:
    queue, lock, closed = workqueue(), Lock(), threading.Event()

    def write(queue: WorkQueue, lock: Lock, worker: int) -> None:
        closed.wait()
        with lock:
            queue.put("late")

    running = start(1, write, queue, lock)
    queue.close()
    queue.close()  # closing twice has no effect
    closed.set()
    running.join()
    assert queue.get() == "late"
    with pytest.raises(Closed):
        queue.put("no more")


def test_first_caller_with_a_name_creates_the_queue() -> None:
    first, second = workqueue("creator"), workqueue("creator")
    assert (first.creator, second.creator) == (True, False)
    assert first.is_owner
    assert start(1, lambda worker: (workqueue("creator").creator, workqueue("creator").is_owner)).join() == [
        (False, False)
    ]


def test_one_of_many_concurrent_callers_creates_the_queue() -> None:
    made = start(50, lambda worker: workqueue("contended")).join()
    assert sum(queue.creator for queue in made) == 1
    assert len({id(queue._sides) for queue in made}) == 1


def test_any_thread_opens_a_queue_by_its_name() -> None:
    queue = workqueue("by name")
    running = start(3, lambda worker: echo(workqueue("by name"), worker))
    queue.put_many(range(50))
    queue.close()
    assert sorted(queue) == list(range(50))
    running.join()


def test_name_is_free_after_close_or_without_handles() -> None:
    queue = workqueue("again")
    queue.close()
    queue = workqueue("again")
    assert queue.creator
    del queue
    gc.collect()
    assert workqueue("again").creator


def test_a_forked_worker_opens_a_queue_by_its_name() -> None:
    queue = workqueue("forked", across="processes")
    child = multiprocessing.get_context("fork").Process(target=lambda: echo(workqueue("forked"), 1))
    child.start()
    queue.put_many("abc")
    queue.close()
    assert list(queue) == ["a", "b", "c"]
    child.join()


def echo_by_name(queue: WorkQueue, answer: Any) -> None:
    """Echo items, in a spawned process."""
    answer.put((queue.creator, queue.is_owner, workqueue("spawned").creator))
    echo(workqueue("spawned"), 1)


def test_spawned_process_knows_name_of_passed_queue() -> None:
    queue, reported = workqueue("spawned", across="processes"), workqueue(across="processes")
    child = multiprocessing.get_context("spawn").Process(target=echo_by_name, args=(queue, reported))
    child.start()
    assert reported.get() == (False, False, False)
    queue.put_many("abc")
    queue.close()
    assert list(queue) == ["a", "b", "c"]
    child.join()
    child.close()
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


@everywhere
def test_iteration_ends_after_all_items_for_owner_and_workers(across: Across) -> None:
    queue = workqueue(capacity=4, across=across)
    running = start(4, echo, queue, on=on(across))
    queue.put_many(range(500))
    queue.close()
    assert sorted(queue) == list(range(500))
    with pytest.raises(Drained):
        queue.get()
    running.join()


@everywhere
def test_worker_can_put_any_number_of_answers(across: Across) -> None:
    def divisors(queue: WorkQueue, worker: int) -> None:
        for number in queue:
            queue.put_many(divisor for divisor in range(1, number + 1) if number % divisor == 0)

    queue = workqueue(across=across)
    running = start(2, divisors, queue, on=on(across))
    queue.put_many([6, 7])
    queue.close()
    assert sorted(queue) == [1, 1, 2, 3, 6, 7]
    running.join()


def take_one(queue: WorkQueue, worker: int) -> None:
    queue.put(queue.get())


@everywhere
def test_question_that_an_exiting_worker_answered_is_not_repeated(across: Across) -> None:
    queue = workqueue(across=across)
    queue.put_many([1, 2, 3])
    start(1, take_one, queue, on=on(across)).join()
    start(2, take_one, queue, on=on(across)).join()
    queue.close()
    assert sorted(queue) == [1, 2, 3]


def test_question_that_a_forked_process_answered_is_not_repeated() -> None:
    queue = workqueue(across="processes")
    queue.put_many([1, 2])
    for _ in range(2):
        child = multiprocessing.get_context("fork").Process(target=take_one, args=(queue, 1))
        child.start()
        child.join()
    queue.close()
    assert list(queue) == [1, 2]


@everywhere
def test_unanswered_question_goes_to_another_worker(across: Across) -> None:
    def leave(queue: WorkQueue, worker: int) -> Any:
        return queue.get()

    queue = workqueue(across=across)
    queue.put("question")
    assert start(1, leave, queue, on=on(across)).join() == ["question"]
    with echo_workers(queue, across):
        assert queue.get() == "question"


@everywhere
def test_close_by_a_worker_finishes_its_question(across: Across) -> None:
    def decline(queue: WorkQueue, worker: int) -> None:
        queue.get()
        queue.close()

    queue = workqueue(across=across)
    queue.put("question")
    start(1, decline, queue, on=on(across)).join()
    queue.close()
    assert list(queue) == []


def test_unanswered_question_of_a_killed_worker_goes_to_another() -> None:
    queue = workqueue(across="processes")

    def hold() -> None:
        queue.get()
        signal.pause()

    child = multiprocessing.get_context("fork").Process(target=hold)
    child.start()
    queue.put("question")
    wait_until(lambda: queue._sides.channels[0].stats().leased == 1)
    os.kill(child.pid or 0, signal.SIGKILL)
    with echo_workers(queue, "processes"):
        assert queue.get() == "question"
    child.join()


@contextmanager
def echo_workers(queue: WorkQueue, across: Across) -> Iterator[None]:
    running = start(1, echo, queue, on=on(across))
    yield
    queue.close()
    running.join()


def test_owner_stops_waiting_after_last_worker_exits() -> None:
    queue = workqueue()
    got: list[Any] = []
    go = threading.Event()

    def one(queue: WorkQueue, worker: int) -> None:
        item = queue.get()
        go.wait()
        queue.put(item)

    running = start(1, one, queue)
    queue.put(1)
    queue.close()
    go.set()
    got.extend(queue)
    assert got == [1]
    running.join()


def test_waiting_workers_end_when_the_queue_is_closed() -> None:
    queue = workqueue()
    running = start(5, echo, queue)
    wait_blocked(queue._sides.channels[0], readers=5)
    queue.close()
    assert running.join() == [None] * 5


def test_a_queue_between_threads_cannot_be_sent_to_a_process() -> None:
    sent: Callable[[], object] = lambda: start(1, echo, workqueue(), on="process")  # noqa: E731
    with pytest.raises(Exception, match="across='processes'"):
        sent()


class LateAnswers:
    """Channel that sends items only in ``flush``, the latest point allowed for a remote channel (C16)."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.unsent: list[Any] = []

    def put(self, item: Any, timeout: float | None = None) -> None:
        self.unsent.append(item)

    def flush(self, timeout: float | None = None) -> None:
        while self.unsent:
            self.channel.put(self.unsent.pop(0))

    def __len__(self) -> int:
        return len(self.channel)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.channel, name)


@pytest.mark.parametrize("last", ["get", "close", "end"])
def test_question_is_finished_after_its_answer_reaches_the_owner(last: str) -> None:
    """If the question were finished earlier, another worker could close the answer channel too soon."""

    def answer_one(queue: WorkQueue, worker: int) -> None:
        queue.put(queue.get())
        if last == "get":
            with pytest.raises(Drained):
                queue.get()
        elif last == "close":
            queue.close()

    queue = workqueue()
    questions, answers = queue._sides.channels
    queue._sides.channels = questions, LateAnswers(answers)  # type: ignore[assignment]
    queue.put("question")
    queue.close()
    start(1, answer_one, queue).join()
    assert list(queue) == ["question"]
