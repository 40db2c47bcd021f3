"""Run one function in n workers and return the results in worker order."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from flowchan import Channel, Empty, Failed, Graph, RunError, StageError
from flowchan.declare.placements import PlacementOption
from flowchan.items.arguments import refuses_misspelt, whole
from flowchan.pipelines.user_calls import call, name_of, reason
from flowchan.public import public


@public
class Workers:
    """Handle of running workers, returned by :func:`map`.

    Workers keep running even if the program never joins them. When the program exits, the workers are
    terminated.

    Args:
        n: Number of workers.
        fn: Function that each worker calls.
        args: Arguments for all workers.
        on: Placement of the workers.

    Example:
        >>> from flowchan.pipelines import map
        >>> workers = map(2, lambda worker: worker * worker)
        >>> workers.join()
        [1, 4]
        >>> workers.check_errors()
    """

    def __init__(self, n: int, fn: Callable[..., Any], args: tuple[Any, ...], on: PlacementOption) -> None:
        self._n = n
        self._name = name_of(fn)
        self._results: dict[int, Any] = {}
        self._failures: Channel[Failed[Any]] = Channel(n)  # errors that have not been raised yet
        graph = Graph(self._name)
        numbers = graph.source(_numbers, n)
        # If a worker dies, its call fails. A retry might repeat side effects.
        done = numbers.map(
            _Call(fn, args), name=self._name, on=on, workers=n, ordered=False, max_deaths=1, restarts=2 * n
        )
        graph._address(frozenset({"items"}))  # so that each worker gets its own number
        done.errors.sink(self._failures.put, name="failures")
        # Do not use a method: the run would then refer to this handle, and only the garbage collector could
        # free the cycle.
        done.sink(functools.partial(_keep, self._results), name="results")
        self._run = graph.start()

    def join(self, timeout: float | None = None) -> list[Any]:
        """Wait until all workers have ended.

        Args:
            timeout: Maximum seconds to wait (default: no limit).

        Returns:
            The results in worker order, including any ``None``.

        Raises:
            RunError: Workers failed. The exception contains one ``StageError`` for each failure that has not
                been raised yet. A later call returns the results of the other workers.
            TimeoutError: ``timeout`` expired. The workers keep running.
        """
        self._run.wait(timeout)
        self.check_errors()
        return [self._results[worker] for worker in range(1, self._n + 1) if worker in self._results]

    def close(self) -> None:
        """End the workers that are still running.

        A later ``join()`` returns the results of the workers that finished.

        If the call of a worker process has not returned after 2 seconds, the process gets SIGTERM. After 2
        more seconds, the process gets SIGKILL. The call of a thread cannot be interrupted: the thread ends
        when the call returns, and a warning names the worker. Further calls to ``close`` have no effect.

        Example:
            >>> import signal
            >>> from flowchan.pipelines import map
            >>> workers = map(2, lambda worker: worker == 1 or signal.pause(), on="process")
            >>> workers.close()
            >>> workers.join() in ([], [True])
            True
        """
        self._run.abort()
        with contextlib.suppress(RunError):  # a later join() raises this error
            self._run.wait()

    def check_errors(self) -> None:
        """Raise ``RunError`` if workers have failed so far. The call does not wait for the workers.

        Each failure is raised only once.

        Raises:
            RunError: Workers have failed since the last call.
        """
        errors = []
        try:
            while True:
                errors.append(self._error(self._failures.get_nowait()))
        except Empty:
            pass
        if errors:
            raise RunError(f"{len(errors)} of {self._n} workers of {self._name!r} failed", errors)

    def _error(self, failed: Failed[Any]) -> StageError:
        error = reason(failed.error)
        found = StageError(
            f"worker {failed.item} of {self._name!r} failed: {type(error).__name__}: {error}",
            stage=self._name,
            worker=f"{self._name} {failed.item}",
        )
        found.__cause__ = error
        return found


def _numbers(n: int) -> Iterator[Any]:
    """Send each number to the worker with that number."""
    return ((number, number) for number in range(1, n + 1))


def _keep(results: dict[int, Any], result: tuple[int, Any]) -> None:
    worker, value = result
    results[worker] = value


class _Call:
    """Picklable callable that calls the function with the worker's number."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.fn = fn
        self.args = args

    def __call__(self, worker: Any) -> tuple[int, Any]:
        return worker, call(self.fn, *self.args, worker)


@public
@refuses_misspelt("map")
def map(  # noqa: A001
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    on: PlacementOption = "thread",
) -> Workers:
    """Start ``n`` workers that each call ``fn(*args, worker)``, and return at once.

    Args:
        n: Number of workers, at least 1.
        fn: Function whose last argument is the worker's number, from 1 to ``n``.
        *args: Arguments for all workers. Threads share these objects; each process has a copy.
        on: ``"thread"`` (default), ``"process"``, or a pool from ``flowchan.hosts``. A worker whose process
            dies counts as failed.

    Returns:
        The handle, whose ``join()`` returns the results.

    Raises:
        TypeError: ``fn`` cannot be called, or ``n`` is not an int.
        ValueError: ``n`` is less than 1.
        GraphError: An argument cannot be sent to a process.

    Example:
        >>> from flowchan.pipelines import map
        >>> map(4, lambda base, worker: base + worker, 10).join()
        [11, 12, 13, 14]
    """
    if not callable(fn):
        raise TypeError(f"map: fn must be callable, got {fn!r}")
    whole("map", "n", n, 1)
    return Workers(n, fn, args, on)
