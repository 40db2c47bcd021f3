"""Run background tasks through the interface of ``concurrent.futures``.

``wait``, ``as_completed``, callbacks and asyncio work with the futures.

A pool is a graph whose items are task numbers. The tasks themselves are in a table of the pool, so that an
idle stage keeps no function, argument or result alive. On threads, a sink calls the task. For processes, the
task is packed just before it is sent, together with its number. The call in the worker also unpacks the task
and packs the result. Therefore, after any failure, including the worker's death, the number identifies the
future that must fail.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future
from typing import Any, NoReturn, ParamSpec, TypeVar

from flowchan import Broken, ChannelError, Graph, Run
from flowchan.declare.placements import Placement, PlacementOption, placement_argument
from flowchan.items.arguments import refuses_misspelt, whole
from flowchan.pipelines.task_calls import (
    CallTable,
    Initializer,
    ProcessCalls,
    Task,
    end_future,
    initializer_failed,
)
from flowchan.pipelines.user_calls import name_of
from flowchan.public import public
from flowchan.run.observe.cgroups import affinity_cores

P = ParamSpec("P")
T = TypeVar("T")

MOST_THREADS = 32
"""Default maximum number of threads in a pool, the same as for Python's executors."""

WAITING = 10**12
"""Maximum number of waiting tasks: so large that ``submit`` never waits, as in other executors."""


