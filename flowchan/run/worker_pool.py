"""Keep a graph's worker processes alive for several runs."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

from flowchan.check.rules import raise_for
from flowchan.declare.blueprint import Blueprint
from flowchan.declare.values import Stage
from flowchan.errors import GraphError, Problem, RunError, StageError
from flowchan.public import public
from flowchan.run.crew.at_exit import before_exit
from flowchan.run.crew.pool_processes import PooledProcesses
from flowchan.run.observe.run_trace import RunTrace
from flowchan.run.policy.decisions import AbortRequested
from flowchan.run.policy.events import WorkerId
from flowchan.run.policy.failures import text_of
from flowchan.run.policy.plan import Plan, plan
from flowchan.run.resume_file import ResumeFile
from flowchan.run.run import Run
from flowchan.run.runnable import Runnable
from flowchan.run.supervisor import Supervisor
from flowchan.transport.descriptors import CHANNELS_IN_AN_ITEM
from flowchan.transport.interrupts import interrupts_deferred

MOST_PORTS = CHANNELS_IN_AN_ITEM - 1
"""Maximum number of ports that a worker may have.

All ports travel in one item with the channel for the worker's events. For a worker of an elastic gang, the
item also contains a channel for its later groups."""


@public
class WorkerPool(Runnable):
    """Pool of worker processes for one graph, created by ``graph.pool()``.

    In its ``with`` block, :meth:`run` and :meth:`start` work like the graph's methods, but for one run at a
    time. The worker processes, with everything that they have loaded, stay alive between the runs. The first
    run creates one instance of a callable class for each worker, and the end of the block closes them. If a
    process died or its worker failed, the next run starts a new process. Worker threads are new in each run.

    Args:
        graph: The graph.

    Raises:
        RunError: Raised at the end of the block if a callable fails to close.

    Example:
        >>> from flowchan import Graph
        >>> graph = Graph("squares")
        >>> squares = graph.source(range(3)).map(lambda n: n * n, on="process").collect()
        >>> with graph.pool() as pool:
        ...     results = [pool.run()[squares] for _ in range(2)]
        >>> results
        [[0, 1, 4], [0, 1, 4]]
    """

    def __init__(self, graph: Blueprint) -> None:
        self._graph = graph
        self._lock = threading.Lock()
        self._pid = 0
        self._pooled: PooledProcesses | None = None  # set only inside the with block
        self._leaving = False
        self._stages: tuple[Stage, ...] = ()
        self._supervisor: weakref.ref[Supervisor] | None = None  # supervisor of the last run
        self._unreported: list[Run] = []  # the last run, until it has ended and raised any failure

    def _blueprint(self) -> Blueprint:
        return self._graph

    def __enter__(self) -> Self:
        if self._pooled is not None:
            raise RuntimeError(f"{self!r} must not be entered twice; use another pool for another block")
        self._pid = os.getpid()
        self._pooled = PooledProcesses(self._graph.name)
        self._leaving, self._stages = False, ()
        _open.add(weakref.ref(self, _open.discard))
        before_exit(_close_all, 101)  # pools end before active runs are aborted
        return self

    def _begin(self, plan: Plan, recording: ResumeFile | None, trace: RunTrace | None) -> Run:
        self._refuse_forked_child()
        with self._lock:
            run = Run(plan, self._prepared(plan), recording, trace)
            self._supervisor, self._unreported = weakref.ref(run._supervisor), run._supervisor.unreported
            return run

    def _watching(self) -> AbstractContextManager[Any]:
        """Start the processes before the progress display; otherwise, they would inherit its terminal."""
        self._refuse_forked_child()
        raise_for(self._graph)
        with interrupts_deferred(), self._lock:
            self._prepared(plan(self._graph, seed=0, memory=1))
        return super()._watching()

    def _refuse_forked_child(self) -> None:
        """Raise an error in a forked child, where a lock of another thread would never be released."""
        if self._pid != os.getpid():
            raise self._outside_error()

    def _outside_error(self) -> RuntimeError:
        return RuntimeError(f"{self!r} must be used in its block: with graph.pool() as pool: pool.run()")

    def _prepared(self, plan: Plan) -> PooledProcesses:
        """Start a process for each worker that has none, and return the pool's processes."""
        pooled = self._checked_processes(plan)
        pooled.make_ready(self._graph, plan.workers)
        return pooled

    def _checked_processes(self, plan: Plan) -> PooledProcesses:
        """Return the pool's processes, or raise an error if it cannot run the plan now."""
        if self._pooled is None or self._leaving:
            raise self._outside_error()
        if self._active_supervisor() is not None:
            raise RuntimeError(
                f"{self!r} allows one run at a time, and the previous run has not ended; call "
                "run.wait(), or use another pool"
            )
        stages = tuple(self._graph.stages)
        if self._stages and stages != self._stages:
            raise RuntimeError(
                f"{self!r}: the graph must not change after the pool's first run; declare all stages "
                "before the first run, or use another pool"
            )
        _refuse_hosts(self._graph)
        _refuse_auto(self._graph)
        _refuse_ports(plan)
        self._stages = stages
        return self._pooled

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._pid:  # a forked child does not own the processes
            return
        self._leaving = True
        try:
            if error is None:
                self._finish_run()
            else:
                self._abort_run(error)
        finally:
            failed = self._end()
        if failed and error is None:
            raise RunError(
                f"the pool of graph {self._graph.name!r} failed while closing",
                [_not_closed(id, raised) for id, raised in failed],
            )

    def _active_supervisor(self) -> Supervisor | None:
        """Return the supervisor of the active run, or ``None`` if no run is active."""
        supervisor = None if self._supervisor is None else self._supervisor()
        return supervisor if supervisor is not None and not supervisor.ended.is_set() else None

    def _last_run(self) -> Run | None:
        """Return the last run if it is still active or its failure has not been raised yet."""
        with self._lock:  # another thread may be starting a run
            return next(iter(self._unreported), None)

    def _finish_run(self) -> None:
        if (run := self._last_run()) is not None:
            run._end_block()

    def _abort_run(self, error: BaseException | None) -> None:
        run = self._last_run()
        if run is None:
            return
        if not isinstance(error, KeyboardInterrupt):
            run._break_block(error)
        elif not run._supervisor.ended.is_set():
            run._interruption.finish()

    def _end(self, at_once: bool = False) -> list[tuple[WorkerId, BaseException]]:
        """End all processes, and return the errors from closing their callables.

        If ``at_once`` is true, kill the processes without closing the callables.
        """
        pooled = self._pooled
        if pooled is None:
            return []
        try:
            with interrupts_deferred(), self._lock:
                self._pooled = None
                _open.discard(weakref.ref(self))
                if (
                    supervisor := self._active_supervisor()
                ) is not None:  # another Ctrl-C ended the wait for this run
                    supervisor.ask(AbortRequested())
                    pooled.kill()
                    supervisor.wait()
        except BaseException:
            at_once = True
            raise
        finally:
            if at_once:
                pooled.kill()
            failed = pooled.close()
        return failed

    def __repr__(self) -> str:
        return f"<WorkerPool of {self._graph.name!r}>"


