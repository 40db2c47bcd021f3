"""Test that a signal handler that raises in the standard library's Python code leaves no lock locked."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.scripted_interrupt import Interrupt

from flowchan import Channel
from flowchan.hosts.agent_messages import WrittenStack
from flowchan.hosts.stack_requests import StackRequests
from flowchan.pipelines import task_pool
from flowchan.pipelines.children.child_links import ChildLinks
from flowchan.pipelines.children.child_state import Alive, ChildState
from flowchan.run.observe.run_trace import RunTrace
from flowchan.run.policy.events import WorkerId

Calls = tuple[Callable[[], Any], Callable[[], Any]]
"""A call of the main thread, which is interrupted, and a later call of another thread."""


def close_a_trace(folder: Path) -> Calls:
    trace = RunTrace(folder / "trace.json")
    return trace.close, trace.close


def ask_for_stacks(_: Path) -> Calls:
    requests = StackRequests()
    return lambda: requests.ask({}), lambda: requests.receive(WrittenStack(1, WorkerId("stage", 0), "text"))


def wait_for_a_childs_exit(_: Path) -> Calls:
    alive = Alive(2, Channel())
    return lambda: alive.wait_for(lambda: False, time.monotonic()), alive.one_ended


def wait_for_a_childs_start(_: Path) -> Calls:
    child = ChildState(ChildLinks(0, 1.0, *[Channel() for _ in range(5)]), Alive(2, Channel()))
    return lambda: child.greeted.wait(0), lambda: (child.end(), child.ended.wait())


@pytest.mark.parametrize(
    "calls", [close_a_trace, ask_for_stacks, wait_for_a_childs_exit, wait_for_a_childs_start]
)
def test_interrupt_in_threading_leaves_no_lock_held(tmp_path: Path, calls: Callable[[Path], Calls]) -> None:
    for number in itertools.count(1):
        interrupt = Interrupt(number, (threading.__file__,))
        call, later = calls(tmp_path)
        interrupt.during(call)
        thread = threading.Thread(target=later, daemon=True)
        thread.start()
        thread.join(30)
        assert not thread.is_alive(), interrupt.where
        if not interrupt.where:
            break


def test_task_pool_uses_no_lock_at_exit() -> None:
    """A lock like that of ``Event.set()`` would make a second call hang after an interrupt."""
    interrupt = Interrupt(1, (threading.__file__,))
    before = dict(task_pool._running)
    task_pool._running.clear()
    try:
        interrupt.during(task_pool._finish_all)
    finally:
        task_pool._running.update(before)
        task_pool._exiting = False
    assert not interrupt.where
