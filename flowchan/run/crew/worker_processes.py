"""Start, watch and end the worker processes of one machine, which report through a shared channel."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable

from flowchan.channel.channel import Channel
from flowchan.run.crew import memory
from flowchan.run.crew.main_guard import ProcessName
from flowchan.run.crew.process import WorkerProcess
from flowchan.run.crew.process_exit import ProcessExit
from flowchan.run.crew.recovery import deaths_over_item
from flowchan.run.crew.watch import Watch
from flowchan.run.observe.stack_text import text_of_dump
from flowchan.run.policy import decisions, seeds
from flowchan.run.policy.events import Event, ProcessEnded, WorkerId
from flowchan.run.policy.failures import Suspicion
from flowchan.run.policy.journal import log
from flowchan.run.worker import logs
from flowchan.run.worker.gang_membership import NO_MEMBERSHIPS, Memberships
from flowchan.run.worker.gpus import Gpus
from flowchan.run.worker.logs import Logged
from flowchan.run.worker.opening import Ports
from flowchan.run.worker.process_main import Order, process_main
from flowchan.run.worker.streams import Streams


class WorkerProcesses:
    """Manages the worker processes of one run.

    ``graph`` is the name of the graph. ``mail`` is the channel for the workers' reports. The thread that runs
    :meth:`watch` calls ``on_ended`` for each process that ends.
    """

    def __init__(
        self, graph: str, mail: Channel[Event | Logged], on_ended: Callable[[ProcessEnded], None]
    ) -> None:
        self._graph = graph
        self._mail = mail
        self._gpus = Gpus()
        self.known: dict[WorkerId, WorkerProcess] = {}
        self._watch = Watch(on_ended)
        # Number of out-of-memory kills before the run, plus those that have been attributed to workers.
        self._oom_kills = memory.oom_kills()

    def start(
        self,
        info: seeds.Worker,
        stage: bytes,
        ports: Ports,
        suspicion: Suspicion,
        gpus: float,
        memberships: Memberships = NO_MEMBERSHIPS,
    ) -> int:
        """Start a worker process.

        Args:
            info: Identity and seed of the worker.
            stage: Pickled stage.
            ports: Ports of the worker.
            suspicion: Earlier deaths on the worker's first item.
            gpus: Number of GPUs reserved for the worker.
            memberships: Memberships in the groups of the worker's gang.

        Returns:
            The process ID.

        Raises:
            HostError: Too few GPUs are free.
        """
        id = WorkerId(info.stage, info.number)
        devices = self._gpus.take(id, gpus)
        order = Order(info, ports, self._mail, suspicion, memberships, logs.levels())
        process = self._begin(id, stage, order, devices)
        self.known[id] = process
        self._watch.add(id, process)
        return process.pid

    def _begin(self, id: WorkerId, stage: bytes, order: Order, devices: str | None) -> WorkerProcess:
        """Start a process with its first order."""
        arguments = (id, stage, order, os.getpid(), devices, Streams())
        return WorkerProcess(ProcessName(f"{self._graph}/{id}"), process_main, arguments)

    def watch(self) -> None:
        """Watch the processes until :meth:`stop_watching` is called."""
        self._watch.run()

    def exit_of(self, id: WorkerId, ports: Ports) -> ProcessExit:
        """Describe how a worker's process ended. ``ports`` are the worker's ports."""
        process = self.known[id]
        how = process.how_it_ended(process.exitcode == -signal.SIGKILL and self._kernel_killed())
        lived = time.monotonic() - process.started_at
        stack = text_of_dump(process.last_stacks())
        return ProcessExit(how, process.exitcode, process.pid, lived, deaths_over_item(ports), stack=stack)

    def _kernel_killed(self) -> bool:
        """Return whether the kernel has killed any process since the last call because memory ran out."""
        more = memory.oom_kills() > self._oom_kills
        self._oom_kills += more
        return more

    def ended(self, id: WorkerId) -> bool:
        """Return whether the worker has a process here that has ended."""
        return id in self.known and self.known[id].ended()

    def give_back_gpus(self, id: WorkerId) -> None:
        """Release the GPUs of a worker that has ended or is moving to another host."""
        self._gpus.give_back(id)

    def forget(self, id: WorkerId) -> None:
        """Release the resources of a process that has ended."""
        if (process := self.known.pop(id, None)) is not None:
            process.close()

    def terminate(self, id: WorkerId, force: bool) -> None:
        process = self.known.get(id)
        if process is not None:  # the worker may be waiting for its replacement
            process.kill() if force else process.terminate()

    def kill(self) -> None:
        for process in list(self.known.values()):  # a copy, because another thread may be starting a process
            process.kill()

    def end(self) -> None:
        """Wait for all processes to end, and kill those that take too long."""
        end_all(list(self.known.items()))

    def stop_watching(self) -> None:
        self._watch.stop()

    def close(self) -> None:
        """Release all resources, once all processes have ended and :meth:`watch` has returned."""
        self._watch.close()
        for process in list(self.known.values()):
            process.close()


def end_all(processes: Iterable[tuple[WorkerId, WorkerProcess]]) -> None:
    """Wait for these processes to end, and kill those that take too long."""
    deadline = time.monotonic() + decisions.GRACE
    for id, process in processes:
        if not process.ended(max(0.0, deadline - time.monotonic())):
            log.warning(
                "worker %s has ended, but its process (pid %s) is still running, so it is killed now",
                id,
                process.pid,
            )
            process.kill()
            process.ended(decisions.GRACE)
