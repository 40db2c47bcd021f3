"""Test ``map``: n workers run one function, and ``join`` returns the results in worker order or raises."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from support.waiting import wait_until

from flowchan import Channel, Graph, GraphError, RunError, WorkerDied, worker
from flowchan.collective import members
from flowchan.pipelines import Lock, map  # noqa: A004

everywhere = pytest.mark.parametrize("on", ["thread", "process"])


@everywhere
def test_one_worker_returns_one_result(on: Any) -> None:
    assert map(1, lambda value, worker: value, 42, on=on).join() == [42]


@everywhere
def test_map_accepts_several_nested_arguments_and_results(on: Any) -> None:
    given = ("a", 3.5, {"b": [1, 2, {"c": None}]})
    assert map(1, lambda *values: values[:-1], *given, on=on).join() == [given]


@everywhere
def test_results_are_in_worker_order_regardless_of_finish_order(on: Any) -> None:
    ended = Channel[int](8, across="processes")

    def last_first(n: int, worker: int) -> int:
        if worker < n:
            while ended.stats().items_in < n - worker:
                os.sched_yield()
        ended.put(worker)
        return 10 * worker

    assert map(4, last_first, 4, on=on).join() == [10, 20, 30, 40]
    assert ended.get_many(4) == [4, 3, 2, 1]


def from_list(members: list[Any], worker: int) -> int:
    with members[worker - 1] as g:
        total: int = g.allreduce(worker)
        return total


def test_threads_take_their_members_from_one_list() -> None:
    assert map(3, from_list, members(3)).join() == [6, 6, 6]


def test_list_of_members_for_several_processes_raises_at_declaration() -> None:
    message = (
        r"element 0, element 0 is a \S+SharedGroup \(<Group rank 0 of 2> is a single member, but the "
        r"function that contains it goes to several workers\); send each worker its member as an item, as in "
        r"graph\.source\(members\(n\)\)\.map\(…\), or declare a gang"
    )
    made = members(2)
    with pytest.raises(GraphError, match=message):
        map(2, from_list, made, on="process")
    assert map(2, from_list, made).join() == [3, 3]


def test_one_process_takes_the_only_member() -> None:
    assert map(1, from_list, members(1), on="process").join() == [1]


def test_process_workers_get_members_as_items() -> None:
    def total(member: Any) -> int:
        with member as g:
            result: int = g.allreduce(g.rank + 1)
            return result

    graph = Graph("members")
    totals = graph.source(members(3)).map(total, on="process", workers=3).collect()
    assert graph.run()[totals] == [6, 6, 6]


@everywhere
def test_none_result_keeps_its_position(on: Any) -> None:
    assert map(3, lambda value, worker: value if worker == 2 else None, 7, on=on).join() == [None, 7, None]
    assert map(2, lambda value, worker: value, None, on=on).join() == [None, None]


@everywhere
def test_the_workers_number_is_the_last_argument(on: Any) -> None:
    assert map(4, lambda given, worker: (given, worker), "x", on=on).join() == [
        ("x", n) for n in (1, 2, 3, 4)
    ]


@everywhere
def test_all_workers_run_at_the_same_time(on: Any) -> None:
    arrived = Channel[int](5, across="processes")

    def meet(worker: int) -> bool:
        arrived.put(worker)
        while arrived.stats().items_in < 5:
            os.sched_yield()
        return True

    assert map(5, meet, on=on).join() == [True] * 5


@everywhere
def test_each_call_has_its_own_worker(on: Any) -> None:
    """The calls are so short that the first worker to be ready could otherwise run all of them."""
    assert map(20, lambda number: worker().number, on=on).join() == list(range(1, 21))


def test_each_call_runs_in_a_separate_process() -> None:
    assert len({os.getpid(), *map(4, lambda number: os.getpid(), on="process").join()}) == 5


@everywhere
def test_join_raises_the_error_from_a_worker(on: Any) -> None:
    def fail(worker: int) -> None:
        raise LookupError(f"in {worker}")

    with pytest.raises(RunError) as caught:
        map(1, fail, on=on).join()
    (error,) = caught.value.exceptions
    assert error.stage == "fail"
    assert error.worker == "fail 1"
    assert isinstance(error.__cause__, LookupError)
    assert error.__cause__.args == ("in 1",)


def test_join_raises_only_after_all_workers_have_ended() -> None:
    gate = threading.Event()
    ended = []

    def work(worker: int) -> None:
        if worker == 1:
            raise ValueError
        gate.wait()
        ended.append(worker)

    workers = map(2, work)
    with pytest.raises(TimeoutError):
        workers.join(timeout=0.05)
    gate.set()
    with pytest.raises(RunError, match="1 of 2 workers"):
        workers.join()
    assert ended == [2]


@everywhere
def test_join_raises_each_error_once_then_returns_results(on: Any) -> None:
    def odd_fails(worker: int) -> int:
        if worker % 2:
            raise ValueError(worker)
        return worker

    workers = map(6, odd_fails, on=on)
    with pytest.raises(RunError) as caught:
        workers.join()
    assert sorted(error.__cause__.args[0] for error in caught.value.exceptions if error.__cause__) == [
        1,
        3,
        5,
    ]
    assert workers.join() == workers.join() == [2, 4, 6]


@everywhere
def test_check_errors_raises_early_and_join_returns_other_results(on: Any) -> None:
    gate = Channel[None](1, across="processes")

    def work(worker: int) -> int:
        if worker == 1:
            raise ValueError
        return sum(1 for _ in gate) + 42

    workers = map(2, work, on=on)

    def failed() -> bool:
        try:
            workers.check_errors()
        except RunError:
            return True
        return False

    wait_until(failed)
    workers.check_errors()  # each error is raised only once
    gate.close()
    assert workers.join() == [42]


def test_check_errors_is_silent_while_nothing_has_failed() -> None:
    workers = map(2, lambda worker: worker)
    workers.check_errors()
    workers.join()
    workers.check_errors()


@everywhere
def test_worker_that_raises_system_exit_fails(on: Any) -> None:
    def leave(worker: int) -> int:
        if worker == 2:
            raise SystemExit(3)
        return worker

    workers = map(3, leave, on=on)
    with pytest.raises(RunError) as caught:
        workers.join()
    assert isinstance(caught.value.exceptions[0].__cause__, SystemExit)
    assert workers.join() == [1, 3]


def test_killed_worker_process_fails_without_repeating_its_call() -> None:
    begun = Channel[int](8, across="processes")

    def work(worker: int) -> int:
        begun.put(worker)
        if worker == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return worker

    workers = map(3, work, on="process")
    with pytest.raises(RunError) as caught:
        workers.join()
    assert isinstance(caught.value.exceptions[0].__cause__, WorkerDied)
    assert workers.join() == [1, 3]
    assert sorted(begun.get_many(8)) == [1, 2, 3]


@everywhere
def test_closures_and_globals_reach_the_workers(on: Any) -> None:
    one, two = 1, [2]
    assert map(2, lambda worker: one + two[0] + worker + len(os.sep), on=on).join() == [5, 6]


def test_map_runs_hundreds_of_threads() -> None:
    assert map(300, lambda worker: worker).join() == list(range(1, 301))


@everywhere
def test_large_arguments_and_results_are_passed(on: Any) -> None:
    table = {str(number): list(range(number % 10)) for number in range(1000)}
    array = np.arange(8_000.0)
    for found, total in map(2, lambda table, array, worker: (table, array.sum()), table, array, on=on).join():
        assert found == table
        assert total == array.sum()


def test_threads_get_the_same_objects() -> None:
    array = np.zeros(3)
    map(3, lambda array, worker: array.__setitem__(worker - 1, worker), array).join()
    assert array.tolist() == [1, 2, 3]


@everywhere
def test_options_with_a_lock_inside_reach_every_worker(on: Any) -> None:
    options = {"lock": Lock(), "array": np.ones(4), "size": 2}

    def work(options: dict[str, Any], worker: int) -> tuple[float, int]:
        with options["lock"]:
            return options["array"].sum(), worker

    assert map(2, work, options, on=on).join() == [(4.0, 1), (4.0, 2)]


def test_map_rejects_wrong_arguments() -> None:
    with pytest.raises(TypeError, match="fn must be callable"):
        map(2, 42)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="map: n must be at least 1, got 0"):
        map(0, print)
    with pytest.raises(TypeError, match="map: n must be an int of at least 1, got '2'"):
        map("2", print)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='"thread", "process"'):
        map(2, print, on="thraed")  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="lock"):
        map(2, print, threading.Lock(), on="process")


@everywhere
def test_dropping_the_handle_frees_the_workers_channels(on: Any) -> None:
    """R6: they are closed at once, without waiting for a garbage collection."""
    gc.disable()
    try:
        workers = map(2, str, on=on)
        assert workers.join() == ["1", "2"]
        channels = [weakref.ref(channel) for channel in workers._run._ports.channels.values()]
        del workers
        # the run's threads end a moment later
        wait_until(lambda: all(channel() is None for channel in channels))
    finally:
        gc.enable()


def test_misspelt_option_names_the_closest_option() -> None:
    with pytest.raises(TypeError, match=r"^map: unknown option 'onn'; did you mean 'on'\?$"):
        map(2, abs, onn="process")  # type: ignore[call-arg]


def test_close_stops_live_worker_processes_and_keeps_results() -> None:
    pids = Channel[int](2, across="processes")

    def work(worker: int) -> int:
        if worker == 2:
            pids.put(os.getpid())
            signal.pause()
        return worker

    workers = map(2, work, on="process")
    pid = pids.get()
    wait_until(lambda: workers._results == {1: 1})
    workers.close()
    workers.close()
    assert workers.join() == [1]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
