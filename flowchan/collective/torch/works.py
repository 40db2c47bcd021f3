"""Present the backend's operations to torch: work objects, errors and profiler events."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from flowchan.collective.handles import Handle

# The types of these objects differ between versions of torch.
_c10d: Any = torch._C._distributed_c10d
_Work: Any = dist.Work
_Record: Any = torch.profiler.record_function
_is_profiling: Any = torch._C._autograd._profiler_enabled


class OperationTimeout(TimeoutError, dist.DistBackendError):
    """Raised when an operation of a process group exceeds the group's timeout.

    After the timeout of a collective, the group is unusable. As in other backends, the error is a
    ``RuntimeError``.

    Example:
        >>> from flowchan.collective.torch.works import OperationTimeout
        >>> issubclass(OperationTimeout, TimeoutError), issubclass(OperationTimeout, RuntimeError)
        (True, True)
    """


@contextlib.contextmanager
def timed(limit: float | None) -> Iterator[None]:
    """Convert a group's ``TimeoutError`` to :class:`OperationTimeout`, with the words that torch uses."""
    try:
        yield
    except TimeoutError as error:
        if limit is None:
            raise
        raise OperationTimeout(f"[flowchan] Timed out (timeout={limit:g} s): {error}") from error


class Work(_Work):  # type: ignore[misc]
    """Operation that has finished, or is running in the group's thread."""

    def __init__(self, result: Any, going_on: Future[Any] | None = None) -> None:
        super().__init__()
        self._result = result
        self._going_on = going_on

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._going_on is not None:
            Handle(self._going_on).wait(timeout.total_seconds() or None)
        return True

    def is_completed(self) -> bool:
        return self._going_on is None or self._going_on.done()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        return None if self._going_on is None else self._going_on.exception()

    def result(self) -> Any:
        self.wait()
        return self._result

    def _source_rank(self) -> int:
        """Return the sender's rank, for a receive from any rank."""
        assert self._going_on is not None
        return int(self._going_on.result())

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        promise: torch.futures.Future[Any] = torch.futures.Future()
        if self._going_on is None:
            promise.set_result(self._result)
            return promise
        self._going_on.add_done_callback(lambda _: promise.set_result(None))
        # Raise errors in a callback: DDP waits in C++, which does not handle errors from ``set_exception``.
        return promise.then(lambda _: self.result())


def recorded(name: str, start: Callable[[], Work]) -> Work:
    """Start an operation, and record it as an event if torch's profiler is active.

    The event ends with the operation, which may still be running when this function returns.
    """
    if not _is_profiling():
        return start()
    with _Record(f"flowchan:{name}") as event:
        work = start()
        if not work.is_completed():
            event._call_end_callbacks_on_future(work.get_future())
        return work


def done(result: Any) -> Work:
    """Return a completed torch ``Work`` object.

    DDP's ``join`` passes the object to C++ without keeping a reference in Python. A :class:`Work` from this
    module would then lose its Python part, and C++ would wait for it forever.
    """
    promise: torch.futures.Future[Any] = torch.futures.Future()
    promise.set_result(result)
    work: Work = _c10d._create_work_from_future(promise)
    return work
