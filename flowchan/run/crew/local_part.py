"""Manage the workers of a run on this machine: threads, coroutines and processes."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flowchan.channel.awaiting import waits_of_loops
from flowchan.declare.callables import is_async
from flowchan.declare.values import Stage
from flowchan.items.codec import dumps_for_worker
from flowchan.run.crew.death_log import DeathLog
from flowchan.run.crew.gangs import Gangs
from flowchan.run.crew.mail import Mail, run_helper, run_is_over
from flowchan.run.crew.main_guard import start_of
from flowchan.run.crew.part import Report
from flowchan.run.crew.pool_processes import Employed, PooledProcesses
from flowchan.run.crew.process import WorkerProcess
from flowchan.run.crew.process_stacks import stacks_of_processes
from flowchan.run.crew.run_ports import RunPorts
from flowchan.run.crew.thread_stacks import stacks_of_tasks, stacks_of_threads
from flowchan.run.crew.worker_processes import WorkerProcesses
from flowchan.run.policy import decisions
from flowchan.run.policy.deadlock import Waits
from flowchan.run.policy.events import (
    Began,
    Ended,
    Event,
    Failure,
    MembersTried,
    ProcessEnded,
    Started,
    TriesMember,
    WorkerId,
)
from flowchan.run.policy.failures import UNSUSPECTED
from flowchan.run.policy.stats import HostStats
from flowchan.run.worker.gang_membership import Memberships
from flowchan.run.worker.worker import work

if TYPE_CHECKING:
    from flowchan.run.worker.async_worker import Tasks


class LocalPart:
    """Manages a run's workers on this machine, as a :class:`CrewPart`.

    ``pooled`` contains the processes of a pool if the run uses one.

    Invariant. Threads of the program add to the dictionary ``threads`` while the supervisor reads it. Every
    reader must therefore copy it in one step.
    """

    def __init__(self, ports: RunPorts, pooled: PooledProcesses | None = None) -> None:
        self.plan = ports.plan
        self._ports = ports
        self._pooled = pooled
        self._planned = [worker for worker in self.plan.workers if not worker.host]
        self.threads: dict[WorkerId, threading.Thread] = {}
        self._tasks: list[Tasks] = []  # the tasks of each async stage
        self._gangs = Gangs()
        self._deaths = DeathLog(self.plan)
        self._reported: set[WorkerId] = set()  # workers that have reported their end
        self._report: Report = run_is_over
        self._processes: WorkerProcesses | None = None
        self._helpers: list[threading.Thread] = []
        has_processes = any(worker.stage.placement.own_process for worker in self._planned)
        self._mail = Mail() if has_processes else None

    @property
    def processes(self) -> Mapping[WorkerId, WorkerProcess]:
        """Return all worker processes, including those that have ended."""
        return {} if self._processes is None else self._processes.known

    # --- starting workers ---

    def start(self, report: Report) -> None:
        """See :class:`CrewPart`.

        Call :meth:`start_threads` afterwards. Processes start first, because forking is unsafe once other
        threads run.
        """
        self._report = report
        for stage in self.plan.graph.stages:
            if stage.gang is not None and not stage.placement.hosts:
                self._gangs.form(stage, [worker.id for worker in self._planned if worker.stage is stage])
        if self._mail is None:
            return
        name, put = self.plan.graph.name, self._mail.channel.put
        self._processes = (
            WorkerProcesses(name, self._mail.channel, put)
            if self._pooled is None
            else Employed(name, self._mail.channel, put, self._pooled)
        )
        for worker in self._planned:
            if worker.stage.placement.own_process:
                self._start_process(worker.id)

    def start_threads(self) -> None:
        """Start the threads for workers, and the threads that watch the worker processes.

        Workers that collect results start later, when the program reads the results.
        """
        if self._mail is not None and self._processes is not None:
            mail, processes = self._mail, self._processes
            self._start_helper(" mail", lambda: mail.deliver(self._receive))
            self._start_helper(" watch", processes.watch)
        for worker in self._planned:
            if not worker.stage.placement.own_process and not worker.gathers and not worker.is_task:
                self.start_thread(worker.id)
        for stage in self.plan.graph.stages:
            if is_async(stage.function) and not stage.placement.own_process:
                self._start_loop(stage)

    def _start_helper(self, name: str, work: Callable[[], None]) -> None:
        self._helpers.append(self._start(name, run_helper, work, lambda: self._report))

    def _start(self, name: str, target: Callable[..., object], *arguments: Any) -> threading.Thread:
        """Start a daemon thread of the run."""
        name = f"flowchan {self.plan.graph.name}{name}"
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        thread.start()
        return thread

    def start_thread(self, id: WorkerId) -> None:
        """Start a worker on a thread of this process."""
        stage, ports = self._ports.worker(id).stage, self._ports.ports[id]
        first = Memberships(self._gangs.membership(id))
        arguments = (self._ports.started(id), stage, ports, self._report, False, UNSUSPECTED, first)
        self.add_thread(id, self._start(f"/{id}", work, *arguments))

    def add_thread(self, id: WorkerId, thread: threading.Thread) -> None:
        """Record which thread runs a worker."""
        self.threads[id] = thread
        self._ports.result_read(id)

    def _start_loop(self, stage: Stage) -> None:
        """Start the workers of an async stage as tasks in one thread."""
        # Imported late, because asyncio is slow to import.
        from flowchan.run.worker.async_worker import Tasks, work_together

        ids = [worker.id for worker in self._planned if worker.stage is stage]
        tasks = {self._ports.started(id): self._ports.ports[id] for id in ids}
        out = self._ports.ports[ids[0]].outputs if stage.operator.begins else {}
        self._tasks.append(Tasks(next((port.channel for port in out.values()), None), ids))
        arguments = (tasks, stage, self._report, self._tasks[-1])
        thread = self._start(f"/{stage.name}", work_together, *arguments)
        self.threads.update(dict.fromkeys(ids, thread))

    def _start_process(self, id: WorkerId) -> None:
        assert self._processes is not None
        stage, ports = self._ports.worker(id).stage, self._ports.ports[id]
        suspicion = self._deaths.started(id)
        self._reported.discard(id)
        stage.operator.run()  # import it now: a child forked during another thread's import would hang
        with start_of(self.plan.graph, stage.name):
            memberships = Memberships(self._gangs.membership(id), self._gangs.next_memberships(id, stage))
            packed = dumps_for_worker(stage) if self._pooled is None else self._pooled.packed(stage)
            info = self._ports.started(id)
            pid = self._processes.start(info, packed, ports, suspicion, stage.gpus, memberships)
        self._report(Started(id, pid))

    # --- receiving reports from workers ---

    def _receive(self, event: Event) -> None:
        """Process an event from a worker process, on the mail's thread."""
        if isinstance(event, TriesMember | MembersTried):
            self._deaths.tries_members(event)
            return
        if isinstance(event, Began):
            self._deaths.began(event.worker)
        elif isinstance(event, Ended | Failure):
            self._reported.add(event.worker)
        elif isinstance(event, ProcessEnded) and event.worker not in self._reported:
            event = self._death_of(event.worker)
        self._report(event)

    def _death_of(self, id: WorkerId) -> Event:
        ports = self._ports.ports.get(id)
        if ports is None or self._processes is None:  # the run has ended
            return ProcessEnded(id)
        return self._deaths.died(self._ports.worker(id), self._processes.exit_of(id, ports))

    def all_reported(self) -> bool:
        """See :class:`CrewPart`."""
        return self._mail is None or self._mail.is_empty()

    def waits(self, alive: frozenset[WorkerId]) -> Waits | None:
        """See :class:`CrewPart`.

        Until a dead worker has been replaced, the run may still make progress and therefore is not
        deadlocked.
        """
        if self._processes is not None and any(map(self._processes.ended, alive)):
            return Waits(moves=True)
        if not waits_of_loops():
            return Waits()
        # An event loop has awaited a channel, so asyncio is imported already.
        from flowchan.run.worker.async_worker import only_wait_for

        return Waits(moves=not only_wait_for(list(self._ports.channels.values())))

    def hosts(self) -> tuple[HostStats, ...]:
        """See :class:`CrewPart`."""
        return ()

    def stacks(self, ids: Collection[WorkerId]) -> dict[WorkerId, str]:
        """See :class:`CrewPart`."""
        return (
            stacks_of_threads({id: thread for id, thread in list(self.threads.items()) if id in ids})
            | stacks_of_tasks(self._tasks, ids)
            | stacks_of_processes({id: one for id, one in list(self.processes.items()) if id in ids})
        )

    # --- replacing workers ---

    def replace(
        self, ids: Sequence[WorkerId], blamed: WorkerId | None, later: bool = False
    ) -> tuple[Failure | Ended, ...]:
        """See :class:`CrewPart`."""
        assert self._processes is not None
        for id in ids:
            self._gangs.count_out(id)
            self._ports.recover(id, id == blamed, self._deaths.knows_members(id))
            self._processes.forget(id)
        stage = self._ports.worker(ids[0]).stage
        if stage.gang is not None and not stage.gang.elastic:
            try:
                self._gangs.form(stage, ids)
            except OSError as error:
                return (Failure(ids[0], error, None, os.getpid()), *map(Ended, ids[1:]))
        return () if later else self.start_workers(ids)

    def start_workers(self, ids: Sequence[WorkerId]) -> tuple[Failure, ...]:
        """See :class:`CrewPart`."""
        failures = []
        for id in ids:
            try:
                self._start_process(id)
            except Exception as error:
                failures.append(Failure(id, error, None, os.getpid()))
        return tuple(failures)

    def form_group(self, ids: Sequence[WorkerId]) -> None:
        """See :class:`CrewPart`."""
        self._gangs.meet(self._ports.worker(ids[0]).stage, ids)

    def end_group(self, stage: str) -> None:
        """See :class:`CrewPart`."""
        self._gangs.disband(stage)

    # --- changing the number of workers ---

    def add(self, id: WorkerId) -> None:
        """See :class:`CrewPart`."""
        for ended in self._ports.ended_workers():
            thread = self.threads.get(ended)
            if thread is not None and not thread.is_alive():
                self.forget(ended)
        try:
            worker = self._ports.add(id)
            if worker.stage.placement.own_process:
                self._start_process(id)
            else:
                self.start_thread(id)
        except BaseException:
            self.release_ports(id)
            raise

    def remove(self, id: WorkerId) -> None:
        """See :class:`CrewPart`."""
        self._ports.remove(id)

    def forget(self, id: WorkerId) -> None:
        """See :class:`CrewPart`."""
        if id not in self._ports.ended_workers():
            return
        self._ports.forget(id)
        if self.threads.pop(id, None) is None and self._processes is not None:
            self._processes.forget(id)

    def release_ports(self, id: WorkerId) -> None:
        """See :class:`CrewPart`."""
        self._ports.release(id)

    # --- ending workers ---

    def cancel_tasks(self, all_of_them: bool) -> None:
        """See :class:`CrewPart`."""
        for tasks in self._tasks:
            if all_of_them or (tasks.into is not None and tasks.into.closed):
                tasks.cancel()

    def cancel_request(self, question: int) -> None:
        """See :class:`CrewPart`. Local workers need no message, because they read the shared board."""

    def terminate(self, id: WorkerId, force: bool) -> None:
        """See :class:`CrewPart`."""
        if self._processes is not None:
            self._deaths.terminated(id)
            self._processes.terminate(id, force)

    def kill(self) -> None:
        """See :class:`CrewPart`."""
        if self._processes is not None:
            self._processes.kill()

    def close(self, abandoned: frozenset[WorkerId], timeout: float | None) -> frozenset[WorkerId]:
        """See :class:`CrewPart`."""
        if self._processes is not None:
            self._processes.end()
        self._gangs.clear()
        self._ports.close(abandoned)
        self._end_helpers()
        self._report = run_is_over  # break a reference cycle that would keep the channels alive
        deadline = time.monotonic() + (timeout or 0.0)
        # Copy the dictionary, because one of the program's waiting threads may add a thread.
        for id, thread in list(self.threads.items()):
            if id not in abandoned:
                thread.join(None if timeout is None else max(0.0, deadline - time.monotonic()))
        return frozenset(id for id, thread in list(self.threads.items()) if thread.is_alive())

    def _end_helpers(self) -> None:
        if self._mail is not None:
            self._mail.close()
        if self._processes is not None:
            self._processes.stop_watching()
            for helper in self._helpers:
                helper.join()
            self._processes.close()

    def warn_of(self, abandoned: frozenset[WorkerId]) -> None:
        """See :class:`CrewPart`.

        This method may wait for threads that are about to end, because no caller is waiting for the run any
        more.
        """
        deadline = time.monotonic() + decisions.GRACE
        for id, thread in sorted(self.threads.items(), key=lambda one: str(one[0])):
            if id not in abandoned:
                continue
            thread.join(max(0.0, deadline - time.monotonic()))
            if not thread.is_alive():
                continue
            warnings.warn(
                f"worker {id} of graph {self.plan.graph.name!r} is still running code that cannot be "
                "interrupted; its thread ends when that code returns",
                RuntimeWarning,
                stacklevel=2,
            )