def _refuse_hosts(graph: Blueprint) -> None:
    remote = [stage for stage in graph.stages if stage.placement.is_remote]
    if remote:
        message = (
            "a pool can't keep workers on hosts, because they end with each run; use "
            "graph.run(), or place the stage on='process'"
        )
        raise GraphError(graph.name, [Problem("pool", stage.name, stage.where, message) for stage in remote])


def _refuse_auto(graph: Blueprint) -> None:
    message = (
        "workers='auto' is not possible, because a pool can't add processes during a run; set a number of "
        "workers, place the stage on='thread', or use graph.run()"
    )
    problems = [
        Problem("pool", stage.name, stage.where, message)
        for stage in graph.stages
        if stage.auto is not None and stage.placement.own_process
    ]
    if problems:
        raise GraphError(graph.name, problems)


def _refuse_ports(plan: Plan) -> None:
    problems = {
        worker.stage.name: Problem(
            "pool",
            worker.stage.name,
            worker.stage.where,
            f"a worker of a pool must have at most {most} ports, got {ports}; use graph.run(), or "
            "place the stage on='thread'",
        )
        for worker in plan.workers
        if worker.stage.placement.own_process
        and (ports := len(list(worker.channels())))
        > (most := MOST_PORTS - (worker.stage.name in plan.elastic))
    }
    if problems:
        raise GraphError(plan.graph.name, list(problems.values()))


def _not_closed(id: WorkerId, raised: BaseException) -> StageError:
    error = StageError(
        f"stage {id.stage!r} failed in worker {id} when its callable was closed: {text_of(raised)}",
        stage=id.stage,
        worker=str(id),
    )
    error.__cause__ = raised
    return error


# Pools whose block is active. Unlike a WeakSet, a plain set can be copied in one step while other threads
# enter pools.
_open: set[weakref.ref[WorkerPool]] = set()


@atexit.register
def _close_all() -> None:
    """End all pools at interpreter exit; otherwise, Python would wait for their processes."""
    interrupt: KeyboardInterrupt | None = None
    pools = [pool for reference in list(_open) if (pool := reference()) is not None]
    for pool in [pool for pool in pools if pool._pid == os.getpid()]:
        try:
            try:
                if interrupt is None:
                    with contextlib.suppress(Exception):
                        pool._abort_run(None)
            finally:
                pool._end(at_once=interrupt is not None)
        except KeyboardInterrupt as error:  # kill the remaining pools without waiting for their runs
            interrupt = error
    if interrupt is not None:
        raise interrupt
