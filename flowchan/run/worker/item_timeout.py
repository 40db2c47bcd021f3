"""Enforce the option ``timeout=``, which limits the time for one item in a worker process.

When the time is up, a kernel timer kills the process, even in C code that holds the GIL. Just before, the
process writes its Python stacks, for the log. The supervisor therefore sees a death that is blamed on the
item, and replaces the worker. The replacement retries the item if retries are left; otherwise the item fails.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from flowchan import _core
from flowchan.declare.values import Stage

if TYPE_CHECKING:
    import asyncio

MIN_TIMEOUT_S = 1e-6
"""Shortest time limit in seconds, because zero would disable the timer."""


def exceeded(stage: Stage) -> str:
    """Return the description of a death that the time limit caused."""
    return f"took longer than timeout={stage.timeout:g} s"


def set_message(words: str, error: BaseException, limit: asyncio.Timeout) -> None:
    """Set the message of ``error`` to ``words`` if ``limit`` raised the error without a message."""
    if limit.expired() and isinstance(error, TimeoutError) and not error.args:
        error.args = (words,)


def has_exceeded(stage: Stage, exitcode: int | None) -> bool:
    """Return whether the exit code means that the time limit killed the worker."""
    return stage.timeout is not None and exitcode == -signal.SIGALRM


def gives_up(stage: Stage, predecessors: tuple[str, ...]) -> bool:
    """Return whether an item has exceeded its time limit so often that the item must fail.

    ``predecessors`` describes how the earlier workers that held the item died.
    """
    if stage.timeout is None:
        return False
    tries = 1 + (stage.retries if issubclass(TimeoutError, stage.retry_on) else 0)
    return predecessors.count(exceeded(stage)) >= tries


def limited(function: Callable[..., Any], stage: Stage) -> Callable[..., Any]:
    """Return ``function`` with the stage's time limit, which works only in a worker process."""
    assert stage.timeout is not None
    seconds = stage.timeout
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a forked process inherits the program's handler
    _core._dump_before_death(signal.SIGALRM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])  # the program may block all signals

    def call(*args: Any) -> Any:
        began = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            result = function(*args)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if stage.operator.iterates and isinstance(result, Iterable):
            return _steps(result, seconds - (time.monotonic() - began))
        return result

    return call


def _steps(elements: Iterable[Any], remaining: float) -> Iterator[Any]:
    """Yield the elements. The computation of all elements may take ``remaining`` seconds in total.

    The time between two elements does not count, because the worker may then be waiting for room in its
    output.
    """
    iterator = iter(elements)
    while True:
        began = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, max(remaining, MIN_TIMEOUT_S))
        try:
            element = next(iterator)
        except StopIteration:
            return
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        remaining -= time.monotonic() - began
        yield element
