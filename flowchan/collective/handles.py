"""Run operations in the background while their caller continues."""

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
from flowchan.items.tracebacks import shortened
from flowchan.transport.interrupts import unless_interrupted

T = TypeVar("T")
SLICE_S = 0.1
"""Maximum seconds for which a wait ignores a signal (C11)."""


class Handle:
    """Handle of an operation that was started with ``wait=False``.

    Example:
        >>> from flowchan.collective import group
        >>> with group() as g:
        ...     handle = g.allreduce(3, wait=False)
        ...     handle.wait(), handle.done()
        (3, True)
    """

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the operation and return its result. Later calls return the same result.

        Args:
            timeout: Seconds to wait; None means no limit.

        Returns:
            The result of the operation.

        Raises:
            TimeoutError: The operation did not finish in time. The operation continues, and you may call
                ``wait`` again.
            Exception: Whatever the operation raised.
        """
        # CPython loses a signal that arrives between its check for signals and the sleep of a lock. The main
        # thread would then sleep until the operation ends, so it sleeps in slices.
        remaining = countdown(timeout)
        while not self._future.done():
            left = remaining()
            try:
                return self._future.result(SLICE_S if left is None else min(left, SLICE_S))
            except TimeoutError:
                if left is not None and left <= SLICE_S and not self._future.done():
                    raise
        return self._future.result()

    def done(self) -> bool:
        """Return whether the operation has ended.

        Returns:
            True if the operation returned or raised.
        """
        return self._future.done()


class HandleOwner(Protocol):
    """Group member that starts operations, as its handles see it.

    ``_queue`` receives each change in the number of unfinished operations.
    """

    def _queue(self, change: int) -> None: ...
    def close(self) -> None: ...


class Later:
    """A member's background thread, which runs started operations one after another."""

    def __init__(self, member: HandleOwner) -> None:
        self._member = weakref.proxy(member)  # weak, so that an unused member is closed at once
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="flowchan-collective")
        self._last: Future[Any] | None = None
        end_before_threads(self, Later.leave)

    def start(self, call: Callable[[], Any], given: Sequence[Any] = ()) -> Handle:
        """Queue a call and return its handle.

        ``given`` lists the arrays that the call uses. If the arrays are on a device, the caller's CUDA stream
        must finish before the call is queued. The call counts as done when the thread's CUDA stream has
        finished.
        """
        on_devices = [x for x in given if not array_access.is_here(x)]

        def run() -> Any:
            result = call()
            for x in on_devices:
                array_access.finish(x)
            return result

        for x in on_devices:
            array_access.finish(x)
        self._member._queue(1)
        future = self._thread.submit(run if on_devices else call)
        future.add_done_callback(lambda _: self._member._queue(-1))
        self._last = future
        return Handle(future)

    def settle(self, timeout: float | None) -> None:
        """Wait until all started operations have ended. Errors are raised only by the operations' handles."""
        if self._last is not None:
            try:
                self._last.exception(timeout)
            except unless_interrupted(TimeoutError):
                raise TimeoutError(
                    "close: operations that were started with wait=False did not finish in time"
                ) from None
            self._last = None

    def leave(self) -> None:
        """Close the member if an exception is ending the program.

        Otherwise, the thread could wait for other members while those wait for this member.
        """
        if hasattr(sys, "last_value"):
            with contextlib.suppress(ReferenceError):
                self._member.close()

    def close(self) -> None:
        self._thread.shutdown(wait=True)


_ends: weakref.WeakKeyDictionary[Any, tuple[int, Callable[[Any], None]]] = weakref.WeakKeyDictionary()


def end_before_threads(owner: T, end: Callable[[T], None]) -> None:
    """Call ``end(owner)`` when the program exits, before Python joins its threads.

    A forked child does not have these threads, so it does not call ``end``.
    """
    _ends[owner] = os.getpid(), end


def _end_all() -> None:
    for owner, (process, end) in list(_ends.items()):
        if process == os.getpid():
            end(owner)


threading._register_atexit(_end_all)  # type: ignore[attr-defined]


class Starting:
    """Base class of groups, with the methods that run an operation now or in the member's thread."""

    _later: Later | None

    if TYPE_CHECKING:  # methods and attributes that the core and each kind of group define

        def _queue(self, change: int) -> None: ...
        def close(self) -> None: ...

    def _do(
        self, call: Callable[[float | None], Any], timeout: float | None, wait: bool | None, *given: Any
    ) -> Any:
        """Run ``call`` after all operations that were started before, or queue it and return its handle.

        ``call`` receives the number of seconds remaining; ``given`` lists the arrays that it uses.
        """
        if wait is not False:
            try:
                return call(self._settle(timeout))
            except Exception as error:
                error.__traceback__ = shortened(error.__traceback__)
                raise
        remaining = countdown(timeout)
        return self._start(lambda: call(remaining()), *given)

    def _start(self, call: Callable[[], Any], *given: Any) -> Handle:
        if self._later is None:
            self._later = Later(self)
        return self._later.start(call, given)

    def _settle(self, timeout: float | None = None) -> float | None:
        """Wait for all operations that were started before, and return the remaining seconds.

        This wait keeps a member's operations in order.
        """
        if self._later is None:
            return timeout
        remaining = countdown(timeout)
        self._later.settle(remaining())
        return remaining()
