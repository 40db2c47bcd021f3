"""Background tasks as ``concurrent.futures`` knows them: ``wait``, ``as_completed``, callbacks and asyncio
work with them.

A pool is a graph through which the numbers of tasks go; what they stand for is in the pool's book, so that no
idle stage keeps a function, an argument or a result alive. On threads a sink calls. On processes a task is
packed beside its number when its turn comes, and unpacked by the call itself, and so is its result on the way
back: whatever goes wrong with either, the death of the worker included, the number tells whose future fails.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, ParamSpec, TypeVar

from flowchan import Broken, ChannelError, Failed, Graph, Run, pack, unpack, worker
from flowchan.declare.placements import Placement, PlacementOption, placement_argument
from flowchan.items.arguments import refuses_misspelt, whole
from flowchan.pipelines.user_calls import call, name_of, reason
from flowchan.run.policy.failures import Retires

P = ParamSpec("P")
T = TypeVar("T")

MOST_THREADS = 32
"""As many threads as a pool has at most where their number is not said, as with Python's executors."""

WAITING = 10**12
"""Tasks that may wait for a worker: ``submit`` never waits, as with every executor."""


class TaskPool(Executor):
    """Runs tasks on ``workers`` threads or processes, or on processes of hosts (``flowchan.hosts``),
    where the functions of the tasks must be importable, or those of the main script. Without a number there
    are as many processes as cores, or four threads more, but at most 32.

    ``initializer(*initargs)`` is called by each worker before its first task, by a replacement too. If it
    raises, the pool has failed as a whole: all tasks fail with ``BrokenExecutor``. A worker process that has
    done ``max_tasks_per_child`` tasks makes room for a new one when the next task comes.

    ``submit`` gives a ``concurrent.futures.Future``: its ``result()`` can be asked for any number of times,
    and what the task raised is raised to whoever asks. A task can be cancelled until it has begun; on
    processes the next task counts as begun while it waits for a worker. A worker process that dies fails its
    task with ``WorkerDied``, is replaced, and the others go on. Leave the ``with`` block, or call
    ``close()``, to wait for the tasks; the end of the program waits for them too.
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
        workers = _usual_workers(self._place) if workers is None else workers
        if initializer is not None and not callable(initializer):
            raise TypeError(f"TaskPool: initializer must be callable, or None, not {initializer!r}")
        if max_tasks_per_child is not None:
            whole("TaskPool", "max_tasks_per_child", max_tasks_per_child, 1)
            if not self._place.apart:
                raise ValueError("TaskPool: max_tasks_per_child is for processes, not for on='thread'")
        ready = _Ready(initializer, tuple(initargs))
        self._tasks: dict[int, _Task] = {}
        self._numbers = itertools.count(1)
        self._is_shut = False
        self._book = book = _Book(self._tasks, ready)
        graph = Graph(name)
        numbers = graph.input("submitted", capacity=WAITING)
        if not self._place.apart:
            numbers.sink(book.work, name="call", workers=workers)
        else:
            begun = numbers.flat_map(book.begin, name="begin", capacity=1)
            done = begun.map(
                _Called(ready, max_tasks_per_child), name="call", on=on, workers=workers,
                ordered=False, max_deaths=1, restarts=10**9,
            )  # fmt: skip
            begun.errors.sink(book.fail, name="not sent")
            done.errors.sink(book.fail, name="failures")
            done.sink(book.finish, name="results")
        run = graph.start()
        self._submitted = run[numbers]
        self._watcher = threading.Thread(
            target=_watch, args=(run, self._tasks), name=f"{name} watcher", daemon=True
        )
        self._watcher.start()
        weakref.finalize(self, self._submitted.close)  # a forgotten pool finishes its tasks and ends

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Asks for ``fn(*args, **kwargs)`` and returns at once. Raises ``RuntimeError`` when the pool is
        closed, and ``BrokenExecutor``, which is one too, when it has failed as a whole. What can't be sent to
        a process fails its future."""
        if _exiting.is_set():
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
            raise TypeError(f"submit: the first argument must be callable, not {fn!r}")
        if self._book.broken is not None:
            raise _broken(self._book.broken)
        number = next(self._numbers)
        self._tasks[number] = _Task(future, fn, args, kwargs)
        try:
            self._submitted.put(number)
        except (ChannelError, ValueError) as error:  # the channel, or our end of it, is closed
            self._tasks.pop(number, None)
            self._refuse(error)

    def _refuse(self, error: Exception) -> NoReturn:
        if self._is_shut and not isinstance(error, Broken):
            raise RuntimeError("cannot schedule new futures after shutdown") from error
        raise BrokenExecutor(f"the pool has failed and takes no more tasks: {error}") from (
            error.__cause__ or error
        )

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
    ) -> Iterator[T]:
        """``map(fn, *iterables)`` with the calls done by the pool, all of which are asked for at once. On
        processes ``chunksize`` calls are one task, which is quicker for many short ones. The iterator raises
        ``TimeoutError`` when a result is not there ``timeout`` seconds after this call."""
        if chunksize < 1:
            raise ValueError(f"map: chunksize must be at least 1, not {chunksize!r}")
        if not self._place.apart or chunksize == 1:
            return super().map(fn, *iterables, timeout=timeout)
        chunks = _chunks(zip(*iterables, strict=False), chunksize)
        return _one_by_one(super().map(functools.partial(_call_each, fn), chunks, timeout=timeout))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Takes no more tasks; ``wait``: until those it has are done. ``cancel_futures``: those that have not
        begun are cancelled. May be called again."""
        self._is_shut = True
        if cancel_futures:
            for task in list(self._tasks.values()):
                task.future.cancel()
        self._submitted.close()
        if wait:
            self._watcher.join()

    def close(self) -> None:
        """``shutdown()``: no more tasks, and waits until those it has are done."""
        self.shutdown()


class BackgroundTask(Future[T]):
    """``fn(*args, **kwargs)`` in the background: a ``concurrent.futures.Future`` that has a worker of its
    own.

    ``on="process"`` gives it a process. ``result()`` and ``close()`` wait for it; when the program ends it is
    broken off.
    """

    def __init__(
        self, fn: Callable[..., T], /, *args: Any, on: PlacementOption = "thread", **kwargs: Any
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


class _Task(NamedTuple):
    future: Future[Any]
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Book:
    """The tasks of one pool by number, and what its stages do with them. It does not know the pool, so that a
    pool which nobody has any more can go. A task is in it until its future has its end; what is called is
    taken out when it begins.
    """

    def __init__(self, tasks: dict[int, _Task], ready: _Ready) -> None:
        self._tasks = tasks
        self._ready, self._threads = ready, threading.local()
        self.broken: BaseException | None = None
        """What the initializer raised."""

    def _prepared(self) -> bool:
        """On a thread: whether its initializer has been called, if need be now."""
        if not hasattr(self._threads, "ready"):
            try:
                self._ready.call()
            except BaseException as error:
                self.broken = self.broken or error
                return False
            self._threads.ready = True
        return True

    def work(self, number: int) -> None:
        """On a thread: the call, and its end."""
        task = self._begun(number)
        if task is None:
            return
        future = task.future
        if self.broken is not None or not self._prepared():
            assert self.broken is not None
            self._end(number, future.set_exception, _broken(self.broken))
            return
        try:
            value = task.fn(*task.args, **task.kwargs)
        except BaseException as error:
            # the traceback holds this frame, and whoever keeps the exception shall not keep the arguments
            del task
            self._end(number, future.set_exception, error)
        else:
            del task
            self._end(number, future.set_result, value)
        finally:
            del future  # it holds the exception, which holds this frame

    def begin(self, number: int) -> list[Any]:
        """On the way to a process: the item to send, or none if the task was cancelled or can't be sent."""
        task = self._begun(number)
        if task is None:
            return []
        if self.broken is not None:
            self._end(number, task.future.set_exception, _broken(self.broken))
            return []
        try:
            return [(number, pack((task.fn, task.args, task.kwargs)))]
        except BaseException as error:
            self._end(number, task.future.set_exception, error)
            return []
        finally:
            del task

    def _begun(self, number: int) -> _Task | None:
        """The task, if it was not cancelled; from now on the book keeps its future only."""
        task = self._tasks[number]
        if not task.future.set_running_or_notify_cancel():
            del self._tasks[number]
            return None
        self._tasks[number] = _Task(task.future, _nothing, (), {})
        return task

    def finish(self, item: tuple[int, Any]) -> None:
        """Takes what came back from a process. The user's own code may be part of the unpacking."""
        number, packed = item
        if number not in self._tasks:
            return
        future = self._tasks[number].future
        try:
            value = unpack(packed)
        except BaseException as error:
            self._end(number, future.set_exception, error)
        else:
            self._end(number, future.set_result, value)
        finally:
            del future

    def fail(self, failed: Failed[Any]) -> None:
        """Takes a failure: of a call, of a worker, or of a task that was too large to be sent, which is a
        number yet. A host may have been lost whose worker had sent the result before."""
        number = failed.item if isinstance(failed.item, int) else failed.item[0]
        if number not in self._tasks:
            return
        error = reason(failed.error)
        if isinstance(error, _NotReady):
            self.broken = self.broken or error.args[0]
            error = _broken(error.args[0])
        self._end(number, self._tasks[number].future.set_exception, error)

    def _end(self, number: int, end: Callable[[Any], None], value: Any) -> None:
        del self._tasks[number]
        _end(end, value)


