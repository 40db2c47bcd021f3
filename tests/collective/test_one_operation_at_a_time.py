"""Test that a member runs one operation at a time.

A second call waits, or raises if its wait could never end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.waiting import wait_until

from flowchan import GroupError, MemberDied, collective

pytestmark = pytest.mark.filterwarnings("ignore:This process")


@pytest.fixture
def members() -> Iterator[Any]:
    made = collective.members(2)
    yield made
    for member in made:
        member.close()
    made.clear()  # empty the list, because pytest keeps it after the test
    del member


def is_inside(member: Any) -> bool:
    return bool(member._see(member.rank)[4])


@contextlib.contextmanager
def inside(members: Any) -> Iterator[Any]:
    """Yield a member while another thread runs an operation on it."""
    thread = threading.Thread(target=members[0].barrier)
    thread.start()
    wait_until(lambda: is_inside(members[0]))
    try:
        yield members[0]
    finally:
        members[1].barrier()
        thread.join()


def test_signal_handler_cannot_nest_operations(members: Any) -> None:
    message: list[str] = []

    def handler(*_: Any) -> None:
        try:
            members[0].allreduce(1)
        except GroupError as error:
            message.append(str(error))

    def other() -> None:
        wait_until(lambda: is_inside(members[0]))
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(lambda: bool(message))
        members[1].barrier()

    before = signal.signal(signal.SIGUSR1, handler)
    thread = threading.Thread(target=other)
    try:
        thread.start()
        members[0].barrier()
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert "allreduce was called by a signal handler during another operation" in message[0]


def test_timeout_applies_while_another_thread_is_in_an_operation(members: Any) -> None:
    message = "barrier of a group of 2 timed out before it began: another thread was running an operation"
    with inside(members) as member, pytest.raises(TimeoutError, match=message):
        member.barrier(timeout=0.01)


def test_ctrl_c_works_while_another_thread_is_in_an_operation(members: Any) -> None:
    def handler(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with inside(members) as member:
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            with pytest.raises(KeyboardInterrupt):
                member.barrier()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_process_forked_during_an_operation_cannot_use_the_member(members: Any) -> None:
    with inside(members) as member:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                member._give_up()
                member.barrier()
            except GroupError as error:
                code = 0 if "is already used by another process" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_call_on_ended_group_raises_member_died(members: Any) -> None:
    members[0]._disbanding()()
    for member in members:
        with pytest.raises(MemberDied, match="barrier of a group of 2 failed: the group has ended") as info:
            member.barrier()
        assert info.value.ranks == ()
