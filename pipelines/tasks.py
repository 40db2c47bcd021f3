"""Background tasks as ``concurrent.futures`` knows them: ``wait``, ``as_completed``, callbacks and asyncio work with them.

A pool is a graph: an input, on processes a stage that hands over one task at a time, the stage that calls, and sinks that
fill in the futures.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future, InvalidStateError
from typing import Any, Literal, ParamSpec, TypeVar

from flowchan import ChannelError, Failed, Graph, Run
from flowchan.pipelines.calls import call, name_of, reason

P = ParamSpec("P")
T = TypeVar("T")

Task = tuple[int, Callable[..., Any], tuple[Any, ...], dict[str, Any]]

WAITING = 10**12
"""Tasks that may wait for a worker: ``submit`` never waits, as with every executor."""


class TaskPool(Executor):
    """Runs tasks on ``workers`` threads or processes.

    ``submit`` gives a ``concurrent.futures.Future``: its ``result()`` can be asked for any number of times, and what the
    task raised is raised to whoever asks. A task can be cancelled until it has begun; on processes the next task counts as
    begun while it waits for a worker. A worker process that dies fails its task with ``WorkerDied``, is replaced, and
    the others go on. Leave the ``with`` block, or call ``close()``, to wait for the tasks; those that nobody waits for
    are broken off when the program ends.
    """

    def __init__(self, workers: int, on: Literal["thread", "process"] = "thread", name: str = "tasks") -> None:
        self._futures: dict[int, Future[Any]] = {}
        self._numbers = itertools.count(1)
        book = _Book(self._futures)
        graph = Graph(name)
        tasks = graph.input("submitted", capacity=WAITING)
        if on == "thread":
            tasks.sink(book.work, name="call", workers=workers)
        else:
            begun = tasks.filter(book.begin, name="begin", capacity=1)
            done = begun.map(_called, name="call", on=on, workers=workers, ordered=False, max_deaths=1, restarts=10**9)
            graph.merge(begun.errors, done.errors).sink(book.fail, name="failures")
            done.sink(book.finish, name="results")
        run = graph.start()
        self._submitted = run[tasks]
        self._watcher = threading.Thread(target=_watch, args=(run, self._futures), name=f"{name} watcher", daemon=True)
        self._watcher.start()
        weakref.finalize(self, self._submitted.close)  # a forgotten pool finishes its tasks and ends

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Asks for ``fn(*args, **kwargs)`` and returns at once. Raises ``RuntimeError`` when the pool is closed."""
        future: Future[T] = Future()
        self._enter(future, fn, args, kwargs)
        return future

    def _enter(self, future: Future[Any], fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not callable(fn):
            raise TypeError(f"submit: the first argument must be callable, not {fn!r}")
        number = next(self._numbers)
        self._futures[number] = future
        try:
            self._submitted.put((number, fn, args, kwargs))
        except (ChannelError, ValueError) as error:  # the channel, or our end of it, is closed
            self._futures.pop(number, None)
            raise BrokenExecutor(f"the pool takes no more tasks: {error}") from error

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Takes no more tasks; ``wait``: until those it has are done. ``cancel_futures``: those that have not begun are
        cancelled. May be called again."""
        if cancel_futures:
            for future in list(self._futures.values()):
                future.cancel()
        self._submitted.close()
        if wait:
            self._watcher.join()

    def close(self) -> None:
        """``shutdown()``: no more tasks, and waits until those it has are done."""
        self.shutdown()


class BackgroundTask(Future[T]):
    """``fn(*args, **kwargs)`` in the background: a ``concurrent.futures.Future`` that has a worker of its own.

    ``on="process"`` gives it a process. ``result()`` and ``close()`` wait for it; when the program ends it is broken off.
    """

    def __init__(
        self, fn: Callable[..., T], *args: Any, on: Literal["thread", "process"] = "thread", **kwargs: Any
    ) -> None:
        super().__init__()
        if not callable(fn):
            raise TypeError(f"BackgroundTask: the first argument must be callable, not {fn!r}")
        self._pool = TaskPool(1, on=on, name=name_of(fn))
        self._pool._enter(self, fn, args, kwargs)
        self._pool.shutdown(wait=False)

    def close(self) -> None:
        """Cancels the task if it has not begun, and waits until its worker is gone. May be called again."""
        self.cancel()
        self._pool.shutdown()


class _Book:
    """The futures of one pool by number, and what its stages do with them. It does not know the pool, so that a pool
    which nobody has any more can go."""

    def __init__(self, futures: dict[int, Future[Any]]) -> None:
        self._futures = futures

    def begin(self, task: Task) -> bool:
        """Whether the task shall be done: it was not cancelled."""
        wanted = self._futures[task[0]].set_running_or_notify_cancel()
        if not wanted:
            del self._futures[task[0]]
        return wanted

    def work(self, task: Task) -> None:
        if self.begin(task):
            try:
                number, value = _called(task)
            except BaseException as error:
                self.fail(Failed(task, error, 1))
            else:
                self.finish((number, value))

    def finish(self, result: tuple[int, Any]) -> None:
        number, value = result
        self._futures.pop(number).set_result(value)

    def fail(self, failed: Failed) -> None:
        self._futures.pop(failed.item[0]).set_exception(reason(failed.error))


def _called(task: Task) -> tuple[int, Any]:
    number, fn, args, kwargs = task
    return number, call(fn, *args, **kwargs)


def _watch(run: Run, futures: dict[int, Future[Any]]) -> None:
    """Waits for the end of the run. Whatever it ended by, nobody waits for a future in vain."""
    error: BaseException = BrokenExecutor("the pool has ended")
    try:
        run.wait()
    except BaseException as ended:
        error = ended
    while futures:
        _, future = futures.popitem()
        try:
            future.set_exception(error)
        except InvalidStateError:  # it was cancelled: whoever waits for it shall hear that
            future.set_running_or_notify_cancel()
