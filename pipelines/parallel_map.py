"""``map``: n workers run one function each, and whoever started them gets the results in worker order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from flowchan import Channel, Empty, Failed, Graph, RunError, StageError
from flowchan.declare.placements import PlacementOption
from flowchan.items.arguments import refuses_misspelt
from flowchan.pipelines.user_calls import call, name_of, reason


class Workers:
    """The handle of :func:`map`. Workers that nobody joins run on; they are ended when the program ends."""

    def __init__(self, n: int, fn: Callable[..., Any], args: tuple[Any, ...], on: PlacementOption) -> None:
        self._n = n
        self._name = name_of(fn)
        self._results: dict[int, Any] = {}
        self._failures: Channel[Failed[Any]] = Channel(
            max(1, n)
        )  # each is taken out by the one who raises it
        graph = Graph(self._name)
        numbers = graph.source(_numbers, n)
        # A worker that dies takes its call with it: another one would repeat what it may have done already.
        done = numbers.map(
            _Call(fn, args), name=self._name, on=on, workers=n, ordered=False, max_deaths=1, restarts=2 * n
        )
        done.errors.sink(self._failures.put, name="failures")
        # Not a method of ours: the run must not refer to its handle, or its memory waits for the collector.
        done.sink(functools.partial(_keep, self._results), name="results")
        self._run = graph.start()

    def join(self, timeout: float | None = None) -> list[Any]:
        """Waits until all workers have ended and gives their results in worker order, a ``None`` in its place
        too.

        Raises ``RunError`` if workers failed: after all have ended, with one ``StageError`` for each failure
        that was not raised before. A later call gives the results of the others. Raises ``TimeoutError`` when
        ``timeout`` seconds are over; the workers go on then.
        """
        self._run.wait(timeout)
        self.check_errors()
        return [self._results[worker] for worker in range(1, self._n + 1) if worker in self._results]

    def check_errors(self) -> None:
        """Raises ``RunError`` if workers have failed until now, each failure once. Does not wait."""
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


def _numbers(n: int) -> range:
    return range(1, n + 1)


def _keep(results: dict[int, Any], result: tuple[int, Any]) -> None:
    worker, value = result
    results[worker] = value


class _Call:
    """What a worker calls with its number. A value, so that it can be sent to a process."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.fn = fn
        self.args = args

    def __call__(self, worker: int) -> tuple[int, Any]:
        return worker, call(self.fn, *self.args, worker)


@refuses_misspelt("map")
def map(  # noqa: A001
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    on: PlacementOption = "thread",
) -> Workers:
    """Starts ``n`` workers, each of which runs ``fn(*args, worker)``, where ``worker`` is its number from 1
    to n. Returns at once; ``join()`` gives the results.

    ``on="thread"``: all get the same objects. ``on="process"``: a process each, with copies of the function
    and its arguments; what can't be sent raises ``GraphError`` here. A worker process that dies is a failure
    of that worker. On a pool of hosts (``flowchan.hosts``) the processes are spread over them.
    """
    if not callable(fn):
        raise TypeError(f"map: fn must be callable, not {fn!r}")
    return Workers(n, fn, args, on)
