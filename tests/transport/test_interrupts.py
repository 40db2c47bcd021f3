"""Test R5: safety from Ctrl-C and from signal handlers that raise."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from flowchan.transport.interrupts import (
    InterruptWatch,
    append_result,
    interrupts_allowed,
    interrupts_deferred,
    is_interrupt,
    unless_interrupted,
)


@pytest.fixture(autouse=True)
def handlers_are_restored() -> Iterator[None]:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_deferred_ctrl_c_is_raised_when_the_outermost_block_ends() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):  # noqa: SIM117, PT012
        with interrupts_deferred():
            with interrupts_deferred():
                interrupt()
                done.append("inner")
            done.append("outer")
    assert done == ["inner", "outer"]


def test_several_deferred_signals_are_delivered_once() -> None:
    came = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        with interrupts_deferred():
            interrupt()
            interrupt()
            assert not came
        assert came == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_allowed_wait_within_a_deferring_block_can_be_interrupted() -> None:
    done = []
    with interrupts_deferred():
        interrupt_raised = False
        try:
            with interrupts_allowed():
                interrupt()
                done.append("wait")
        except KeyboardInterrupt:
            interrupt_raised = True
        assert interrupt_raised
        assert not done
        with pytest.raises(KeyboardInterrupt), interrupts_allowed(), interrupts_deferred():  # noqa: PT012
            interrupt()
            done.append("deferred again")
    assert done == ["deferred again"]


def test_deferred_ctrl_c_is_raised_when_an_allowed_wait_begins() -> None:
    with interrupts_deferred():
        interrupt()
        with pytest.raises(KeyboardInterrupt), interrupts_allowed():
            pytest.fail("the wait has begun")


def test_deferring_blocks_outside_the_main_thread_have_no_effect() -> None:
    handlers: list[Any] = []

    def block() -> None:
        with interrupts_deferred(), interrupts_allowed():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]


def test_all_watches_report_the_exception_of_the_first_watch() -> None:
    first, second = Replaced(), Replaced()
    watches = [InterruptWatch(lambda _: first), InterruptWatch(lambda _: second)]
    for watch in watches:
        watch.open()
    try:
        with pytest.raises(Replaced) as caught:
            interrupt()
        assert caught.value is first
        assert [watch.still_raised() for watch in watches] == [first, first]
        assert all(watch.seen and not watch.handled for watch in watches)
    finally:
        for watch in watches:
            watch.close()


class Replaced(KeyboardInterrupt):
    pass


def test_watch_forgets_a_caught_exception() -> None:
    watch = InterruptWatch(Replaced)
    watch.open()
    try:
        interrupt()
    except Replaced:
        assert watch.still_raised() is not None
    assert watch.still_raised() is None
    watch.close()


def test_watch_opened_in_a_deferring_block_outlives_the_block() -> None:
    watch = InterruptWatch(lambda _: None)
    with pytest.raises(KeyboardInterrupt), interrupts_deferred():  # noqa: PT012
        watch.open()
        interrupt()
        assert not watch.seen
    assert watch.seen
    watch.close()


def test_signal_handler_installed_while_watches_are_open_is_kept() -> None:
    before = signal.getsignal(signal.SIGINT)
    outer, inner = InterruptWatch(lambda _: None), InterruptWatch(lambda _: None)
    outer.open()
    ours = signal.getsignal(signal.SIGINT)
    called = []

    def chained(number: int, frame: Any) -> None:
        called.append(number)
        assert callable(ours)
        ours(number, frame)

    signal.signal(signal.SIGINT, chained)
    inner.open()
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert called
    assert outer.seen
    assert inner.seen
    inner.close()
    outer.close()
    assert signal.getsignal(signal.SIGINT) is chained
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("deferred", [False, True])
def test_handler_exception_is_not_caught_as_the_calls_error(deferred: bool) -> None:
    def too_late(number: int, frame: Any) -> None:
        raise TimeoutError("the time limit of the program")

    def call() -> None:
        if deferred:
            with interrupts_deferred():
                interrupt()
        interrupt()

    watch = InterruptWatch(lambda _: None)
    before = signal.signal(signal.SIGINT, too_late)
    watch.open()
    try:
        with pytest.raises(TimeoutError, match="of the program") as caught:
            call_that_treats_its_own_errors(call)
        assert is_interrupt(caught.value)
    finally:
        watch.close()
        signal.signal(signal.SIGINT, before)


def call_that_treats_its_own_errors(call: Callable[[], None]) -> str:
    try:
        call()
    except unless_interrupted(OSError) as error:
        return f"own: {error}"
    return "done"


def test_errors_raised_by_the_call_are_caught() -> None:
    def fail() -> None:
        raise TimeoutError("no answer")

    assert call_that_treats_its_own_errors(fail) == "own: no answer"
    assert not is_interrupt(ValueError())
    assert is_interrupt(KeyboardInterrupt())


def test_result_is_kept_if_ctrl_c_arrives_during_the_call() -> None:
    # unlike Python's own function, this function does not check for signals
    raise_natively = getattr(ctypes.CDLL(None), "raise")
    results: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        append_result(results, raise_natively, int(signal.SIGINT))
    assert results == [0]
