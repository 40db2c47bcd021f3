"""Keep the worker processes of a pool from one run to the next.

In each run, a process receives an order with its ports for this run. Processes that are ready for another
order stay alive until the next run. A process that died, failed or did not finish its work is replaced.

A forked process inherits all open files and channels of its parent, and a spawned one inherits the standard
streams. For this reason, the pool starts its processes before the run opens its channels and displays its
progress. A replacement that starts during a run inherits the run's channels, and is therefore not kept for
the next run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import multiprocessing
import os
import time
import weakref
from collections.abc import Callable, Iterable

from flowchan.channel.channel import Channel
from flowchan.declare.blueprint import Blueprint
from flowchan.declare.values import Stage
from flowchan.errors import Broken, Closed, Empty
from flowchan.items.codec import dumps_for_worker
from flowchan.run.crew.main_guard import ProcessName, start_of
from flowchan.run.crew.process import WorkerProcess
from flowchan.run.crew.worker_processes import WorkerProcesses, end_all
from flowchan.run.policy import decisions
from flowchan.run.policy.events import Event, ProcessEnded, WorkerId
from flowchan.run.policy.plan import PlannedWorker
from flowchan.run.worker.gpus import Gpus
from flowchan.run.worker.logs import Logged, log_locally
from flowchan.run.worker.process_main import Order, WorkEnded, pooled_main
from flowchan.run.worker.streams import terminals
from flowchan.transport.interrupts import interrupts_deferred

POLL_INTERVAL_S = 0.05
"""Seconds between checks whether a process has ended without a report."""


class PooledProcess:
    """Worker process that serves several runs one after another."""

    def __init__(self, graph: str, id: WorkerId, stage: bytes, devices: str | None) -> None:
        orders: Channel[Order] = Channel(2, across="processes")
        reports: Channel[WorkEnded | Logged | None] = Channel(64, across="processes")
        self._orders, self._reports = orders.writer(), reports.reader()
        # The process's ends of both channels. Keep these copies: if they closed before the process had
        # opened its ends, the channels would close.
        self._its = orders.reader(), reports.writer()
        arguments = (id, stage, *self._its, os.getpid(), devices)
        self.process = WorkerProcess(ProcessName(f"{graph}/{id}"), pooled_main, arguments)

    def work(self, order: Order) -> None:
        """Send an order. If the process has ended, the watching thread, not this call, reports the end."""
        with contextlib.suppress(Closed, Broken):
            self._orders.put(order)

    def word(self, until: float) -> WorkEnded | None:
        """Wait for the process to report that it has finished its order.

        Args:
            until: End of the wait, on the monotonic clock.

        Returns:
            None if the process is ready for another order, or ``WorkEnded`` if it has ended.

        Raises:
            Empty: No report arrived by ``until``.
        """
        while True:
            ended = self.process.ended()
            try:
                message = self._reports.get(
                    timeout=0.0 if ended else max(0.0, min(POLL_INTERVAL_S, until - time.monotonic()))
                )
                if not isinstance(message, Logged):
                    return message
                log_locally(message)
            except Empty:
                if ended:
                    return WorkEnded()
                if time.monotonic() >= until:
                    raise
            except (Closed, Broken):
                return WorkEnded()

    def dismiss(self) -> None:
        """Let the process close its callable and exit, because no further order will follow."""
        self._orders.close()

    def leave(self) -> None:
        """Stop receiving reports from the process."""
        self._reports.close()


Dismissed = list[tuple[WorkerId, PooledProcess]]
"""Processes that have been dismissed and are closing their callables."""


class PooledProcesses:
    """Keeps the worker processes of a pool for the graph named ``graph``."""

    def __init__(self, graph: str) -> None:
        self.gpus = Gpus()
        self._graph = graph
        self._packed: dict[str, bytes] = {}
        self._known: dict[WorkerId, PooledProcess] = {}
        self._late: set[WorkerId] = set()  # processes that were started during this run
        self._leaving: Dismissed = []
        self._failed: list[tuple[WorkerId, BaseException]] = []  # errors raised while closing the callables
        weakref.finalize(self, _end_dropped, os.getpid(), self._known, self._leaving).atexit = False

    def packed(self, stage: Stage) -> bytes:
        """Pickle a stage, but only once for all of its processes."""
        if stage.name not in self._packed:
            self._packed[stage.name] = dumps_for_worker(stage)
        return self._packed[stage.name]

    def make_ready(self, graph: Blueprint, workers: Iterable[PlannedWorker]) -> None:
        """Start a process for each of these workers that lacks one."""
        for worker in workers:
            stage = worker.stage
            if stage.placement.own_process:
                with start_of(graph, stage.name):
                    self._alive(worker.id, self.packed(stage), self.gpus.take(worker.id, stage.gpus))
        self._late.clear()
        for one in [one for one in self._leaving if one[1].process.ended()]:
            self._await_end(*one)
            self._leaving.remove(one)
            one[1].process.close()

    def employ(self, id: WorkerId, stage: bytes, order: Order, devices: str | None) -> WorkerProcess:
        """Give an order to a worker's process. Start the process if necessary."""
        pooled = self._alive(id, stage, devices)
        pooled.work(order)
        return pooled.process

    def _alive(self, id: WorkerId, stage: bytes, devices: str | None) -> PooledProcess:
        known = self._known.get(id)
        if known is not None and not known.process.ended():
            return known
        if known is not None:
            self.forget(id)
            known.process.close()
        self._known[id] = started = PooledProcess(self._graph, id, stage, devices)
        if multiprocessing.get_start_method() != "forkserver":
            self._late.add(id)
        return started

    def is_reusable(self, id: WorkerId, until: float) -> bool:
        """Wait until ``until`` for a worker's process to be ready for another order; return whether it is.

        A process that was started during the run is then dismissed instead of being kept.
        """
        pooled = self._known.get(id)
        try:
            waits = pooled is not None and pooled.word(until) is None
        except Empty:
            return False
        if pooled is not None and waits and id in self._late:
            pooled.dismiss()
            self._leaving.append((id, self._known.pop(id)))
        return waits

    def forget(self, id: WorkerId) -> None:
        """Forget a process that has ended."""
        self._known.pop(id, None)

    def _await_end(self, id: WorkerId, pooled: PooledProcess) -> None:
        """Wait for a dismissed process to end, and keep the error that it reports."""
        ended = pooled.word(math.inf)
        if ended is not None and ended.error is not None:
            self._failed.append((id, ended.error))

    def kill(self) -> None:
        """Kill all processes of the pool."""
        for pooled in [*self._known.values(), *(pooled for _, pooled in self._leaving)]:
            pooled.process.kill()

    def close(self) -> list[tuple[WorkerId, BaseException]]:
        """Let all processes close their callables and exit.

        Returns:
            Errors that closing the callables raised, including those of processes dismissed earlier.
        """
        try:
            _dismiss(self._known, self._leaving)
            for id, pooled in self._leaving:
                self._await_end(id, pooled)
        except BaseException:  # an interrupt: do not wait any longer
            self.kill()
            raise
        finally:
            with interrupts_deferred():
                _end_leaving(self._leaving)
        return self._failed


