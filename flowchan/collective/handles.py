"""Operations that go on while their caller does something else."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from flowchan.collective import array_access
from flowchan.collective.deadline import countdown
from flowchan.transport.interrupts import unless_interrupted

T = TypeVar("T")


class Handle:
    """An operation that was started with ``wait=False``. ``wait()`` returns its result, or raises what it
    ended by, any number of times."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def wait(self, timeout: float | None = None) -> Any:
        """The result, once it is there. A ``TimeoutError`` after ``timeout`` seconds ends the waiting, not
        the operation."""
        return self._future.result(timeout)

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()


class HandleOwner(Protocol):
    """Whose operations they are. It is told how many are started and not done yet, by changes of that."""

    def _queue(self, change: int) -> None: ...
    def close(self) -> None: ...


class Later:
    """The thread of a member that does started operations, one after the other."""

    def __init__(self, member: HandleOwner) -> None:
        self._member = weakref.proxy(member)  # who drops a member leaves at once
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="flowchan-collective")
        self._last: Future[Any] | None = None
        end_before_threads(self, Later.leave)

    def start(self, call: Callable[[], Any], given: Sequence[Any] = ()) -> Handle:
        """``given``: what the call works on. Of what lies on a device the caller's stream finishes its part
        first, and the thread's its own before the call counts as done."""
        there = [x for x in given if not array_access.is_here(x)]

        def run() -> Any:
            result = call()
            for x in there:
                array_access.finish(x)
            return result

        for x in there:
            array_access.finish(x)
        self._member._queue(1)
        future = self._thread.submit(run if there else call)
        future.add_done_callback(lambda _: self._member._queue(-1))
        self._last = future
        return Handle(future)

    def settle(self, timeout: float | None) -> None:
        """Returns when all that was started has ended; how it ended is for who waits for it."""
        if self._last is not None:
            try:
                self._last.exception(timeout)
            except unless_interrupted(TimeoutError):
                raise TimeoutError("what was started before, with wait=False, was not done in time") from None
            self._last = None

    def leave(self) -> None:
        """When an exception has ended the program. Its threads would wait for the other members, which may
        wait for this one."""
        if hasattr(sys, "last_value"):
            with contextlib.suppress(ReferenceError):
                self._member.close()

    def close(self) -> None:
        self._thread.shutdown(wait=True)


_ends: weakref.WeakKeyDictionary[Any, tuple[int, Callable[[Any], None]]] = weakref.WeakKeyDictionary()


def end_before_threads(owner: T, end: Callable[[T], None]) -> None:
    """Has ``end(owner)`` called at the end of the program, before Python waits for the threads of pools. A
    fork has none of these."""
    _ends[owner] = os.getpid(), end


def _end_all() -> None:
    for owner, (process, end) in list(_ends.items()):
        if process == os.getpid():
            end(owner)


threading._register_atexit(_end_all)  # type: ignore[attr-defined]


class Starting:
    """What a member has for its operations to be done now or later."""

    _later: Later | None

    if TYPE_CHECKING:  # the core has it, and each kind of group

        def _queue(self, change: int) -> None: ...
        def close(self) -> None: ...

    def _do(
        self, call: Callable[[float | None], Any], timeout: float | None, wait: bool | None, *given: Any
    ) -> Any:
        """Now, when what was started before is done; or later, by a handle. ``call`` takes what is left of
        the time, ``given`` is what it works on."""
        if wait is not False:
            return call(self._settle(timeout))
        left = countdown(timeout)
        return self._start(lambda: call(left()), *given)

    def _start(self, call: Callable[[], Any], *given: Any) -> Handle:
        if self._later is None:
            self._later = Later(self)
        return self._later.start(call, given)

    def _settle(self, timeout: float | None = None) -> float | None:
        """Returns when what was started before is done: operations keep their order. Gives what is left of
        the time."""
        if self._later is None:
            return timeout
        left = countdown(timeout)
        self._later.settle(left())
        return left()