def _nothing() -> None: ...


def _usual_workers(placement: Placement) -> int:
    """How many a pool has where it is not said."""
    if placement.hosts:
        raise TypeError("TaskPool: say by workers= how many workers there shall be on the hosts together")
    cores = len(os.sched_getaffinity(0))
    return cores if placement.apart else min(MOST_THREADS, cores + 4)


def _end(end: Callable[[Any], None], value: Any) -> None:
    """Ends a future. Whatever its callbacks do, the pool goes on."""
    try:
        end(value)
    except InvalidStateError:
        pass  # somebody else has ended it
    except BaseException:
        logging.getLogger("concurrent.futures").exception(
            "a callback of a future of a TaskPool asked to exit"
        )


class _NotReady(Exception):
    """The initializer of a worker raised ``args[0]``."""


def _broken(error: BaseException) -> BrokenExecutor:
    broken = BrokenExecutor(
        f"the initializer of the pool raised {type(error).__name__}: {error}; its tasks are not done"
    )
    broken.__cause__ = error
    return broken


@dataclass(frozen=True)
class _Ready:
    """What a worker does before its first task."""

    initializer: Callable[..., object] | None
    arguments: tuple[Any, ...]

    def call(self) -> None:
        """Once in each worker."""
        if self.initializer is not None:
            self.initializer(*self.arguments)


