"""The worker processes of one machine: started, watched, ended. What they tell, and at last that one is gone,
comes by one mail, whoever reads that."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from typing import Any

from flowchan.channel.channel import Channel
from flowchan.run.crew import memory
from flowchan.run.crew.main_guard import ProcessName
from flowchan.run.crew.process import WorkerProcess
from flowchan.run.crew.recovery import Death, deaths_in_hand
from flowchan.run.crew.watch import Watch
from flowchan.run.policy import decisions, seeds
from flowchan.run.policy.events import Event, Gone, WorkerId
from flowchan.run.policy.journal import log
from flowchan.run.worker import logs
from flowchan.run.worker.gpus import Gpus
from flowchan.run.worker.logs import Logged
from flowchan.run.worker.opening import Ports
from flowchan.run.worker.process_main import Order, process_main
from flowchan.run.worker.streams import Streams


class WorkerProcesses:
    """Those of one run; ``graph`` is its name. ``gone`` hears of each process that has ended for certain,
    on the thread that runs :meth:`watch`."""

    def __init__(self, graph: str, mail: Channel[Event | Logged], gone: Callable[[Gone], None]) -> None:
        self._graph = graph
        self._mail = mail
        self._gpus = Gpus()
        self.known: dict[WorkerId, WorkerProcess] = {}
        self._watch = Watch(gone)
        # Those whom the kernel killed for lack of memory before the run, and those of the run so far.
        self._oom_kills = memory.oom_kills()

    def start(
        self,
        here: seeds.Worker,
        stage: bytes,
        ports: Ports,
        predecessors: tuple[str, ...],
        gpus: int,
        member: Any = None,
        next_seats: Channel[Any] | None = None,
    ) -> int:
        """Starts a worker's process, and gives its pid. ``predecessors``: how those died with whose item it
        begins. ``gpus``: how many of its own it has; raises :class:`flowchan.HostError` when there are too
        few. ``member``: its own of the group that its stage's workers form, ``next_seats``: by which later
        ones come."""
        id = WorkerId(here.stage, here.number)
        devices = self._gpus.take(id, gpus)
        order = Order(here, ports, self._mail, predecessors, member, next_seats, logs.levels())
        process = self._begin(id, stage, order, devices)
        self.known[id] = process
        self._watch.add(id, process)
        return process.pid

    def _begin(self, id: WorkerId, stage: bytes, order: Order, devices: str | None) -> WorkerProcess:
        """Has a process begin with its work."""
        arguments = (id, stage, order, os.getpid(), devices, Streams())
        return WorkerProcess(ProcessName(f"{self._graph}/{id}"), process_main, arguments)

    def watch(self) -> None:
        """Watches until :meth:`stop_watching`."""
        self._watch.run()

    def death(self, id: WorkerId, ports: Ports) -> Death:
        """How a worker died whose process is gone; ``ports`` are its own."""
        process = self.known[id]
        how = process.how_it_ended(process.exitcode == -signal.SIGKILL and self._kernel_killed())
        lived = time.monotonic() - process.born
        return Death(how, process.exitcode, process.pid, lived, deaths_in_hand(ports))

    def _kernel_killed(self) -> bool:
        """Whether the kernel has killed more processes for lack of memory than are explained."""
        more = memory.oom_kills() > self._oom_kills
        self._oom_kills += more
        return more

    def ended(self, id: WorkerId) -> bool:
        """Whether the worker has a process here, and that has ended."""
        return id in self.known and self.known[id].ended()

    def give_back_gpus(self, id: WorkerId) -> None:
        """The worker has ended, or runs elsewhere from now on."""
        self._gpus.give_back(id)

    def forget(self, id: WorkerId) -> None:
        """Leaves nothing of a process that has ended."""
        self.known.pop(id).close()

    def terminate(self, id: WorkerId, force: bool) -> None:
        process = self.known.get(id)
        if process is not None:  # it may be dead and not yet replaced
            process.kill() if force else process.terminate()

    def kill(self) -> None:
        for process in list(self.known.values()):  # another thread may be starting one
            process.kill()

    def end(self) -> None:
        """Waits for all of them, and kills those that don't end by themselves."""
        end_all(self.known.items())

    def stop_watching(self) -> None:
        self._watch.stop()

    def close(self) -> None:
        """Once all have ended and :meth:`watch` has returned."""
        self._watch.close()
        for process in self.known.values():
            process.close()


def end_all(processes: Iterable[tuple[WorkerId, WorkerProcess]]) -> None:
    """Waits for these, and kills those that don't end by themselves."""
    deadline = time.monotonic() + decisions.GRACE
    for id, process in processes:
        if not process.ended(max(0.0, deadline - time.monotonic())):
            log.warning(
                "worker %s has ended, but its process (pid %s) goes on: it is killed", id, process.pid
            )
            process.kill()
            process.ended(decisions.GRACE)