@public
class TaskPool(Executor):
    """Executor that runs tasks on threads, processes or hosts.

    ``submit`` returns a ``concurrent.futures.Future``. A task can be cancelled until it starts. If the
    workers are processes, the next task counts as started even while it waits for a worker. If a worker
    process dies, its task fails with ``WorkerDied``, and a new worker replaces it. Leaving the ``with``
    block, ``close()`` and the interpreter's exit all wait for the tasks.

    Args:
        workers: Number of workers. Default for processes: one per core. Default for threads: four more than
            the number of cores, but at most 32. Required for hosts.
        on: ``"thread"`` (default), ``"process"``, or a pool from ``flowchan.hosts``. The hosts must be able
            to import the tasks' functions, unless the main script defines them.
        name: Name of the pool in reports (default: ``"tasks"``).
        initializer: Function that each worker calls before its first task (default: none). If the initializer
            raises, all tasks fail with ``BrokenExecutor``.
        initargs: Arguments of ``initializer``.
        max_tasks_per_child: Number of tasks after which a worker process is replaced (default: no limit).

    Raises:
        TypeError: ``initializer`` cannot be called, or ``workers`` is missing for hosts.
        ValueError: An argument is out of range, or ``max_tasks_per_child`` is given for threads.

    Example:
        >>> from flowchan.pipelines import TaskPool
        >>> with TaskPool(2, on="process") as pool:
        ...     future = pool.submit(pow, 2, 10)
        ...     future.result(), list(pool.map(abs, [-1, -2]))
        (1024, [1, 2])
    """

    @refuses_misspelt("TaskPool")
    def __init__(
        self,
        workers: int | None = None,
        on: PlacementOption = "thread",
        name: str = "tasks",
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        max_tasks_per_child: int | None = None,
    ) -> None:
        self._place = placement_argument("TaskPool", on)
        workers = _usual_workers(self._place) if workers is None else whole("TaskPool", "workers", workers, 1)
        if initializer is not None and not callable(initializer):
            raise TypeError(f"TaskPool: initializer must be callable or None, got {initializer!r}")
        if max_tasks_per_child is not None:
            whole("TaskPool", "max_tasks_per_child", max_tasks_per_child, 1)
            if not self._place.own_process:
                raise ValueError(
                    "TaskPool: max_tasks_per_child must be None with on='thread', got "
                    f"{max_tasks_per_child!r}; use on='process'"
                )
        ready = Initializer(initializer, tuple(initargs))
        self._tasks: dict[int, Task] = {}
        self._numbers = itertools.count(1)
        self._is_shut = False
        self._calls = calls = CallTable(self._tasks, ready)
        graph = Graph(name)
        numbers = graph.input("submitted", capacity=WAITING)
        if not self._place.own_process:
            numbers.sink(calls.work, name="call", workers=workers)
        else:
            begun = numbers.flat_map(calls.begin, name="begin", capacity=1)
            done = begun.map(
                ProcessCalls(ready, max_tasks_per_child), name="call", on=on, workers=workers,
                ordered=False, max_deaths=1, restarts=10**9,
            )  # fmt: skip
            begun.errors.sink(calls.fail, name="not sent")
            done.errors.sink(calls.fail, name="failures")
            done.sink(calls.finish, name="results")
        run = graph.start()
        self._submitted = run[numbers]
        self._watcher = threading.Thread(
            target=_watch, args=(run, self._tasks), name=f"{name} watcher", daemon=True
        )
        self._watcher.start()
        # A pool to which nothing refers finishes its tasks and then ends.
        weakref.finalize(self, self._submitted.close)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Submit the call ``fn(*args, **kwargs)`` and return at once.

        Args:
            fn: Function to call.
            *args: Positional arguments.
            **kwargs: Keyword arguments.

        Returns:
            The future. If the call cannot be sent to a process, the future fails.

        Raises:
            TypeError: ``fn`` cannot be called.
            RuntimeError: The pool is closed.
            concurrent.futures.BrokenExecutor: The whole pool has failed.
        """
        if _exiting:
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")
        future: Future[T] = Future()
        if self._watcher.is_alive():
            _running[self._watcher] = self._submitted.close
        self._enter(future, fn, args, kwargs)
        return future

    def _enter(
        self, future: Future[Any], fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not callable(fn):
            raise TypeError(f"submit: the first argument must be callable, got {fn!r}")
        if self._calls.broken is not None:
            raise initializer_failed(self._calls.broken)
        number = next(self._numbers)
        self._tasks[number] = Task(future, fn, args, kwargs)
        try:
            self._submitted.put(number)
        except (ChannelError, ValueError) as error:  # the channel or this process's port is closed
            self._tasks.pop(number, None)
            self._refuse(error)

    def _refuse(self, error: Exception) -> NoReturn:
        if self._is_shut and not isinstance(error, Broken):
            raise RuntimeError("cannot schedule new futures after shutdown") from None
        raise BrokenExecutor(f"the pool has failed and accepts no more tasks: {error}") from (
            error.__cause__ or error
        )

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
    ) -> Iterator[T]:
        """Submit ``fn`` for each tuple of arguments, and yield the results in order.

        Args:
            fn: Function to call.
            *iterables: Iterables of arguments, which are consumed immediately.
            timeout: Maximum seconds from this call until each result (default: no limit).
            chunksize: Number of calls that a process gets as one task (default: 1). A larger number is faster
                for many short calls.

        Returns:
            An iterator over the results. If ``timeout`` expires, the iterator raises ``TimeoutError``. If a
            call failed, it raises that call's exception.

        Raises:
            ValueError: ``chunksize`` is less than 1.
        """
        if chunksize < 1:
            raise ValueError(f"map: chunksize must be at least 1, got {chunksize!r}")
        if not self._place.own_process or chunksize == 1:
            return super().map(fn, *iterables, timeout=timeout)
        chunks = _chunks(zip(*iterables, strict=False), chunksize)
        return _one_by_one(super().map(functools.partial(_call_each, fn), chunks, timeout=timeout))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stop accepting tasks, and by default wait for those that were submitted.

        Further calls have no effect.

        Args:
            wait: True to wait until all tasks are done (default: True).
            cancel_futures: True to cancel the tasks that have not started (default: False).

        Example:
            >>> from flowchan.pipelines import TaskPool
            >>> pool = TaskPool(1)
            >>> future = pool.submit(abs, -1)
            >>> pool.shutdown()
            >>> future.result()
            1
        """
        self._is_shut = True
        if cancel_futures:
            for task in list(self._tasks.values()):
                task.future.cancel()
        self._submitted.close()
        if wait:
            self._watcher.join()

    def close(self) -> None:
        """Stop accepting tasks, and wait until all tasks are done, like ``shutdown()``.

        Example:
            >>> from flowchan.pipelines import TaskPool
            >>> pool = TaskPool(1)
            >>> future = pool.submit(abs, -1)
            >>> pool.close()
            >>> future.done()
            True
        """
        self.shutdown()