def _end_dropped(pid: int, known: dict[WorkerId, PooledProcess], leaving: Dismissed) -> None:
    """End the processes of a pool that was garbage-collected before it was closed.

    This function has no effect in a forked child, because only the process that started the processes may end
    them.
    """
    if pid == os.getpid():
        _dismiss(known, leaving)
        for _, pooled in leaving:
            pooled.leave()
        _end_leaving(leaving)


def _dismiss(known: dict[WorkerId, PooledProcess], leaving: Dismissed) -> None:
    for id in list(known):
        leaving.append((id, known.pop(id)))
        leaving[-1][1].dismiss()


def _end_leaving(leaving: Dismissed) -> None:
    end_all([(id, pooled.process) for id, pooled in leaving])
    while leaving:
        leaving.pop()[1].process.close()


class Employed(WorkerProcesses):
    """Manages the processes of a pool during one run."""

    def __init__(
        self,
        graph: str,
        mail: Channel[Event | Logged],
        on_ended: Callable[[ProcessEnded], None],
        pooled: PooledProcesses,
    ) -> None:
        super().__init__(graph, mail, on_ended)
        self._pooled = pooled
        self._gpus = pooled.gpus

    def _begin(self, id: WorkerId, stage: bytes, order: Order, devices: str | None) -> WorkerProcess:
        order = dataclasses.replace(order, terminals=terminals())
        return self._pooled.employ(id, stage, order, devices)

    def forget(self, id: WorkerId) -> None:
        self._pooled.forget(id)
        super().forget(id)

    def end(self) -> None:
        """Release the processes that the pool keeps for the next run, and end the others."""
        until = time.monotonic() + decisions.GRACE
        for id in [id for id in list(self.known) if self._pooled.is_reusable(id, until)]:
            del self.known[id]
        super().end()
        for id in list(self.known):
            self._pooled.forget(id)
