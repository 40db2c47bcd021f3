"""How long a worker's process may take for an item: ``timeout=``.

A timer of the kernel ends the process, whatever it does just then, in C with the GIL held too. So an item
that takes too long is a death over that item: the worker is replaced, and its successor gives the item up, or
tries it again if the stage has retries left for it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from flowchan.declare.values import Stage

if TYPE_CHECKING:
    import asyncio

LEAST = 1e-6
"""Seconds; zero would stop the timer."""


def exceeded(stage: Stage) -> str:
    """How a worker died, in words, that took too long."""
    return f"took longer than timeout={stage.timeout:g} s"


def say(words: str, error: BaseException, limit: asyncio.Timeout) -> None:
    """If the error is what ``limit`` raised, which says nothing, it says these words."""
    if limit.expired() and isinstance(error, TimeoutError) and not error.args:
        error.args = (words,)


def has_exceeded(stage: Stage, exitcode: int | None) -> bool:
    """Whether a worker's process with this exit code took too long."""
    return stage.timeout is not None and exitcode == -signal.SIGALRM


def gives_up(stage: Stage, predecessors: tuple[str, ...]) -> bool:
    """Whether the item with which these died took too long more often than it may be tried again."""
    if stage.timeout is None:
        return False
    tries = 1 + (stage.retries if issubclass(TimeoutError, stage.retry_on) else 0)
    return predecessors.count(exceeded(stage)) >= tries


def limited(function: Callable[..., Any], stage: Stage) -> Callable[..., Any]:
    """The function of a stage with a timeout, as its process calls it."""
    assert stage.timeout is not None
    seconds = stage.timeout
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a fork has copied the program's handler

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


def _steps(elements: Iterable[Any], left: float) -> Iterator[Any]:
    """The elements, which together may take so many seconds. What comes between two of them does not
    count: there the worker waits for room."""
    iterator = iter(elements)
    while True:
        began = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, max(left, LEAST))
        try:
            element = next(iterator)
        except StopIteration:
            return
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        left -= time.monotonic() - began
        yield element
