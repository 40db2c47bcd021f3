"""Define the table of a pool's tasks, and the functions that the pool's stages call."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, NamedTuple

from flowchan import Failed, pack, unpack, worker
from flowchan.items.worker_globals import shared_globals
from flowchan.pipelines.user_calls import call, reason
from flowchan.run.policy.failures import Retires


class Task(NamedTuple):
    """Future of a task, and the call to make."""

    future: Future[Any]
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class CallTable:
    """Tasks of one pool, by number, and the functions that the pool's stages call.

    The table does not refer to the pool, so that an unused pool can be deleted. A task stays in the table
    until its future is done, but its function and arguments are removed when the call starts.
    """

    def __init__(self, tasks: dict[int, Task], ready: Initializer) -> None:
        self._tasks = tasks
        self._ready, self._threads = ready, threading.local()
        self.broken: BaseException | None = None
        """Exception of the initializer, if it raised one."""

    def _prepared(self) -> bool:
        """Run the initializer, unless it has run on this thread. Return False if the initializer raises."""
        if not hasattr(self._threads, "ready"):
            try:
                self._ready.call()
            except BaseException as error:
                self.broken = self.broken or error
                return False
            self._threads.ready = True
        return True

    def work(self, number: int) -> None:
        """Run a task on a thread, and set the result or exception of its future."""
        task = self._begun(number)
        if task is None:
            return
        future = task.future
        if self.broken is not None or not self._prepared():
            assert self.broken is not None
            self._finish(number, future.set_exception, initializer_failed(self.broken))
            return
        try:
            value = task.fn(*task.args, **task.kwargs)
        except BaseException as error:
            # The exception's traceback refers to this frame, so an exception that is kept would keep the
            # arguments alive.
            del task
            self._finish(number, future.set_exception, error)
        else:
            del task
            self._finish(number, future.set_result, value)
        finally:
            # Break a reference cycle: the future refers to the exception, which refers to this frame.
            del future

    def begin(self, number: int) -> list[Any]:
        """Return a list with the item to send to a process, or an empty list if the task cannot be sent."""
        task = self._begun(number)
        if task is None:
            return []
        if self.broken is not None:
            self._finish(number, task.future.set_exception, initializer_failed(self.broken))
            return []
        try:
            return [(number, pack((task.fn, task.args, task.kwargs)))]
        except BaseException as error:
            self._finish(number, task.future.set_exception, error)
            return []
        finally:
            del task

    def _begun(self, number: int) -> Task | None:
        """Return the task, and keep only its future in the table. Return None if the task was cancelled."""
        task = self._tasks[number]
        if not task.future.set_running_or_notify_cancel():
            del self._tasks[number]
            return None
        self._tasks[number] = Task(task.future, _nothing, (), {})
        return task

    def finish(self, item: tuple[int, Any]) -> None:
        """Resolve a future with a result from a process. Unpacking the result may run the user's code."""
        number, packed = item
        if number not in self._tasks:
            return
        future = self._tasks[number].future
        try:
            value = unpack(packed)
        except BaseException as error:
            self._finish(number, future.set_exception, error)
        else:
            self._finish(number, future.set_result, value)
        finally:
            del future

    def fail(self, failed: Failed[Any]) -> None:
        """Set a future's exception: its call failed, its worker died, or its task is too large to be sent.

        If the task could not be sent, the item is only its number. If the result arrived before its host was
        lost, the failure is ignored.
        """
        number = failed.item if isinstance(failed.item, int) else failed.item[0]
        if number not in self._tasks:
            return
        error = reason(failed.error)
        if isinstance(error, _NotReady):
            self.broken = self.broken or error.args[0]
            error = initializer_failed(error.args[0])
        self._finish(number, self._tasks[number].future.set_exception, error)

    def _finish(self, number: int, end: Callable[[Any], None], value: Any) -> None:
        del self._tasks[number]
        end_future(end, value)


def _nothing() -> None: ...


def end_future(end: Callable[[Any], None], value: Any) -> None:
    """Set a future's result or exception. If one of its callbacks raises, the pool continues."""
    try:
        end(value)
    except InvalidStateError:
        pass  # the future was already done
    except BaseException:
        logging.getLogger("concurrent.futures").exception(
            "a callback of a TaskPool future raised an exception such as SystemExit"
        )


class _NotReady(Exception):
    """Raised in a worker whose initializer raised ``args[0]``."""


def initializer_failed(error: BaseException) -> BrokenExecutor:
    """Return the error for the tasks of a pool whose initializer raised ``error``."""
    broken = BrokenExecutor(
        f"the initializer of the pool raised {type(error).__name__}: {error}; its tasks will not run"
    )
    broken.__cause__ = error
    return broken


@dataclass(frozen=True)
class Initializer:
    """Initializer, with its arguments, which a worker calls before its first task."""

    initializer: Callable[..., object] | None
    arguments: tuple[Any, ...]

    def call(self) -> None:
        """Call the initializer, if any."""
        if self.initializer is not None:
            self.initializer(*self.arguments)


class ProcessCalls:
    """Callable of a worker process. If ``most`` is set, the worker retires after this number of tasks."""

    def __init__(self, ready: Initializer, most: int | None) -> None:
        self._ready: Initializer | None = ready
        self._remaining = most

    def __call__(self, item: tuple[int, Any]) -> tuple[int, Any]:
        number, packed = item
        if self._remaining is not None:
            if self._remaining == 0:
                raise Retires
            self._remaining -= 1
        if self._ready is not None:
            try:
                self._ready.call()
            except BaseException as error:
                raise _NotReady(error) from error
            self._ready = None
        return number, call(_answer, packed)


def _answer(packed: Any) -> Any:
    """Run a task in a process: unpack it, call its function and pack the result."""
    try:
        with shared_globals():
            fn, args, kwargs = unpack(packed)
    except ImportError as error:
        if host := worker().host:
            error.add_note(
                f"raised on host {host!r}: the objects in a task must be importable there, or be "
                "defined in the main script"
            )
        raise
    if isinstance(packed, list):
        packed.clear()  # If the call fails, the item is sent back, so drop the arrays from it.
    return pack(fn(*args, **kwargs))
