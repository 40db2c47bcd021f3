"""The supervisor of one run. It hears what happens, and has the crew do what ``decisions.decide`` says.

The run contract. If the code disagrees with it, that is a bug; each clause names its test in ``tests/run/``.

- R1 Cascade. When a source ends, its channel closes; each stage drains its inputs, finishes, and closes its
  outputs; the run ends when all sinks have. (test_cascade.py)
- R2 Early end. When a reader wants no more, writers upstream are stopped the same way, without an error.
  (test_early_end.py)
- R3 Failure. An exception that no ``errors`` stream receives ends the run: sources stop, channels break,
  workers end, and ``run()`` raises one RunError whose members are StageErrors with stage, item, worker and
  the original traceback. The first failure is first. No error is lost, BaseException in a worker included.
  A channel ends cleanly only if all who wrote it came to their ends in order: who meets a break breaks all of
  its channels before it leaves one, and those of who failed end once all are broken. So of a run that breaks
  off, aborted ones too, nobody takes a part for the whole.
  (test_failure.py, test_half_results.py, test_random_breaks.py)
- R4 Death. A worker that dies is noticed within 200 ms and reported with signal and exit code.
  (test_death.py)
- R5 Stop. First Ctrl-C, SIGTERM or ``run.stop()``: sources stop, everything in flight is finished, however
  long it takes as long as items move; if none does for half a minute, the run is broken off. Second, or
  ``run.abort()``: break at once, within a bounded time. What was finished is in the user's hands: Ctrl-C in
  ``graph.run()``, ``wait()``, ``iter()``, a loop over it and the ``with`` block raises ``Interrupted`` with
  results and report. The command prints one line and its report, and exits with 130.
  (test_stop.py, test_interrupted.py, test_supervisor.py)
- R6 No residue. After any ending no process, thread, segment or descriptor of the run is left.
  (test_residue.py)
- R7 Same everywhere. Under fork, forkserver and spawn, with lambdas and closures. (test_start_methods.py)
- R8 Account. ``stats()`` at any time and ``report()`` at the end; items in = items out + items failed.
  (test_account.py)
- R9 Chance. Every worker has its own seed, derived from the run's, its stage, its number and its incarnation,
  and what its process draws begins there. (test_seeds.py)
- R10 Blame. An item is blamed only for deaths inside the user's code (or inside its own unpickling), by one
  worker at a time while the others go on, and with how each of them died. With ``max_deaths=1`` also for
  deaths until its output is out, so it is never begun twice. (test_blame.py, test_begun_once.py)
- R11 Gangs. The workers of a stage with a group start together. When one dies and the stage is restartable,
  all begin again, each with what it had in hand, and no item is blamed for the ends of the others. A
  survivor's MemberDied is no failure of its own. So over hosts, too, where connections that break count as a
  death. When one ends because nobody reads what they put, all end. Of an elastic gang the others go on
  meanwhile, in their processes, as a smaller group; the one that takes its place makes it whole again, and
  each item has its outputs once. (test_gangs.py, tests/deaths/test_gang_deaths.py,
  tests/deaths/test_elastic_gangs.py, tests/hosts/test_host_gangs.py, tests/hosts/test_elastic_host_gangs.py)
- R12 Pools. The processes of a pool last from one run to the next, each with its callable, and keep nothing
  else of a run; forked ones keep memory of other runs that go on when the pool starts them. Each run is
  whole. Who has failed, died or not come to an end has a fresh process in the next. PortRelease the block
  finishes a run that goes on, and raises what the last one failed by unless that was raised.
  (test_pool_workers.py, test_pool_after_failures.py, test_pool_blocks.py,
  test_pool_ends.py)
- R13 Elastic stages. ``run.scale()`` adds and removes workers of a stage that works item by item, on threads
  and in processes, while the graph runs. Order is kept, and each item has its outputs once, also when workers
  are killed meanwhile. A removed worker finishes its item. A new worker that can't be started leaves the
  others at work. (test_elastic_stages.py, tests/deaths/test_scaling_deaths.py)
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

from flowchan.channel.channel import Channel
from flowchan.channel.latch import Latch
from flowchan.errors import Closed, Empty, Full
from flowchan.run.crew.local_crew import Crew
from flowchan.run.observe.clocks import WorkerClocks
from flowchan.run.observe.feed import Feed
from flowchan.run.observe.measure import Account, summarise
from flowchan.run.observe.windows import History, between
from flowchan.run.policy import break_cause, decisions
from flowchan.run.policy.break_cause import Breaks
from flowchan.run.policy.deadlock import Deadlocks, Look
from flowchan.run.policy.decisions import (
    Action,
    BreakChannels,
    Disband,
    MateEnded,
    Meet,
    PolicyState,
    Regroup,
    ReleasePorts,
    Replace,
    StopSources,
    SupervisorEvent,
    Terminate,
    decide,
)
from flowchan.run.policy.events import (
    Aborted,
    Answered,
    Began,
    Crashed,
    CrossedOff,
    Ended,
    Event,
    Failure,
    Gone,
    Met,
    Result,
    Retried,
    Started,
    Troubled,
    WorkerId,
)
from flowchan.run.policy.failures import text_of
from flowchan.run.policy.journal import Journal
from flowchan.run.policy.plan import Plan
from flowchan.run.policy.scaling import Add, Remove, Size
from flowchan.run.policy.stats import RunStats
from flowchan.run.worker.requests import Requests, answers_in
from flowchan.transport.interrupts import interrupts_deferred

POLL_INTERVAL_S = 0.05
"""Seconds between two looks at what nobody announces: whether all has been heard. Nothing that time decides
comes more exactly."""


class Supervisor:
    """Decides over one run. Its thread is the only one that changes ``state``."""

    def __init__(self, plan: Plan, crew: Crew) -> None:
        self.plan = plan
        self.crew = crew
        self._has_hosts = any(worker.host for worker in plan.workers)
        self.pid = os.getpid()
        self.ended = Latch()
        self.crashed: BaseException | None = None
        self.results: dict[str, object] = {}
        ids = frozenset(worker.id for worker in plan.workers)
        self.started_at = time.monotonic()
        self.ended_at: float | None = None
        self.state = PolicyState(
            alive=ids,
            processes=frozenset(worker.id for worker in plan.workers if worker.stage.placement.apart),
            sources=frozenset(id for id in ids if id.stage in plan.sources),
            ends=frozenset(id for id in ids if id.stage in plan.ends),
            limits=plan.limits(),
            gangs=frozenset(stage.name for stage in plan.graph.stages if stage.gang),
            elastic=plan.elastic,
            since=self.started_at,
            began=self.started_at,
            sizes={
                stage.name: Size(stage.workers, self.started_at, stage.workers)
                for stage in plan.graph.stages
                if not plan.is_fixed(stage)
            },
        )
        # Takes in results that nobody reads while somebody outside waits for the run to move.
        self.take_in: Callable[[frozenset[WorkerId]], None] = lambda _: None
        # The handle of a pool's run, until it has ended and nobody need hear of a failure. The pool has this
        # list too.
        self.unheard: list[Any] = []
        self._retried: Counter[str] = Counter()
        self._unwanted: Counter[str] = Counter()
        self._clocks = WorkerClocks()
        self._history = History()
        self.feed = Feed(f"flowchan {plan.graph.name}", weakref.WeakMethod(self.stats))
        self._pids: dict[WorkerId, int] = {}  # of worker processes, also of some that are gone
        self._journal = Journal(plan)
        self._last_error = ""
        self._refused: Counter[str] = Counter()
        self.asking: Requests | None = None
        self._deadlocks = Deadlocks(self.started_at)
        self._breaks = Breaks(plan, crew.broken, crew.cause_of)
        self._moved = 0  # items that channels had passed when the run was stopped, or at the last look since
        self._due: dict[WorkerId, float] = {}  # when a replaced worker is to be started
        self._events: Channel[SupervisorEvent | Event] = Channel(1024)  # as references
        self._thread: threading.Thread | None = None

    # --- called by the run, on any thread ---

    def start(self) -> None:
        """Starts every worker but those that gather results, or undoes all and raises."""
        self._journal.begins()
        try:
            self.crew.start(self.tell)
            name = f"flowchan {self.plan.graph.name} supervisor"
            thread = threading.Thread(target=self._supervise, name=name, daemon=True)
            thread.start()
            self._thread = thread
        except BaseException as reason:
            self.unheard.clear()
            self._undo_start(reason)
            raise

    def _undo_start(self, reason: BaseException) -> None:
        """Ends what has started, as the supervisor's thread would. What goes wrong in that does not hide the
        reason."""
        try:
            self._break(None)
            self.crew.cancel_tasks(all_of_them=True)
            self.crew.kill()
            self._clear_up(decisions.GRACE)
            self.crew.warn_of(self.state.abandoned)
        except Exception as error:
            reason.add_note(f"and not all that had started could be ended: {text_of(error)}")

    def tell(self, event: Event) -> None:
        """Takes what a worker tells."""
        if isinstance(event, Began | Started):
            self.feed.tell(event)
        if isinstance(event, Began):
            self._clocks.begin(event.worker)
        elif isinstance(event, Started):
            self._pids[event.worker] = event.pid
            self._clocks.started(event)
            self._journal.started(event)
        else:
            if isinstance(event, Ended | Failure):
                self._clocks.look(event.worker)
            self._events.put(event)

    def wait(self, timeout: float | None = None) -> bool:
        """Whether the run ends within ``timeout`` seconds. Then the supervisor's thread is gone, and what
        it held, too (R6); but nobody waits while it warns of threads that are stuck."""
        if not self.ended.wait(timeout):
            return False
        thread, us = self._thread, threading.current_thread()
        if thread is not None and thread is not us and not self.state.abandoned:
            with interrupts_deferred():
                thread.join()
        return True

    def ask(self, happening: SupervisorEvent) -> None:
        """Asks for a stop, an abort or other numbers of workers; returns at once. Does nothing when the run
        has ended."""
        with contextlib.suppress(Closed):
            self._events.put(happening)

    def cross_off(self, question: int) -> None:
        """Says that nobody need work for a question any more, where other hosts have to be told. Never waits,
        for event loops call it: while too much happens, the work is done in vain."""
        if self._has_hosts:
            with contextlib.suppress(Closed, Full):
                self._events.put_nowait(CrossedOff(question))

    def left_of(self, item: Any) -> Any:
        """What is left of an item that has come to an end of the graph, when the answers in it have gone to
        who asked, or ``NOTHING``."""
        return item if self.asking is None else answers_in(item, self.asking.settle)

    def stats(self, window: float | None = None) -> RunStats:
        """The run at this moment (R8), with rates and shares of its last ``window`` seconds or of all."""
        now = self._counters()
        return between(None if window is None else self._history.before(now, window), now)

    def _counters(self) -> RunStats:
        now = time.monotonic() if self.ended_at is None else self.ended_at
        account = Account(
            self.state,
            max(now - self.started_at, 1e-9),
            Counter(self._retried),
            Counter(self._unwanted),
            self._clocks.until(now),
            dict(self._pids),
            self._last_error,
            Counter(self._refused),
        )
        return summarise(self.plan, account, self.crew.snapshots(), self.crew.hosts())

    # --- the supervisor's thread ---

    def _supervise(self) -> None:
        try:
            while self.state.phase != "ended":
                self.turn(self._next())
        except BaseException as error:  # a mistake of ours: whoever waits must hear of it
            self.crashed = error
            self._break(error)
            self.crew.kill()
            self.state = dataclasses.replace(self.state, phase="ended", abandoned=self.state.alive)
        try:
            self._clear_up()
        finally:
            self.ended_at = time.monotonic()
            try:
                self._journal.ends(*self._how_it_ended())
            finally:  # what a handler of the program's may raise keeps nobody waiting
                if self.asking is not None:
                    self.asking.end()
                self.ended.set()
                self.feed.end()
                if self.crashed is None and not self.state.failures:
                    self.unheard.clear()  # until now the end of a pool's block has to find it
        # Comes last: it may raise, and the run must have ended for all who wait.
        self.crew.warn_of(self.state.abandoned)

    def _how_it_ended(self) -> tuple[str, float, frozenset[WorkerId]]:
        stats = self.stats()
        return stats.state, stats.elapsed, self.state.abandoned

    def _next(self) -> SupervisorEvent | Event:
        event: SupervisorEvent | Event = decisions.Tick()
        with contextlib.suppress(Empty):
            event = self._events.get(timeout=self._pause())
        return event

    def _pause(self) -> float:
        """Seconds until something must be looked at though nothing is heard: workers announce their ends, so
        that is whether anybody can move, and what only time decides."""
        if self._breaks.pending:
            return POLL_INTERVAL_S
        now = time.monotonic()
        if self._due:
            return min(max(0.0, min(self._due.values()) - now), break_cause.POLL_INTERVAL_S)
        late = self._late_at if self.state.phase == "finishing" and self._late_at > now else math.inf
        return max(POLL_INTERVAL_S, min(self._deadlocks.next_at, decisions.next_at(self.state), late) - now)

    @property
    def _late_at(self) -> float:
        """From when on workers that nobody needs don't end by themselves."""
        return self.state.since + decisions.GRACE / 2

    def turn(self, event: SupervisorEvent | Event) -> None:
        """Hears what has happened, and does what it and the time that has passed ask for."""
        self._look_for_movement()
        self._hear(event)
        self._breaks.look()
        if self._breaks.is_due(self._all_is_heard):
            self._tell_break()
        self._look_for_deadlock()
        self._cancel_tasks()
        self._handle(decisions.Tick())
        self._start_due()
        self._history.look(self._counters)

    def _hear(self, event: SupervisorEvent | Event) -> None:
        if isinstance(event, Result):
            self.results[event.stage] = event.value
        elif isinstance(event, Retried):
            self._retried[event.worker.stage] += 1
            self.feed.tell(event)
        elif isinstance(event, Answered):
            self._refused[event.worker.stage] += event.failed
            if self.asking is not None:
                self.asking.settle(event.question, event.value, event.error)
        elif isinstance(event, CrossedOff):
            self.crew.cross_off(event.question)
        elif isinstance(event, Troubled):
            self._last_error = event.text
            self.feed.tell(event)
        elif isinstance(event, Began | Started):
            self.tell(event)
        elif isinstance(event, Aborted):
            self._breaks.hear(event)
        elif isinstance(event, Met):
            self._breaks.hear_met(event)
        elif isinstance(event, Gone):
            self._bury(event.worker)
        elif isinstance(event, Crashed):
            raise event.error
        elif not isinstance(event, Ended) or not self._breaks.keeps(event):
            if isinstance(event, Failure) and self._breaks.told_by(event.worker):
                self._tell_break()  # a worker's words come in its order
            self._handle(event)

    def _bury(self, id: WorkerId) -> None:
        """A process has ended; unless it has told how, it died."""
        if id not in self.state.alive or id in self._breaks.ended():
            self.crew.forget(id)
            return
        if self.state.ends_with_mates(id):
            self._handle(MateEnded(id))
        else:
            self._handle(self.crew.death_of(id, self.state.restarts.get(id.stage, 0)))

    def _handle(self, happening: SupervisorEvent) -> None:
        now = time.monotonic()
        if (
            isinstance(happening, Ended | Failure | MateEnded | decisions.Died)
            and happening.worker in self.state.alive
        ):
            self._clocks.end(happening.worker)
            self._pids.pop(happening.worker, None)
            if isinstance(happening, decisions.Died) and happening.how:
                self._last_error = f"worker {happening.worker} {happening.how}"
            self._unwanted[happening.worker.stage] += (
                happening.unwanted if isinstance(happening, Ended) else 0
            )
        before = self.state
        self.state, actions = decide(before, happening, now)
        self._journal.decided(happening, before, self.state)
        if not isinstance(happening, decisions.Tick):
            self.feed.tell(happening)
        for action in actions:
            if isinstance(action, Terminate) and self.state.phase not in ("running", "stopping"):
                self._journal.slow(action)
            self._act(action)

    def _act(self, action: Action) -> None:
        if isinstance(action, StopSources):
            self.crew.stop_sources()
            self._moved = self.crew.glance().moved
        elif isinstance(action, BreakChannels):
            self._break(self.state.failures[0].error if self.state.failures else None)
        elif isinstance(action, ReleasePorts):
            self.crew.release_ports(action.worker)
        elif isinstance(action, Terminate):
            self.crew.terminate(action.worker, action.force)
        elif isinstance(action, Replace):
            self.crew.recover(action.worker)
            self._due[action.worker] = time.monotonic() + action.pause
        elif isinstance(action, Regroup):
            self._regroup(action)
        elif isinstance(action, Disband):
            self.crew.disband(action.stage)
        elif isinstance(action, Meet):
            self._let_meet(action)
        elif isinstance(action, Add):
            self._add(action.worker)
        elif isinstance(action, Remove):
            self.crew.remove(action.worker)

    def _regroup(self, action: Regroup) -> None:
        for worker in action.workers:
            self.crew.recover(worker, blame=worker == action.died)
        # All in one turn: the death of one that is heard before its mates are started can't end these, which
        # would wait for it for ever.
        self._due.update(dict.fromkeys(action.workers, time.monotonic() + action.pause))
        try:
            self.crew.regroup(action.workers)
        except OSError as error:
            del self._due[action.workers[0]]
            self._handle(Failure(action.workers[0], error, None, self.pid))

    def _let_meet(self, action: Meet) -> None:
        try:
            self.crew.meet(action.workers)
        except OSError as error:
            self._handle(decisions.Stuck(Failure(action.workers[0], error, None, self.pid)))

    def _add(self, worker: WorkerId) -> None:
        """Starts a further worker. The run goes on without it if that fails."""
        try:
            self.crew.add(worker)
        except Exception as error:
            self._last_error = self._journal.not_added(worker, error)
            self._handle(Ended(worker))

    def _cancel_tasks(self) -> None:
        """At once when the run is broken off, and sources when nobody wants their elements any more; when
        only workers are left that nobody needs, they may end by themselves."""
        late = time.monotonic() > self._late_at
        over = self.state.phase in ("failing", "aborting") or (self.state.phase == "finishing" and late)
        self.crew.cancel_tasks(over)

    def _look_for_movement(self) -> None:
        """What is in flight when a run is stopped may take its time, as long as it moves."""
        waited = time.monotonic() - self.state.since
        if self.state.phase == "stopping" and waited > decisions.STOP_SECONDS:
            before, self._moved = self._moved, self.crew.glance().moved
            if self._moved != before:
                self._handle(decisions.Moved())

    def _tell_break(self) -> None:
        if (failure := self._breaks.failure()) is not None:
            self._handle(decisions.Broke(failure))
        for ended in self._breaks.ends():
            self._handle(ended)

    def _break(self, cause: BaseException | None) -> None:
        self._breaks.end()
        self.crew.break_channels(cause)

    def _all_is_heard(self) -> bool:
        """Whether all that workers have told so far has been handled."""
        return self.crew.all_is_heard() and len(self._events) == 0

    def _look_for_deadlock(self) -> None:
        if time.monotonic() >= self._deadlocks.next_at:
            self.crew.end_unwanted()
        if self._due:
            return
        found = self._deadlocks.look(time.monotonic(), self.state.alive, self.crew.glance, self._look)
        if isinstance(found, decisions.Stuck):
            self._handle(found)
        elif found is not None:
            self.take_in(found)

    def _look(self, unread: frozenset[WorkerId]) -> Look | None:
        elsewhere = self.crew.elsewhere(self.state.alive)
        if elsewhere is None:
            return None
        inputs, stats = frozenset(self.plan.inputs), elsewhere.put_into(self.stats())
        moves = elsewhere.moves or self.crew.may_move(self.state.alive)
        return Look(stats, unread, inputs, moves, elsewhere.counts)

    def _start_due(self) -> None:
        now = time.monotonic()
        wanted = self.state.phase in ("running", "stopping")
        for id in [id for id, due in self._due.items() if due <= now or not wanted]:
            del self._due[id]
            if not wanted:
                self._handle(Ended(id))
                continue
            try:
                self.crew.start_again(id)
            except Exception as error:
                self._handle(Failure(id, error, None, self.pid))

    def _clear_up(self, timeout: float | None = None) -> None:
        self._events.close()  # before those are joined who may wait to put into it
        stuck = self.crew.clear_up(self.state.abandoned, timeout)
        self.state = dataclasses.replace(self.state, abandoned=self.state.abandoned | stuck)