class _Called:
    """In a process: the calls, as many as there may be."""

    def __init__(self, ready: _Ready, most: int | None) -> None:
        self._ready: _Ready | None = ready
        self._left = most

    def __call__(self, item: tuple[int, Any]) -> tuple[int, Any]:
        number, packed = item
        if self._left is not None:
            if self._left == 0:
                raise Retires
            self._left -= 1
        if self._ready is not None:
            try:
                self._ready.call()
            except BaseException as error:
                raise _NotReady(error) from error
            self._ready = None
        return number, call(_answer, packed)


def _answer(packed: Any) -> Any:
    """In a process: the call, everything of the user's included."""
    try:
        fn, args, kwargs = unpack(packed)
    except ImportError as error:
        if host := worker().host:
            error.add_note(
                f"raised on host {host!r}: what a task uses must be importable there, or of the main script"
            )
        raise
    if isinstance(packed, list):
        packed.clear()  # if the call fails, the item is sent back: its arrays need not be
    return pack(fn(*args, **kwargs))


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
            yield chunk.pop()  # keeps nothing that was given


def _watch(run: Run, tasks: dict[int, _Task]) -> None:
    """Waits for the end of the run. Whatever it ended by, nobody waits for a future in vain."""
    cause: BaseException | None = None
    try:
        run.wait()
    except BaseException as error:
        cause = error
    _running.pop(threading.current_thread(), None)
    while tasks:
        _, task = tasks.popitem()
        # One that was cancelled is told so to whoever waits for it.
        if task.future.running() or task.future.set_running_or_notify_cancel():
            broken = BrokenExecutor("the pool has failed, and this task was not done")
            broken.__cause__ = cause
            _end(task.future.set_exception, broken)


# The watchers of pools that were given tasks, each with what closes the pool. The end of the program waits
# for them, as it does for every executor.
_running: dict[threading.Thread, Callable[[], None]] = {}
_exiting = threading.Event()


def _finish_all() -> None:
    _exiting.set()
    running = dict(_running)
    for close in running.values():
        close()
    for watcher in running:
        watcher.join()


threading._register_atexit(_finish_all)  # type: ignore[attr-defined]  # what the executors of Python itself use
os.register_at_fork(after_in_child=_running.clear)  # the parent's pools are not the child's
