"""Runs of one graph whose worker processes last from one to the next."""

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
from flowchan.run.crew.at_exit import before_exit
from flowchan.run.crew.pool_processes import LastingProcesses
from flowchan.run.policy.decisions import AbortAsked
from flowchan.run.policy.events import WorkerId
from flowchan.run.policy.failures import text_of
from flowchan.run.policy.plan import Plan, plan
from flowchan.run.run import Run
from flowchan.run.runnable import Runnable
from flowchan.run.supervisor import Supervisor
from flowchan.transport.descriptors import CHANNELS_IN_AN_ITEM
from flowchan.transport.interrupts import interrupts_deferred

MOST_PORTS = CHANNELS_IN_AN_ITEM - 1
"""A worker's ports come as one item, and with them the channel by which it tells. One of an elastic gang
gets a channel more, by which its groups come."""


class WorkerPool(Runnable):
    """What ``graph.pool()`` gives. Within its ``with`` block, :meth:`run` and :meth:`start` do what those of
    the graph do, one run after the other, and the graph's worker processes last over all of them, with what
    they have loaded: a callable class is built once for each worker, in its first run, and closed when the
    block is left. A process that has died, or whose worker has failed, is replaced in the next run. Workers
    on threads begin anew in each run.

    Raises ``RunError`` when the block is left and closing a callable fails.
    """

    def __init__(self, graph: Blueprint) -> None:
        self._graph = graph
        self._lock = threading.Lock()
        self._pid = 0
        self._lasting: LastingProcesses | None = None  # while the block is not left
        self._leaving = False
        self._stages: tuple[Stage, ...] = ()
        self._supervisor: weakref.ref[Supervisor] | None = None  # of the last run
        self._unheard: list[Run] = []  # that, while it goes on or nobody was told that it has failed

    def _blueprint(self) -> Blueprint:
        return self._graph

    def __enter__(self) -> Self:
        if self._lasting is not None:
            raise RuntimeError(f"{self!r} is entered already")
        self._pid = os.getpid()
        self._lasting = LastingProcesses(self._graph.name)
        self._leaving, self._stages = False, ()
        _open.add(weakref.ref(self, _open.discard))
        before_exit(_close_all, 101)  # before runs are aborted
        return self

    def _begin(self, plan: Plan) -> Run:
        self._refuse_strangers()
        with self._lock:
            run = Run(plan, self._made_ready(plan))
            self._supervisor, self._unheard = weakref.ref(run._supervisor), run._supervisor.unheard
            return run

    def _watching(self) -> AbstractContextManager[Any]:
        """Processes that last would keep the terminal of this run's progress."""
        self._refuse_strangers()
        raise_for(self._graph)
        with interrupts_deferred(), self._lock:
            self._made_ready(plan(self._graph, seed=0, memory=1))
        return super()._watching()

    def _refuse_strangers(self) -> None:
        """In a forked child the lock may be another's for ever."""
        if self._pid != os.getpid():
            raise self._outside()

    def _outside(self) -> RuntimeError:
        return RuntimeError(f"{self!r} runs within its block: with graph.pool() as pool: pool.run()")

    def _made_ready(self, plan: Plan) -> LastingProcesses:
        """With a process for each worker that needs one."""
        lasting = self._ready_for(plan)
        lasting.make_ready(self._graph, plan.workers)
        return lasting

    def _ready_for(self, plan: Plan) -> LastingProcesses:
        """Refuses what this pool can't run now."""
        if self._lasting is None or self._leaving:
            raise self._outside()
        if self._going_on() is not None:
            raise RuntimeError(
                f"{self!r} has one run at a time, and that before still goes on: wait for it by run.wait(), "
                "or take another pool"
            )
        stages = tuple(self._graph.stages)
        if self._stages and stages != self._stages:
            raise RuntimeError(
                f"{self!r} has workers for what was declared at its first run, and the graph was changed "
                "since: declare all before, or take another pool"
            )
        _refuse_hosts(self._graph)
        _refuse_ports(plan)
        self._stages = stages
        return self._lasting

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._pid:  # a forked child: they are not its own
            return
        self._leaving = True
        try:
            if error is None:
                self._finish_run()
            else:
                self._break_off(error)
        finally:
            failed = self._end()
        if failed and error is None:
            raise RunError(
                f"the pool of graph {self._graph.name!r} failed at its end",
                [_not_closed(id, raised) for id, raised in failed],
            )

    def _going_on(self) -> Supervisor | None:
        """That of the run that has not ended."""
        supervisor = None if self._supervisor is None else self._supervisor()
        return supervisor if supervisor is not None and not supervisor.ended.is_set() else None

    def _last_run(self) -> Run | None:
        """That of which something is still to be heard."""
        with self._lock:  # another thread may be starting one
            return next(iter(self._unheard), None)

    def _finish_run(self) -> None:
        if (run := self._last_run()) is not None:
            run._end_block()

    def _break_off(self, error: BaseException | None) -> None:
        run = self._last_run()
        if run is None:
            return
        if not isinstance(error, KeyboardInterrupt):
            run._break_block(error)
        elif not run._supervisor.ended.is_set():
            run._finish()

    def _end(self, at_once: bool = False) -> list[tuple[WorkerId, BaseException]]:
        """No process is left. Gives what closing their callables raised; ``at_once``, these are not
        closed."""
        lasting = self._lasting
        if lasting is None:
            return []
        try:
            with interrupts_deferred(), self._lock:
                self._lasting = None
                _open.discard(weakref.ref(self))
                if (supervisor := self._going_on()) is not None:  # Ctrl-C has come, for the last time
                    supervisor.ask(AbortAsked())
                    lasting.kill()
                    supervisor.wait()
        except BaseException:
            at_once = True
            raise
        finally:
            if at_once:
                lasting.kill()
            failed = lasting.close()
        return failed

    def __repr__(self) -> str:
        return f"<WorkerPool of {self._graph.name!r}>"


def _refuse_hosts(graph: Blueprint) -> None:
    far = [stage for stage in graph.stages if stage.placement.is_remote]
    if far:
        message = (
            "it runs on hosts, where workers end with each run, so a pool can't keep them; run the graph by "
            "graph.run(), or place the stage on='process'"
        )
        raise GraphError(graph.name, [Problem("pool", stage.name, stage.where, message) for stage in far])


def _refuse_ports(plan: Plan) -> None:
    problems = {
        worker.stage.name: Problem(
            "pool",
            worker.stage.name,
            worker.stage.where,
            f"each of its workers has {ports} ports, and those of a pool at most {most}; run the graph "
            "by graph.run(), or place the stage on='thread'",
        )
        for worker in plan.workers
        if worker.stage.placement.apart
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


# Pools whose block was not left yet. A plain set is copied in one step while other threads enter pools, and a
# WeakSet is not.
_open: set[weakref.ref[WorkerPool]] = set()


@atexit.register
def _close_all() -> None:
    """The interpreter exits: nothing of a pool may outlive it, and Python would wait for its processes."""
    interrupt: KeyboardInterrupt | None = None
    pools = [pool for reference in list(_open) if (pool := reference()) is not None]
    for pool in [pool for pool in pools if pool._pid == os.getpid()]:
        try:
            try:
                if interrupt is None:
                    with contextlib.suppress(Exception):
                        pool._break_off(None)
            finally:
                pool._end(at_once=interrupt is not None)
        except KeyboardInterrupt as error:  # nobody waits for the others any longer
            interrupt = error
    if interrupt is not None:
        raise interrupt