@public
class BackgroundTask(Future[T]):
    """Future for one call that runs in the background on its own worker.

    ``result()`` and ``close()`` wait for the call. If the program exits earlier, the call is ended.

    Args:
        fn: Function to call.
        *args: Positional arguments.
        on: ``"thread"`` (default), ``"process"``, or a pool from ``flowchan.hosts``.
        **kwargs: Keyword arguments.

    Raises:
        TypeError: ``fn`` cannot be called.

    Example:
        >>> from flowchan.pipelines import BackgroundTask
        >>> task = BackgroundTask(pow, 2, 10, on="process")
        >>> task.result()
        1024
        >>> task.close()
    """

    def __init__(
        self, fn: Callable[..., T], /, *args: Any, on: PlacementOption = "thread", **kwargs: Any
    ) -> None:
        super().__init__()
        if not callable(fn):
            raise TypeError(f"BackgroundTask: the first argument must be callable, got {fn!r}")
        self._pool = TaskPool(1, on=on, name=name_of(fn))
        self._pool._enter(self, fn, args, kwargs)
        self._pool.shutdown(wait=False)

    def close(self) -> None:
        """Cancel the task if it has not started, and wait until its worker has ended."""
        self.cancel()
        self._pool.shutdown()


def _usual_workers(placement: Placement) -> int:
    """Return the default number of workers for a placement."""
    if placement.hosts:
        raise TypeError("TaskPool: workers must be the total number of workers on all hosts, got None")
    cores = affinity_cores()
    return cores if placement.own_process else min(MOST_THREADS, cores + 4)


def _chunks(calls: Iterable[Any], size: int) -> Iterator[list[Any]]:
    calls = iter(calls)
    while chunk := list(itertools.islice(calls, size)):
        yield chunk


def _call_each(fn: Callable[..., T], calls: list[tuple[Any, ...]]) -> list[T]:
    return [fn(*arguments) for arguments in calls]


def _one_by_one(chunks: Iterator[list[T]]) -> Iterator[T]:
    for chunk in chunks:
        chunk.reverse()
        while chunk:
            yield chunk.pop()  # yields the result without keeping a reference to it


def _watch(run: Run, tasks: dict[int, Task]) -> None:
    """Wait until the run ends, and then fail every future that is not done."""
    cause: BaseException | None = None
    try:
        run.wait()
    except BaseException as error:
        cause = error
    _running.pop(threading.current_thread(), None)
    while tasks:
        _, task = tasks.popitem()
        # For a cancelled task, this call notifies the threads that are waiting for its future.
        if task.future.running() or task.future.set_running_or_notify_cancel():
            broken = BrokenExecutor("the pool failed before this task was finished")
            broken.__cause__ = cause
            end_future(task.future.set_exception, broken)


# Watcher threads of pools that have tasks, each with the function that closes its pool. At exit, the
# interpreter waits for these threads, as it does for any executor.
_running: dict[threading.Thread, Callable[[], None]] = {}
_exiting = False


def _finish_all() -> None:
    global _exiting
    _exiting = True
    running = dict(_running)
    for close in running.values():
        close()
    for watcher in running:
        watcher.join()


threading._register_atexit(_finish_all)  # type: ignore[attr-defined]  # Python's own executors use it
os.register_at_fork(after_in_child=_running.clear)  # a child does not own its parent's pools
