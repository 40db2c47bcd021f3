"""Patterns whose workers run on other hosts: what takes a place takes a pool."""

from __future__ import annotations

import math
import os

import pytest

from flowchan import RunError, WorkerDied, pipelines, worker
from flowchan.hosts import local


def where(number: int) -> tuple[int, str | None]:
    return number, worker().host


def fail_at(number: int) -> int:
    if number == 2:
        raise ValueError("two")
    return number


def test_map_on_a_pool_gives_the_results_in_worker_order_and_uses_all_hosts() -> None:
    results = pipelines.map(4, where, on=local(2)).join()
    assert [number for number, _ in results] == [1, 2, 3, 4]
    assert {host for _, host in results} <= {"local-1", "local-2"}


def test_what_a_worker_on_a_host_raises_is_raised_by_join() -> None:
    workers = pipelines.map(3, fail_at, on=local(1))
    with pytest.raises(RunError) as caught:
        workers.join()
    assert repr(caught.value.exceptions[0].__cause__) == "ValueError('two')"


def test_a_task_pool_on_a_pool_of_hosts_is_an_executor() -> None:
    with pipelines.TaskPool(3, on=local(2)) as pool:
        assert list(pool.map(math.factorial, range(20))) == [math.factorial(number) for number in range(20)]
        with pytest.raises(ValueError, match="not defined for negative"):
            pool.submit(math.factorial, -1).result()


def test_a_worker_that_dies_on_a_host_fails_its_task_and_the_others_go_on() -> None:
    with pipelines.TaskPool(2, on=local(2)) as pool:
        dead = pool.submit(os._exit, 9)
        after = [pool.submit(math.factorial, number) for number in range(5)]
        with pytest.raises(WorkerDied):
            dead.result()
        assert [future.result() for future in after] == [1, 1, 2, 6, 24]
