"""The supervisor of one run. It starts the workers, hears how they end, and does what ``decisions.decide``
says.

The run contract. If the code disagrees with it, that is a bug; each clause names its test in ``tests/run/``.

- R1 Cascade. When a source ends, its channel closes; each stage drains its inputs, finishes, and closes its
  outputs; the run ends when all sinks have. (test_cascade.py)
- R2 Early end. When a reader wants no more, writers upstream are stopped the same way, without an error.
  (test_early_end.py)
- R3 Failure. An exception that no ``errors`` stream receives ends the run: sources stop, channels break,
  workers end, and ``run()`` raises one RunError whose members are StageErrors with stage, item, worker and
  the original traceback. The first failure is first. No error is lost, BaseException in a worker included.
  (test_failure.py)
- R4 Death. A worker that dies is noticed within 200 ms and reported with signal and exit code.
  (test_death.py)
- R5 Stop. First Ctrl-C, SIGTERM or ``run.stop()``: sources stop, everything in flight is finished. Second, or
  ``run.abort()``: break at once. Both end within a bounded time, and what was finished is in the user's
  hands: Ctrl-C in ``graph.run()``, ``wait()``, ``iter()`` and the ``with`` block raises ``Interrupted`` with
  results and report. The command prints one line and its report, and exits with 130. (test_stop.py,
  test_interrupted.py)
- R6 No residue. After any ending no process, thread, segment or descriptor of the run is left.
  (test_residue.py)
- R7 Same everywhere. Under fork, forkserver and spawn, with lambdas and closures. (test_start_methods.py)
- R8 Account. ``stats()`` at any time and ``report()`` at the end; items in = items out + items failed.
  (test_account.py)
- R9 Chance. Every worker has its own seed, derived from the run's, its stage, its number and its incarnation,
  and what its process draws begins there. (test_chance.py)
- R10 Blame. An item is blamed only for deaths inside the user's code (or inside its own unpickling), by one
  worker at a time while the others go on, and with how each of them died. (test_blame.py)
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

import psutil

from flowchan.channel.channel import Channel
from flowchan.declare.callables import is_async
from flowchan.declare.values import Stage
from flowchan.errors import Broken, Closed, Empty, WorkerDied
from flowchan.run import chance, decisions
from flowchan.run.breaks import Breaks
from flowchan.run.deadlock import Deadlocks
from flowchan.run.decisions import (
    Action,
    BreakChannels,
    Happening,
    ReleasePorts,
    Replace,
    State,
    StopSources,
    Terminate,
    decide,
)
from flowchan.run.events import Aborted, Began, Ended, Event, Failure, Result, Retried, WorkerId
from flowchan.run.failures import text_of
from flowchan.run.guard import NAME, UNGUARDED, server_was_unguarded, unguarded
from flowchan.run.latch import Latch
from flowchan.run.measure import Spans, measure, summarise
from flowchan.run.opening import Opened, open_ports
from flowchan.run.plan import Plan, PlannedWorker
from flowchan.run.processes import exit_text, memory_of, reap
from flowchan.run.starting import start_process
from flowchan.run.worker import Tasks, pack, process_main, work, work_together

HOPELESS = 4
"""Deaths of a worker in a row, each before it begins to work, that end the run."""
LOOK = 0.05
"""Seconds between two looks at the worker processes, and at a run that is to end: two looks and what they
take stay below what R4 allows."""


class Supervisor:
    """Owns the workers of one run. Its thread is the only one that changes ``state``."""

    def __init__(self, plan: Plan, opened: Opened) -> None:
        self.plan = plan
        self.opened = opened
        self.pid = os.getpid()
        ids = {worker.id: worker for worker in plan.workers}
        self.ended = Latch()
        self.crashed: BaseException | None = None
        self.results: dict[str, Any] = {}
        self.retried: Counter[str] = Counter()
        self.unwanted: Counter[str] = Counter()
        self.spans = Spans()
        self.started_at = time.monotonic()
        self.ended_at: float | None = None
        self.state = State(
            alive=frozenset(ids),
            processes=frozenset(id for id, worker in ids.items() if worker.stage.place.apart),
            sources=frozenset(id for id in ids if id.stage in plan.sources),
            ends=frozenset(id for id in ids if id.stage in plan.ends),
            limits=plan.limits(),
            since=self.started_at,
        )
        # Takes in results that nobody reads while somebody outside waits for the run to move.
        self.take_in: Callable[[frozenset[WorkerId]], None] = lambda _: None
        self._workers = ids
        self._number_of = Counter(id.stage for id in ids)  # workers of a stage
        self._starts: Counter[WorkerId] = Counter()
        self._deadlocks = Deadlocks(plan, opened, self.started_at)
        self._due: dict[WorkerId, float] = {}  # when a replaced worker is to be started
        self._born: dict[WorkerId, float] = {}
        self._deaths_without_item: Counter[WorkerId] = Counter()
        # How the last workers died that died over one item: that which the successor tries again.
        self._how_they_died: dict[WorkerId, list[str]] = {}
        self._stillborn: Counter[WorkerId] = Counter()  # deaths in a row before it began to work
        self._memory: dict[WorkerId, int] = {}  # last known, in bytes
        self._processes: dict[WorkerId, BaseProcess] = {}
        self._known: dict[WorkerId, psutil.Process] = {}  # the same as the system knows them
        self._lost: set[WorkerId] = set()  # those whose forkserver was killed
        self._threads: dict[WorkerId, threading.Thread] = {}
        self._tasks: list[Tasks] = []  # of the async stages
        self._gone: set[WorkerId] = set()
        self._breaks = Breaks(plan, opened.channels)
        # Everything that happens comes through `_events`, as references. What worker processes tell comes
        # through `_mail`, and a thread of its own hands it on.
        self._events: Channel[Happening | Event] = Channel(1024)
        self._mail: Channel[Event] | None = Channel(1024, across="processes") if plan.uses_processes else None
        self._mail_reader = None if self._mail is None else self._mail.reader()
        self._thread: threading.Thread | None = None
        self._postman: threading.Thread | None = None

    # --- called by the run, on any thread ---

    def start(self) -> None:
        """Starts every worker but those that gather results, or undoes all and raises."""
        try:
            self._start_workers()
            if self._mail is not None:
                self._postman = self._started(" mail", self._deliver)
            self._thread = self._started(" supervisor", self._watch)
        except BaseException as reason:
            self._undo_start(reason)
            raise

    def _start_workers(self) -> None:
        """Processes first: a fork copies no thread of ours."""
        for worker in self.plan.workers:
            if worker.stage.place.apart:
                self._start_process(worker)
        for worker in self.plan.workers:
            if not worker.stage.place.apart and not worker.gathers and not worker.is_task:
                self.start_thread(worker.id)
        for stage in self.plan.graph.stages:
            if is_async(stage.function):
                self._start_loop(stage)

    def _started(self, name: str, target: Callable[..., None], *arguments: Any) -> threading.Thread:
        """A thread of the run, once it runs: one that can't be started is remembered nowhere."""
        name = f"flowchan {self.plan.graph.name}{name}"
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        thread.start()
        return thread

    def _undo_start(self, reason: BaseException) -> None:
        """Ends what has started, as the supervisor's thread would. What goes wrong in that does not hide the
        reason."""
        try:
            self._break(None)
            for tasks in self._tasks:
                tasks.cancel()
            for process in self._processes.values():
                process.kill()
            self._clear_up(decisions.GRACE)
            self._warn_of_abandoned()
        except Exception as error:
            reason.add_note(f"and not all that had started could be ended: {text_of(error)}")

    def start_thread(self, id: WorkerId) -> None:
        """Starts a worker on a thread of this process."""
        worker = self._workers[id]
        arguments = (self._begun(id), worker.stage, self.opened.ports[id], self.tell, False)
        self._threads[id] = self._started(f"/{id}", work, *arguments)

    def count_thread(self, id: WorkerId, thread: threading.Thread) -> None:
        """Somebody else's thread does the work of this worker: one more that may wait when nobody can
        move."""
        self._threads[id] = thread

    def _start_loop(self, stage: Stage) -> None:
        """Starts the workers of an async stage, as tasks on one thread."""
        ports = {id: self.opened.ports[id] for id, worker in self._workers.items() if worker.stage is stage}
        tasks = {self._begun(id): of_worker for id, of_worker in ports.items()}
        into = [link.name for link in self.plan.links if link.writer == stage.name and stage.verb.begins]
        self._tasks.append(Tasks(self.opened.channels[into[0]] if into else None))
        arguments = (tasks, stage, self.tell, self._tasks[-1])
        thread = self._started(f"/{stage.name}", work_together, *arguments)
        self._threads.update(dict.fromkeys(ports, thread))

    def _begun(self, id: WorkerId) -> chance.Worker:
        """What the worker that is being started is to know of itself."""
        incarnation = self._starts[id]
        self._starts[id] += 1
        seed = chance.seed_of(self.plan.seed, id.stage, id.number, incarnation)
        return chance.Worker(id.stage, id.number, self._number_of[id.stage], seed, incarnation)

    def tell(self, event: Event) -> None:
        """Takes an event of a worker in this process."""
        if isinstance(event, Began):
            self.spans.begin(event.worker)
        else:
            self._events.put(event)

    def ask(self, happening: Happening) -> None:
        """Asks for a stop or an abort; returns at once. Does nothing when the run has ended."""
        with contextlib.suppress(Closed):
            self._events.put(happening)

    # --- the supervisor's thread ---

    def _watch(self) -> None:
        try:
            self._run_to_the_end()
        except BaseException as error:  # a mistake of ours: whoever waits must hear of it
            self.crashed = error
            self._break(error)
            for process in self._processes.values():
                process.kill()
            self.state = dataclasses.replace(self.state, phase="ended", abandoned=self.state.alive)
        try:
            self._clear_up()
        finally:
            self.ended_at = time.monotonic()
            self.ended.set()
        self._warn_of_abandoned()

    def _run_to_the_end(self) -> None:
        while self.state.phase != "ended":
            try:
                event = self._events.get(timeout=self._pause())
            except Empty:
                event = decisions.Tick()
            if isinstance(event, Result):
                self.results[event.stage] = event.value
            elif isinstance(event, Retried):
                self.retried[event.worker.stage] += 1
            elif isinstance(event, Began):
                self._stillborn[event.worker] = -1
                self.spans.begin(event.worker)
            elif isinstance(event, Aborted):
                self._breaks.hear(event)
            elif not (
                isinstance(event, Ended) and self._breaks.keeps(event, self.opened.ports[event.worker])
            ):
                if isinstance(event, Failure) and self._breaks.told_by(event.worker):
                    self._tell_break()  # a worker's words come in its order
                self._handle(event)
            self._breaks.look()
            if self._breaks.is_due(self._all_is_heard):
                self._tell_break()
            for died in self._dead():
                self._handle(died)
            self._look_for_deadlock()
            self._cancel_tasks()
            self._handle(decisions.Tick())
            self._start_due()

    def _handle(self, happening: Happening) -> None:
        now = time.monotonic()
        if isinstance(happening, Ended | Failure | decisions.Died) and happening.worker in self.state.alive:
            self.spans.end(happening.worker)
            self.unwanted[happening.worker.stage] += happening.unwanted if isinstance(happening, Ended) else 0
        self.state, actions = decide(self.state, happening, now)
        for action in actions:
            self._act(action)

    def _act(self, action: Action) -> None:
        if isinstance(action, StopSources):
            for link in self.plan.links:
                if link.writer in self.plan.sources:
                    self.opened.channels[link.name].close()
        elif isinstance(action, BreakChannels):
            self._break(self.state.failures[0].error if self.state.failures else None)
        elif isinstance(action, ReleasePorts):
            for port in self.opened.ports[action.worker].everything():
                port.close()
        elif isinstance(action, Terminate):
            process = self._processes.get(action.worker)
            if process is not None:  # it may be dead and not yet replaced
                process.kill() if action.force else process.terminate()
        elif isinstance(action, Replace):
            self._replace(action.worker)
            self._due[action.worker] = time.monotonic() + action.pause

    def _cancel_tasks(self) -> None:
        """At once when the run is broken off, and sources when nobody wants their elements any more; when
        only workers are left that nobody needs, they may end by themselves."""
        late = time.monotonic() - self.state.since > decisions.GRACE / 2
        over = self.state.phase in ("failing", "aborting") or (self.state.phase == "finishing" and late)
        for tasks in self._tasks:
            if over or (tasks.into is not None and tasks.into.closed):
                tasks.cancel()

    def _tell_break(self) -> None:
        if (failure := self._breaks.failure()) is not None:
            self._handle(decisions.Broke(failure))
        for ended in self._breaks.ends():
            self._handle(ended)

    def _break(self, cause: BaseException | None) -> None:
        self._breaks.end()
        for channel in self.opened.channels.values():
            channel.abort(cause)

    def _dead(self) -> list[decisions.Died]:
        """Workers whose process has ended without a word. What it told may still be under way, so one is
        believed dead at the second look, when the mail is empty."""
        found = []
        for id in (self.state.alive & self.state.processes) - self._due.keys() - self._breaks.ended():
            process = self._processes[id]
            if process.exitcode is None:
                self._memory[id] = memory_of(process.pid) or self._memory.get(id, 0)
            elif self._end_lost(id):
                continue
            elif id not in self._gone:
                self._gone.add(id)
            elif self._all_is_heard():
                found.append(self._obituary(id, process))
        return found

    def _end_lost(self, id: WorkerId) -> bool:
        """Kills a process that still runs although Python says that it has ended: so it looks when the
        forkserver, its parent, was killed. Its death must be certain before its items are given to another.
        True while it runs."""
        process = self._known.get(id)
        try:
            if process is None or not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                return False
            process.kill()
        except psutil.NoSuchProcess:
            return False
        except OSError:  # no descriptor is free to look with
            return True
        self._lost.add(id)
        return True

    def _obituary(self, id: WorkerId, process: BaseProcess) -> decisions.Died:
        worker, ports = self._workers[id], self.opened.ports[id]
        how = exit_text(process.exitcode or 0, self._memory.get(id, 0))
        if id in self._lost:
            how = (
                "was killed, because Python's forkserver had been, and without it nothing "
                "is known of a process"
            )
        if any(port._died_working() for port in ports.inputs.values()):
            deaths = 1 + max(port._deaths_in_hand() for port in ports.inputs.values())
            self._how_they_died[id] = [*self._how_they_died.get(id, [])[: deaths - 1], how]
        else:
            lived = time.monotonic() - self._born[id]
            self._deaths_without_item[id] = 1 if lived > 1 else self._deaths_without_item[id] + 1
            deaths = self._deaths_without_item[id]
        self._stillborn[id] += 1
        code = process.exitcode or 0
        if self._stillborn[id] and code == UNGUARDED:
            failure = Failure(id, unguarded(self.plan.graph), None, process.pid or 0)
            return decisions.Died(id, failure, deaths, hopeless=True)
        hopeless = self._stillborn[id] >= HOPELESS
        limit = self.state.limits.get(id.stage, 0)
        used = f"{self.state.restarts.get(id.stage, 0)} of {limit} restarts are used"
        if id.stage not in self.state.limits or (limit == 0 and worker.stage.restarts):
            why = f"a {worker.stage.kind} stage keeps state of its own and is not declared restartable"
        else:
            why = "it dies before it begins to work" if hopeless else used
        error = WorkerDied(
            f"the process of worker {id} {how}; it is not replaced: {why}",
            exitcode=code, pid=process.pid,
        )  # fmt: skip
        return decisions.Died(id, Failure(id, error, None, process.pid or 0), deaths, hopeless)

    def _look_for_deadlock(self) -> None:
        if self._due:
            return
        # results, to be read by the program
        unread = self.state.alive - self._threads.keys() - self._processes.keys()
        dying = any(
            self._processes[id].exitcode is not None for id in self.state.alive & self.state.processes
        )
        found = self._deadlocks.look(
            self.state, unread, dying, lambda: summarise(self, measure(self.plan, self.opened.channels))
        )
        if isinstance(found, decisions.Stuck):
            self._handle(found)
        elif found:
            self.take_in(found)

    def _pause(self) -> float:
        """Seconds until something must be looked at though nothing is heard. In a run on threads that is not
        to end that is only whether anybody can move."""
        if self.state.processes or self.state.phase != "running":
            return LOOK
        return max(LOOK, self._deadlocks.next_at - time.monotonic())

    def _replace(self, id: WorkerId) -> None:
        """Gives back what a dead worker had in hand, so that every output of it appears once: outputs that
        are out already stay remembered in their channel, and whoever takes the item up skips them. The
        successor's ports are opened first, so that no channel believes that its last writer or reader has
        gone."""
        old = self.opened.ports[id]
        ports = open_ports(self._workers[id], self.opened.channels)
        items = [number for port in old.inputs.values() for number in port._numbers_in_hand()]
        if not old.inputs:
            items = [0]  # a source: all its outputs belong to one item
        for out in old.writers():
            out._retire(items)
        for port, reader in old.inputs.items():
            reader._hand_on(ports.inputs[port])
        self.opened.ports[id] = ports
        reap(self._processes.pop(id))

    def _start_due(self) -> None:
        now = time.monotonic()
        for id in [id for id, due in self._due.items() if due <= now or self.state.phase == "ended"]:
            del self._due[id]
            self._gone.discard(id)
            if self.state.phase not in ("running", "stopping"):
                self._handle(Ended(id))
                continue
            try:
                self._start_process(self._workers[id])
            except Exception as error:
                self._handle(Failure(id, error, None, self.pid))

    def _all_is_heard(self) -> bool:
        """Whether all that workers have told so far has been handled."""
        stats = self._mail.stats() if self._mail is not None else None
        return (stats is None or stats.inside + stats.leased == 0) and len(self._events) == 0

    # --- the postman's thread ---

    def _deliver(self) -> None:
        assert self._mail_reader is not None
        with contextlib.suppress(Closed, Broken):
            for event in self._mail_reader:  # an event counts as unread until it is handed on
                self._events.put(event)

    # --- processes and the end ---

    def _start_process(self, worker: PlannedWorker) -> None:
        arguments = (
            self._begun(worker.id), pack(worker.stage), self.opened.ports[worker.id], self._mail,
            os.getpid(),
            tuple(self._how_they_died.get(worker.id, ())),
        )  # fmt: skip
        name = f"{NAME}{self.plan.graph.name}/{worker.id}"
        process = multiprocessing.get_context().Process(target=process_main, args=arguments, name=name)
        try:
            start_process(process)
        except (EOFError, OSError):
            if server_was_unguarded():
                raise unguarded(self.plan.graph) from None
            raise
        self._processes[worker.id] = process
        self._lost.discard(worker.id)
        with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended already
            self._known[worker.id] = psutil.Process(process.pid)
        self._born[worker.id] = time.monotonic()

    def _clear_up(self, patience: float | None = None) -> None:
        """Leaves nothing behind but threads that are stuck in the user's code: those that have been given up,
        and those that have not ended after ``patience`` seconds."""
        deadline = time.monotonic() + decisions.GRACE
        for process in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                process.kill()
            reap(process)
        while (
            any(self._end_lost(id) for id in self._processes)
            and time.monotonic() < deadline + decisions.GRACE
        ):
            time.sleep(0.001)
        for id, ports in self.opened.ports.items():
            for port in ports.everything():
                if id not in self.state.abandoned:
                    port.close()
        for out in self.opened.inputs.values():
            out.channel.close()  # not the port: it is the user's, whose next put shall raise Closed
        self._events.close()  # before those are joined who may wait to put into it
        if self._mail is not None:
            self._mail.close()
        if self._postman is not None:
            self._postman.join()
        deadline = time.monotonic() + (patience or 0.0)
        for id, thread in list(self._threads.items()):  # who waits for the run may start one more
            if id not in self.state.abandoned:
                thread.join(None if patience is None else max(0.0, deadline - time.monotonic()))
        stuck = frozenset(id for id, thread in list(self._threads.items()) if thread.is_alive())
        self.state = dataclasses.replace(self.state, abandoned=self.state.abandoned | stuck)

    def _warn_of_abandoned(self) -> None:
        """Comes last: with warnings turned into errors it raises, and the run must have ended for all who
        wait. Nobody waits any more, so who only needed another moment is given it."""
        deadline = time.monotonic() + decisions.GRACE
        for id in sorted(self.state.abandoned & frozenset(self._threads), key=str):
            self._threads[id].join(max(0.0, deadline - time.monotonic()))
            if not self._threads[id].is_alive():
                continue
            warnings.warn(
                f"worker {id} of graph {self.plan.graph.name!r} still runs code of yours that "
                "nothing can interrupt "
                "from outside; its thread ends when that code returns",
                RuntimeWarning,
                stacklevel=2,
            )
