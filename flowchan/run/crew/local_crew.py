"""What starts, watches, ends and recovers the workers of a run: ``Crew`` says what a supervisor asks for,
``LocalCrew`` does it on this machine."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from flowchan import _core
from flowchan.channel.addressed import ports_of_end
from flowchan.channel.awaiting import waits_of_loops
from flowchan.channel.channel import Channel, In
from flowchan.declare.callables import is_async
from flowchan.declare.values import Stage
from flowchan.errors import Broken, Closed
from flowchan.items.codec import dumps_for_worker
from flowchan.run.crew.gangs import Gangs
from flowchan.run.crew.main_guard import starts_of
from flowchan.run.crew.pool_processes import Employed, LastingProcesses
from flowchan.run.crew.process import WorkerProcess
from flowchan.run.crew.recovery import DeathLog, take_up
from flowchan.run.crew.worker_processes import WorkerProcesses
from flowchan.run.observe.measure import Snapshot, measure
from flowchan.run.policy import decisions, seeds
from flowchan.run.policy.deadlock import Elsewhere, Glance
from flowchan.run.policy.decisions import Died
from flowchan.run.policy.events import Began, Crashed, Event, Started, WorkerId
from flowchan.run.policy.plan import Plan
from flowchan.run.policy.stats import HostStats
from flowchan.run.worker.logs import Logged, log_here
from flowchan.run.worker.opening import Ports, open_plan, open_ports
from flowchan.run.worker.port_release import broken_by
from flowchan.run.worker.worker import work

if TYPE_CHECKING:
    from flowchan.run.worker.async_worker import Tasks


class Crew(Protocol):
    """What a supervisor asks of those who have the workers, wherever these run."""

    def start(self, tell: Callable[[Event], None]) -> None:
        """Starts every worker but those that gather results. ``tell`` hears all that they tell, and that a
        process is gone once everything it told has been heard."""

    def stop_sources(self) -> None:
        """Closes the channels of all sources and inputs."""

    def end_unwanted(self) -> None:
        """Ends the inputs of stages whose outputs nobody wants any more: while such a stage waits for an
        item, it does not see that itself."""

    def break_channels(self, cause: BaseException | None) -> None: ...

    def release_ports(self, id: WorkerId) -> None:
        """Ends the sessions of a worker."""

    def cancel_tasks(self, all_of_them: bool) -> None:
        """Cancels coroutines: all, or those of sources whose elements nobody wants any more."""

    def terminate(self, id: WorkerId, force: bool) -> None: ...

    def kill(self) -> None:
        """Kills every process."""

    def death_of(self, id: WorkerId, used: int) -> Died:
        """How a worker died whose process is gone without a word; ``used`` restarts of its stage are used."""

    def recover(self, id: WorkerId, blame: bool = True) -> None:
        """Gives back what a dead worker had in hand, to be taken up by its successor or by another. Without
        ``blame`` it was ended by us."""

    def regroup(self, ids: Sequence[WorkerId]) -> None:
        """Makes a new group for these workers of a gang, which are to be started."""

    def meet(self, ids: Sequence[WorkerId]) -> None:
        """Makes a group for these workers of an elastic gang, which wait for it."""

    def disband(self, stage: str) -> None:
        """Ends the group of an elastic gang."""

    def start_again(self, id: WorkerId) -> None:
        """Starts the successor of a worker that was recovered."""

    def add(self, id: WorkerId) -> None:
        """Opens the ports of a further worker of a stage, and starts it; or raises and leaves nothing of
        it."""

    def remove(self, id: WorkerId) -> None:
        """Lets a worker end after the item in hand."""

    def forget(self, id: WorkerId) -> None:
        """Keeps nothing of a process that is gone, if its worker was removed and has ended."""

    def cross_off(self, question: int) -> None:
        """Lets workers that can't see it on the program's board drop the item of this question."""

    def all_is_heard(self) -> bool:
        """Whether nothing that workers have told is still under way."""

    def broken(self, id: WorkerId | None) -> list[str]:
        """The names of the channels that are broken, of those that a worker has a port of, or of all."""

    def cause_of(self, channel: str) -> BaseException:
        """What a broken channel was aborted with; without a cause, that it is broken."""

    def glance(self) -> Glance:
        """The cheapest look at all channels."""

    def may_move(self, alive: Iterable[WorkerId]) -> bool:
        """Whether something goes on that no channel shows: a worker has died and is not yet replaced, or an
        event loop has other work than its channels."""

    def elsewhere(self, alive: frozenset[WorkerId]) -> Elsewhere | None:
        """What those workers do that are alive on other hosts; ``None``: these are being asked, and have to
        be asked for again."""

    def snapshots(self) -> tuple[Snapshot, ...]:
        """The counts of all channels."""

    def hosts(self) -> tuple[HostStats, ...]:
        """The other hosts on which workers run."""

    def clear_up(self, abandoned: frozenset[WorkerId], timeout: float | None) -> frozenset[WorkerId]:
        """Leaves nothing behind but threads that are stuck in the user's code: the ``abandoned``, and those
        that have not ended after ``timeout`` seconds, which are returned."""

    def warn_of(self, abandoned: frozenset[WorkerId]) -> None:
        """Says which of these threads still run. With warnings turned into errors it raises."""


class LocalCrew:
    """The workers of one run on this machine: their ports, threads, tasks and processes, which are those of a
    pool if there is one."""

    def __init__(self, plan: Plan, lasting: LastingProcesses | None = None) -> None:
        self.plan = plan
        self._lasting = lasting
        self._workers = {worker.id: worker for worker in plan.workers}
        self._here = [worker for worker in plan.workers if not worker.host]
        self._number_of = Counter(id.stage for id in self._workers)  # workers of a stage
        self._starts: Counter[WorkerId] = Counter()
        self._opened = open_plan(plan, plan.workers)
        self.channels, self.inputs = self._opened.channels, self._opened.inputs
        self._between = [
            ([self.channels[name] for name in into], [self.channels[name] for name in out])
            for into, out in plan.between()
        ]
        self.threads: dict[WorkerId, threading.Thread] = {}
        self._tasks: list[Tasks] = []  # of the async stages
        self._gangs = Gangs()
        self.death_log = DeathLog(plan)
        self._grown: set[str] = set()  # stages with more workers than declared
        self._leaving: set[WorkerId] = set()
        self._tell: Callable[[Event], None] = _is_over
        # What worker processes tell comes by mail, and a thread of its own hands it on. What the watch sees
        # of them goes the same way, and so comes last.
        self._mail: Channel[Event | Logged] | None = None
        self._apart: WorkerProcesses | None = None
        self.helpers: list[threading.Thread] = []
        if any(worker.stage.placement.apart for worker in self._here):
            self._mail = Channel(1024, across="processes")
            self._letters = self._mail.reader()

    @property
    def processes(self) -> Mapping[WorkerId, WorkerProcess]:
        """The worker processes of this machine, those that have ended included."""
        return {} if self._apart is None else self._apart.known

    # --- starting ---

    def start(self, tell: Callable[[Event], None]) -> None:
        """Processes first: a fork copies no thread of ours."""
        self._tell = tell
        for stage in self.plan.graph.stages:
            if stage.gang is not None and not stage.placement.hosts:
                self.regroup([id for id in self._workers if id.stage == stage.name])
        self._start_processes()
        self._start_threads()

    def _start_processes(self) -> None:
        if self._mail is None:
            return
        name, put = self.plan.graph.name, self._mail.put
        self._apart = (
            WorkerProcesses(name, self._mail, put)
            if self._lasting is None
            else Employed(name, self._mail, put, self._lasting)
        )
        for worker in self._here:
            if worker.stage.placement.apart:
                self._start_process(worker.id)

    def _start_threads(self) -> None:
        for worker in self._here:
            if not worker.stage.placement.apart and not worker.gathers and not worker.is_task:
                self.start_thread(worker.id)
        for stage in self.plan.graph.stages:
            if is_async(stage.function) and not stage.placement.apart:
                self._start_loop(stage)
        if self._apart is not None:
            self.helpers.append(self._started(" mail", self.help, self._deliver))
            self.helpers.append(self._started(" watch", self.help, self._apart.watch))

    def _started(self, name: str, target: Callable[..., object], *arguments: Any) -> threading.Thread:
        """A thread of the run, once it runs: one that can't be started is remembered nowhere."""
        name = f"flowchan {self.plan.graph.name}{name}"
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        thread.start()
        return thread

    def start_thread(self, id: WorkerId) -> None:
        """Starts a worker on a thread of this process."""
        stage, ports = self._workers[id].stage, self._opened.ports[id]
        arguments = (self.begun(id), stage, ports, self._tell, False, (), self._gangs.seat(id))
        self.threads[id] = self._started(f"/{id}", work, *arguments)

    def count_thread(self, id: WorkerId, thread: threading.Thread) -> None:
        """Somebody else's thread does the work of this worker: one more that may wait when nobody can
        move."""
        self.threads[id] = thread

    def _start_loop(self, stage: Stage) -> None:
        """Starts the workers of an async stage, as tasks on one thread."""
        from flowchan.run.worker.async_worker import Tasks, work_together  # asyncio is slow to import

        ids = [id for id, worker in self._workers.items() if worker.stage is stage]
        tasks = {self.begun(id): self._opened.ports[id] for id in ids}
        out = self._opened.ports[ids[0]].outputs if stage.operator.begins else {}
        self._tasks.append(Tasks(next((port.channel for port in out.values()), None)))
        arguments = (tasks, stage, self._tell, self._tasks[-1])
        thread = self._started(f"/{stage.name}", work_together, *arguments)
        self.threads.update(dict.fromkeys(ids, thread))

    def _start_process(self, id: WorkerId) -> None:
        assert self._apart is not None
        stage, ports = self._workers[id].stage, self._opened.ports[id]
        how = self.death_log.how_they_died(id)
        with starts_of(self.plan.graph):
            seats = self._gangs.seat(id), self._gangs.next_seats(id, stage)
            packed = dumps_for_worker(stage) if self._lasting is None else self._lasting.packed(stage)
            pid = self._apart.start(self.begun(id), packed, ports, how, stage.gpus, *seats)
        self._tell(Started(id, pid))

    def start_again(self, id: WorkerId) -> None:
        self._start_process(id)

    def begun(self, id: WorkerId) -> seeds.Worker:
        """What the worker that is being started is to know of itself."""
        incarnation = self._starts[id]
        self._starts[id] += 1
        seed = seeds.seed_of(self.plan.seed, id.stage, id.number, incarnation)
        return seeds.Worker(id.stage, id.number, self._number_of[id.stage], seed, incarnation)

    # --- what the workers tell ---

    def help(self, work: Callable[[], None]) -> None:
        """What a helping thread runs: when it fails, the run does."""
        try:
            with contextlib.suppress(Closed, Broken):  # the run is over
                work()
        except BaseException as error:  # without it the run would wait for ever
            with contextlib.suppress(Closed):
                self._tell(Crashed(error))

    def _deliver(self) -> None:
        for event in self._letters:  # an event counts as unread until it is handed on
            if isinstance(event, Logged):
                log_here(event)
                continue
            if isinstance(event, Began):
                self.death_log.began(event.worker)
            self._tell(event)

    def cross_off(self, question: int) -> None:
        pass  # all see it

    def all_is_heard(self) -> bool:
        stats = self._mail.stats() if self._mail is not None else None
        return stats is None or stats.inside + stats.leased == 0

    # --- channels and ports ---

    def ports(self, id: WorkerId) -> Ports:
        """The ports of a worker that are in this process."""
        return self._opened.ports[id]

    def port(self, id: WorkerId) -> In[Any]:
        """The end from which a worker that gathers takes its items."""
        return self._opened.ports[id].inputs["items"]

    def stop_sources(self) -> None:
        for edge in self.plan.edges:
            if edge.writer in self.plan.sources:
                self.channels[edge.name].close()

    def end_unwanted(self) -> None:
        for inputs, outputs in self._between:
            if all(out.closed and not out.broken for out in outputs):
                for channel in inputs:
                    channel.close()

    def break_channels(self, cause: BaseException | None) -> None:
        for channel in self.channels.values():
            channel.abort(cause)

    def release_ports(self, id: WorkerId) -> None:
        ports = self._opened.ports.get(id)
        for port in () if ports is None else ports.everything():
            port._may_close = None  # its worker has ended, or is given up
            port.close()
        if id in self._leaving:
            self._opened.ports.pop(id, None)

    def broken(self, id: WorkerId | None) -> list[str]:
        names = self.channels if id is None else self._workers[id].channels()
        return [name for name in names if self.channels[name].broken]

    def cause_of(self, channel: str) -> BaseException:
        error = broken_by(self.channels[channel])
        return error.__cause__ or error

    def snapshots(self) -> tuple[Snapshot, ...]:
        return measure(self.plan, self.channels, self._opened.ports)

    def hosts(self) -> tuple[HostStats, ...]:
        return ()

    def glance(self) -> Glance:
        opened = any(not port.channel.closed for end in self.inputs.values() for port in ports_of_end(end))
        threads = set(list(self.threads))  # in one step: other threads add to it
        unread = frozenset(id for id in self._workers.keys() - threads if self._workers[id].gathers)
        return Glance(*_core._look_at(list(self.channels.values())), opened, unread)

    def may_move(self, alive: Iterable[WorkerId]) -> bool:
        # A worker that died while it waited counts as waiting until it is replaced.
        dying = self._apart is not None and any(map(self._apart.ended, alive))
        if dying or not waits_of_loops():
            return dying
        from flowchan.run.worker.async_worker import only_wait_for  # needs asyncio, which is there now

        return not only_wait_for(list(self.channels.values()))

    def elsewhere(self, alive: frozenset[WorkerId]) -> Elsewhere | None:
        return Elsewhere()

    # --- ending and recovering ---

    def cancel_tasks(self, all_of_them: bool) -> None:
        for tasks in self._tasks:
            if all_of_them or (tasks.into is not None and tasks.into.closed):
                tasks.cancel()

    def terminate(self, id: WorkerId, force: bool) -> None:
        if self._apart is not None:
            self._apart.terminate(id, force)

    def kill(self) -> None:
        if self._apart is not None:
            self._apart.kill()

    def death_of(self, id: WorkerId, used: int) -> Died:
        assert self._apart is not None
        return self.death_log.write(self._workers[id], self._apart.death(id, self._opened.ports[id]), used)

    def recover(self, id: WorkerId, blame: bool = True) -> None:
        assert self._apart is not None
        self._gangs.count_out(id)
        self.hand_on(id, blame)
        self._apart.forget(id)

    def hand_on(self, id: WorkerId, blame: bool = True) -> None:
        """Gives what a worker had in hand to new ports in its place."""
        old, new = self._opened.ports[id], self._new_ports(id)
        take_up(old, new, self._workers[id].stage.keeps_its_own, blame)
        self._opened.ports[id] = new

    def _new_ports(self, id: WorkerId) -> Ports:
        ports = open_ports(self._workers[id], self.channels)
        for reader in ports.inputs.values():
            if id.stage in self._grown:
                reader._keep_turns()
            if id in self._leaving:
                reader._retire()
        return ports

    # --- more workers, and fewer ---

    def add(self, id: WorkerId) -> None:
        for gone in [gone for gone in self._leaving if gone in self.threads and not self._is_at_work(gone)]:
            self.forget(gone)
        worker = self.plan.worker(id)
        if worker.stage.workers == 1 and id.stage not in self._grown:
            self._grown.add(id.stage)
            for mate in [mate for mate in self._opened.ports if mate.stage == id.stage]:
                for reader in self._opened.ports[mate].inputs.values():
                    reader._keep_turns()
        self._workers[id] = worker
        self._number_of[id.stage] = id.number
        try:
            self._opened.ports[id] = self._new_ports(id)
            self._start_process(id) if worker.stage.placement.apart else self.start_thread(id)
        except BaseException:
            self.release_ports(id)
            raise

    def _is_at_work(self, id: WorkerId) -> bool:
        return id in self._opened.ports or self.threads[id].is_alive()

    def remove(self, id: WorkerId) -> None:
        self._leaving.add(id)
        for reader in self._opened.ports[id].inputs.values():
            reader._retire()

    def forget(self, id: WorkerId) -> None:
        if id not in self._leaving or id in self._opened.ports:
            return
        self._leaving.remove(id)
        del self._workers[id]
        if self.threads.pop(id, None) is None and self._apart is not None:
            self._apart.forget(id)

    def regroup(self, ids: Sequence[WorkerId]) -> None:
        self._gangs.form(self._workers[ids[0]].stage, ids)

    def meet(self, ids: Sequence[WorkerId]) -> None:
        self._gangs.meet(self._workers[ids[0]].stage, ids)

    def disband(self, stage: str) -> None:
        self._gangs.disband(stage)

    def clear_up(self, abandoned: frozenset[WorkerId], timeout: float | None) -> frozenset[WorkerId]:
        if self._apart is not None:
            self._apart.end()
        self._gangs.clear()
        for id in self._workers.keys() - abandoned:
            self.release_ports(id)
        for port in (port for end in self.inputs.values() for port in ports_of_end(end)):
            port.channel.close()  # not the port: it is the user's, whose next put shall raise Closed
        self._end_helpers()
        self._tell = _is_over  # and no circle holds the channels
        deadline = time.monotonic() + (timeout or 0.0)
        for id, thread in list(self.threads.items()):  # who waits for the run may start one more
            if id not in abandoned:
                thread.join(None if timeout is None else max(0.0, deadline - time.monotonic()))
        return frozenset(id for id, thread in list(self.threads.items()) if thread.is_alive())

    def _end_helpers(self) -> None:
        if self._mail is not None:
            self._mail.close()
        if self._apart is not None:
            self._apart.stop_watching()
            for helper in self.helpers:
                helper.join()
            self._apart.close()

    def warn_of(self, abandoned: frozenset[WorkerId]) -> None:
        """Nobody waits any more, so who only needed another moment is given it."""
        deadline = time.monotonic() + decisions.GRACE
        for id in sorted((id for id in abandoned if id in self.threads), key=str):
            self.threads[id].join(max(0.0, deadline - time.monotonic()))
            if not self.threads[id].is_alive():
                continue
            warnings.warn(
                f"worker {id} of graph {self.plan.graph.name!r} still runs code of yours that "
                "nothing can interrupt from outside; its thread ends when that code returns",
                RuntimeWarning,
                stacklevel=2,
            )


def _is_over(event: Event) -> None:
    raise Closed("the run is over")
