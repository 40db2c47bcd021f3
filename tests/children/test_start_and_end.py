"""Test how children start, exit and fail."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from flowchan import ChildDied, Closed, StageError
from flowchan.hosts import local
from flowchan.pipelines import children
from flowchan.pipelines.children import Children, Parent

WAIT_S = 60


@pytest.fixture(params=[pytest.param(on, marks=pytest.mark.alternative(on)) for on in ("process", "pool")])
def kids(request: pytest.FixtureRequest) -> Iterator[Children]:
    """Provide three children. ``make test`` uses one of the placements, and ``make soak`` uses both."""
    with children.start(3, on="process" if request.param == "process" else local(2)) as made:
        yield made


def add(parent: Parent, base: int, *, step: int = 1) -> int:
    return base + step * parent.number


def test_wait_returns_the_value_of_each_child(kids: Children) -> None:
    kids.run(add, 10, step=2)
    assert kids.wait(WAIT_S) == {1: 12, 2: 14, 3: 16}
    assert kids[2].wait(WAIT_S) == 14
    assert len(kids.alive) == 0


def test_run_accepts_the_name_of_a_function(kids: Children) -> None:
    kids.run("builtins:repr")
    assert kids.wait(WAIT_S) == {number: f"<Parent of child {number}>" for number in (1, 2, 3)}


def test_children_can_run_different_functions(kids: Children) -> None:
    kids[1].run(add, 0)
    kids[2, 3].run(lambda parent: -parent.number)
    assert kids.wait(WAIT_S) == {1: 1, 2: -2, 3: -3}


def test_second_run_raises_and_calls_no_function(kids: Children) -> None:
    kids[2].run(add, 0)
    with pytest.raises(RuntimeError, match=r"^run: child 2 already has a function; start another child$"):
        kids.run(add, 0)
    kids[1, 3].run(add, 5)
    assert kids.wait(WAIT_S) == {1: 6, 2: 2, 3: 8}


def test_calls_raise_before_run(kids: Children) -> None:
    for call in (kids.join, kids.receive, kids.wait, kids[1].wait):
        with pytest.raises(RuntimeError, match=r"child 1 has no function to run; call run\(\) first"):
            call()
    with pytest.raises(RuntimeError, match="send: child 1 has no function to run"):
        kids.send(1)


def test_each_child_is_one_process_with_its_number(kids: Children) -> None:
    kids.run(lambda parent: (parent.number, os.getpid(), children.parent() is parent))
    pids = {number: found.pid for number, found in ((kid.number, kid) for kid in kids)}
    assert kids.wait(WAIT_S) == {number: (number, pids[number], True) for number in (1, 2, 3)}
    assert len(set(pids.values()) | {os.getpid()}) == 4
    assert children.parent() is None


def fails(parent: Parent) -> int:
    if parent.number != 1:
        raise ValueError(f"from {parent.number}")
    return parent.number


def test_stage_error_has_the_child_error_as_its_cause(kids: Children) -> None:
    kids.run(fails)
    for call in (kids.wait, kids[2].wait, kids[2].join, kids[2].receive):
        with pytest.raises(StageError, match="child 2 failed: ValueError: from 2") as caught:
            call()
        assert repr(caught.value.__cause__) == "ValueError('from 2')"
        assert caught.value.worker == "child 2"
    assert kids[1].wait(WAIT_S) == 1


def test_group_error_lists_the_other_errors_as_notes(kids: Children) -> None:
    kids.run(fails)
    with pytest.raises(StageError) as caught:
        kids.wait(WAIT_S)
    assert caught.value.__notes__[-1] == "also: wait: child 3 failed: ValueError: from 3"


def test_call_to_a_child_that_has_returned_raises_closed(kids: Children) -> None:
    kids.run(lambda parent: parent.send("last"))
    kids.wait(WAIT_S)
    assert kids.receive() == {1: "last", 2: "last", 3: "last"}
    for call in (kids[1].receive, kids[1].join, lambda: kids[1].send(1)):
        with pytest.raises(Closed, match="child 1 has ended"):
            call()


def killed(parent: Parent) -> None:
    parent.send(parent.number)
    if parent.number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    parent.pause()


def test_killed_child_raises_child_died_in_each_call(kids: Children) -> None:
    pid, host = kids[2].pid, kids[2].host
    kids.run(killed)
    calls: list[Any] = [kids.join, kids[2].wait, kids[2].join, lambda: kids[2].send(1)]
    for call in calls:
        with pytest.raises(ChildDied, match=r"child 2 .* was killed by SIGKILL") as caught:
            call()
        died = caught.value
        assert (died.number, died.pid, died.host) == (2, pid, host)
        assert (died.signal, died.exitcode) == (signal.SIGKILL, None)
    assert kids[1, 3].wait(WAIT_S) == {1: None, 3: None}


def test_group_join_serves_live_members_before_it_raises(kids: Children) -> None:
    kids.run(lambda parent: os._exit(7) if parent.number == 1 else parent.pause())
    with pytest.raises(ChildDied) as caught:
        kids.join("go", timeout=WAIT_S)
    assert caught.value.exitcode == 7
    assert kids[2, 3].wait(WAIT_S) == {2: "go", 3: "go"}


def test_idle_child_that_is_killed_raises_child_died() -> None:
    with children.start(1) as kids:
        os.kill(kids[1].pid, signal.SIGTERM)
        kids._started.states[1].ended.wait(WAIT_S)
        with pytest.raises(ChildDied) as caught:
            kids.run(add, 1)
        assert caught.value.signal == signal.SIGTERM


def test_wait_that_times_out_names_the_late_children(kids: Children) -> None:
    kids.run(lambda parent: parent.number == 2 or parent.pause())
    kids[2].wait(WAIT_S)
    with pytest.raises(TimeoutError, match=r"wait: children 1, 3 were not ready within 0\.01 s"):
        kids.wait(0.01)


def test_other_children_continue_after_one_is_closed(kids: Children) -> None:
    kids.run(lambda parent: parent.pause())
    kids[2].close()
    assert [kid.number for kid in kids.alive] == [1, 3]
    with pytest.raises(Closed, match="child 2 was closed"):
        kids[2].wait()
    kids[1, 3].join("on")
    assert kids[1, 3].wait(WAIT_S) == {1: "on", 3: "on"}
    kids[2].close()


def ignores(parent: Parent) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent.send("ready")
    while True:
        signal.pause()


def test_close_kills_a_child_that_ignores_signals(kids: Children) -> None:
    kids[1].run(ignores)
    kids[1].receive(WAIT_S)
    kids[1].close()
    kids[2, 3].run(add, 0)
    assert kids[2, 3].wait(WAIT_S) == {2: 2, 3: 3}


def grandchildren(parent: Parent) -> dict[int, int]:
    with children.start(2) as kids:
        kids.run(lambda inner, outer: 10 * outer + inner.number, parent.number)
        return kids.wait(WAIT_S)


def test_child_can_start_children_with_their_own_numbers(kids: Children) -> None:
    kids.run(grandchildren)
    assert kids.wait(WAIT_S) == {n: {1: 10 * n + 1, 2: 10 * n + 2} for n in (1, 2, 3)}


def test_start_rejects_wrong_arguments() -> None:
    with pytest.raises(ValueError, match=r"children\.start: n must be at least 1, got 0"):
        children.start(0)
    with pytest.raises(
        ValueError, match=r'on must be "process" or a pool from flowchan\.hosts, got "thread"'
    ):
        children.start(1, on="thread")
    with children.start(2) as kids:
        with pytest.raises(KeyError, match="the number must be one of 1, 2, got 3"):
            kids[3]
        with pytest.raises(TypeError, match="run: function must be a function"):
            kids.run(3)  # type: ignore[arg-type]


def test_fork_of_the_program_cannot_use_or_end_its_children(kids: Children) -> None:
    kids.run(lambda parent: parent.send(parent.receive()))
    with warnings.catch_warnings():
        # Python warns about a fork in a process with threads
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        refused = 0
        try:
            calls = (kids.run, repr), (kids.send, 1), (kids.receive, 5), (kids.join, "", 5), (kids.wait, 5)
            for call, *arguments in calls:
                try:
                    call(*arguments)
                except RuntimeError as error:
                    refused += "got fork" in str(error)
            kids[1].close()
            kids.close()
        finally:
            os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    kids.send("still here")
    assert kids.receive(timeout=WAIT_S) == dict.fromkeys((1, 2, 3), "still here")


@pytest.mark.parametrize("which", [True, slice(1, 3), None, 1.0])
def test_subscript_that_is_not_a_number_is_refused(kids: Children, which: Any) -> None:
    with pytest.raises(TypeError, match="the number must be an int or a list of ints, got"):
        kids[which]
    assert repr(kids[np.int64(2)]) == repr(kids[2])


def test_child_that_has_ended_keeps_its_process_id(kids: Children) -> None:
    pids: list[int] = []
    thread = threading.Thread(target=lambda: pids.extend(kid.pid for kid in kids))
    with kids._started._reports._lock:  # hold the lock, so that the exits come before the ids
        kids.run(lambda parent: os.getpid())
        for state in kids._states:
            assert state.ended.wait(WAIT_S)
        thread.start()
    thread.join()
    assert dict(enumerate(pids, 1)) == kids.wait(WAIT_S)
