"""Test that the log contains the worker's stack if an item exceeds the time limit."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable

import pytest
from runs import Gate, last_calls
from support.waiting import wait_until

from flowchan import Graph, RunError, hosts


def slow(item: int) -> None:
    time.sleep(600)


def slow_in_c(item: int) -> None:
    ctypes.PyDLL(None).sleep(600)


@pytest.mark.usefixtures("_method")
@pytest.mark.parametrize("function", [slow, slow_in_c])
def test_item_timeout_logs_the_stack_of_its_worker(
    function: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    graph = Graph("limited")
    items = graph.source([1])
    items.sink(function, on="process", timeout=0.2, name="work")
    with pytest.raises(RunError):
        graph.run()
    check_logged(caplog, function.__name__)


def test_item_timeout_logs_the_stack_of_a_remote_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    graph = Graph("limited")
    graph.source([1]).sink(slow, on=hosts.local(1), timeout=0.2, name="work")
    with pytest.raises(RunError):
        graph.run()
    check_logged(caplog, "slow")


def check_logged(caplog: pytest.LogCaptureFixture, function: str) -> None:
    (record,) = (one for one in caplog.records if "its stack was" in one.getMessage())
    assert (record.name, record.levelno) == ("flowchan.run", logging.WARNING)
    assert last_calls(record.getMessage())[-1] == function
    assert "sleep(600)" in record.getMessage()


def test_worker_death_does_not_log_stacks_requested_earlier(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = Gate()
    graph = Graph("killed")
    graph.source([1]).sink(gate.wait, on="process", timeout=600, name="work")
    with graph.start() as run:
        gate.wait_held()
        assert "wait" in last_calls(run.stacks("work")["work 1"])
        (process,) = run._crew.local.processes.values()
        process.kill()
        wait_until(lambda: any("was killed by SIGKILL" in one.getMessage() for one in caplog.records))
        gate.open()
    assert not any("its stack was" in one.getMessage() for one in caplog.records)
