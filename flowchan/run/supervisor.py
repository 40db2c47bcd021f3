"""Supervise a run: pass events to ``decisions.decide`` and carry out the actions.

Algorithm. In each turn, the supervisor takes one event from its queue and passes it to decide(). If no event
arrives in time, it passes a ``Tick``. ``ActionExecutor`` carries out the resulting actions; the crew carries
out those that concern workers. The crew reports a death as one event, and replaces a worker in one call.

Invariants. Only the supervisor's thread modifies ``state`` and calls the crew.

The run contract. Code that violates it has a bug. Each clause names its tests, which are in ``tests/run/``
unless noted.

- R1 Cascade. When a source ends, its channel closes. Each stage drains its inputs, finishes, and closes its
  outputs. The run ends when all sinks have ended. (test_cascade.py)
- R2 Early end. When a reader leaves, the stages before it stop in the same way, without an error.
  (test_early_end.py)
- R3 Failure. An exception that no ``errors`` stream receives ends the run. Sources stop, channels break and
  workers end. ``run()`` raises one RunError, with a StageError for each failure in order. A StageError has
  the stage, item, worker and original traceback. No error is lost, not even a BaseException in a worker. A
  channel ends cleanly only if none of its writers failed. A worker that finds a channel broken therefore
  breaks all of its channels before it leaves any. A failed worker's ports are closed only after all channels
  are broken. If a run fails or is aborted, no reader takes partial output for complete output.
  (test_failure.py, test_partial_results.py, test_random_breaks.py)
- R4 Death. A worker's death is noticed within 200 ms and reported with signal and exit code. If its callable
  may have held state, the run warns that the state is lost. (test_death.py, test_run_decisions.py)
- R5 Stop. The first Ctrl-C, SIGTERM or ``run.stop()`` stops the sources. Items in flight are finished,
  however long that takes. ``run.stop(finish_queued=False)`` discards the items that wait in channels for a
  stage. ``run.stop(timeout=…)`` aborts the run if it has not ended by then. After half a minute, a warning
  appears. The second Ctrl-C or SIGTERM, or ``run.abort()``, aborts the run at once, within a bounded time.
  The user keeps the finished results. Ctrl-C or SIGTERM during ``graph.run()`` or ``wait()``, in a loop over
  ``iter()``, or in the ``with`` block raises ``Interrupted``. This exception carries the results and the
  report. SIGTERM does so only in the main thread, without an event loop, and if the program has not set a
  handler. The command prints one line and its report, and exits with 130, or with 143 after SIGTERM.
  (test_stop.py, test_stop_signals.py, test_interrupted.py, test_supervisor.py, test_run_decisions.py)
- R6 No residue. However a run ends, it leaves no process, thread, segment or descriptor behind.
  (test_residue.py)
- R7 Same everywhere. A graph runs the same under fork, forkserver and spawn, with lambdas and closures.
  (test_start_methods.py)
- R8 Statistics. ``stats()`` works at any time and ``report()`` at the end; items in = items out + items
  failed. For a run that failed or was aborted, they also count the items discarded in each stage and left in
  each channel. (test_item_counts.py, test_item_counts_after_failures.py)
- R9 Randomness. Every worker has a separate seed, derived from the run's seed, its stage, its number and its
  incarnation. The seed determines the random numbers in the worker's process. (test_seeds.py)
- R10 Blame. An item is blamed only for deaths that occur in user code or while the item is being unpickled.
  One worker at a time retries the item while the others continue, and the error lists the cause of each
  death. If ``max_deaths`` is 1, an item is also blamed for deaths until its output has been put, so it is
  never processed twice. A member of a batch fails only if it also kills a worker when tried alone. A death
  blamed on an item uses no restart; every other death uses one of the stage's restarts. A restart counts for
  60 s of work. The run warns before the last restart is used. (test_blame.py, test_no_repeats.py,
  test_decisions.py, tests/deaths/test_batches_that_kill_workers.py)
- R11 Gangs. The workers of a stage with a group start together. When one dies and the stage is restartable,
  all restart, each with the item that it held. The end of the other workers is not blamed on any item. A
  survivor that raises MemberDied has not failed. On hosts, a broken connection between members counts as a
  death. When one worker ends because its outputs have no readers, all of them end. In an elastic gang, the
  other workers keep their processes and continue as a smaller group. The replacement completes the group
  again, and each item's outputs appear once. (test_gangs.py, tests/deaths/test_gang_deaths.py,
  tests/deaths/test_elastic_gangs.py, tests/hosts/test_host_gangs.py, tests/hosts/test_elastic_host_gangs.py)
- R12 Pools. A pool keeps its processes from one run to the next, each with its callable but nothing else from
  a run. A forked process does contain a copy of the memory of other runs that are active when the pool starts
  it. Each run is complete. A worker that failed, died or did not end gets a new process in the next run.
  Leaving the block finishes an active run, and raises the failure of the last run unless it was raised
  before.
  (test_pool_workers.py, test_pool_after_failures.py, test_pool_blocks.py, test_pool_ends.py)
- R13 Elastic stages. ``run.scale()`` adds and removes workers of a stage on threads or processes during the
  run, if the stage processes one item at a time. Items keep their order, and each item's outputs appear once,
  even if workers are killed in the meantime. A removed worker finishes its item. If a new worker cannot be
  started, the others are not affected. The run itself adds and removes workers of stages with
  ``workers="auto"``. (test_elastic_stages.py, tests/deaths/test_scaling_deaths.py, test_auto_workers.py,
  test_autoscale_decisions.py, tests/deaths/test_auto_scaling_deaths.py)
- R14 Resume. A run with ``resume=path`` skips the source items whose descendants have all left the graph in
  earlier runs with this path. This holds even if the program was killed at some point. The run processes all
  other items, so a sink may receive an item again that was in flight. A graph that cannot be resumed is
  rejected before the start. (test_resume.py, test_resume_file.py, test_lineage.py,
  tests/deaths/test_resume_kills.py)
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from flowchan.channel.channel import Channel
from flowchan.channel.latch import Latch
from flowchan.errors import Closed, Empty, Full, StageError
from flowchan.run.action_executor import ActionExecutor
from flowchan.run.auto_scaler import AutoScaler
from flowchan.run.crew.part import CrewPart
from flowchan.run.crew.run_ports import RunChannels
from flowchan.run.observe.feed import Feed
from flowchan.run.observe.item_paths import ItemPaths
from flowchan.run.observe.measure import summarise
from flowchan.run.observe.tally import Tally
from flowchan.run.observe.view_socket import ViewSocket
from flowchan.run.observe.windows import History, between
from flowchan.run.policy import break_cause, decisions
from flowchan.run.policy.actions import BreakChannels
from flowchan.run.policy.break_cause import Breaks
from flowchan.run.policy.deadlock import Deadlocks, Observation
from flowchan.run.policy.decisions import Decided, SupervisorEvent, decide
from flowchan.run.policy.events import (
    Aborted,
    Answered,
    Began,
    Crashed,
    Death,
    Ended,
    ErrorSent,
    Event,
    Failure,
    ItemSpans,
    MembersTried,
    Met,
    ProcessEnded,
    RequestCancelled,
    Result,
    Retried,
    RunBegan,
    RunEnded,
    Started,
    TriesMember,
    WorkerId,
)
from flowchan.run.policy.failures import text_of
from flowchan.run.policy.journal import Journal
from flowchan.run.policy.lineage import Marks
from flowchan.run.policy.plan import Plan
from flowchan.run.policy.scaling import Scale
from flowchan.run.policy.stats import RunStats
from flowchan.run.policy.transitions import first_state
from flowchan.run.resume_file import ResumeFile
from flowchan.run.worker.requests import Requests, answers_in
from flowchan.transport.interrupts import interrupts_deferred

POLL_INTERVAL_S = 0.05
"""Seconds between checks for changes that no event announces, and therefore the resolution of time limits."""


class Supervisor:
    """Supervises one run, as the module docstring describes.

    Args:
        plan: Plan of the run.
        crew: Crew that manages the run's workers.
        channels: Channels of the run.
        recording: File that records finished items, if the run can be resumed.
    """

    def __init__(
        self, plan: Plan, crew: CrewPart, channels: RunChannels, recording: ResumeFile | None = None
    ) -> None:
        self.plan = plan
        self.crew, self.channels = crew, channels
        self._has_hosts = any(worker.host for worker in plan.workers)
        self.pid = os.getpid()
        self.ended = Latch()
        self.crashed: BaseException | None = None
        self.results: dict[str, object] = {}
        self.started_at = time.monotonic()
        self.ended_at: float | None = None
        self.state = first_state(plan, self.started_at)
        # Called to collect results that fill their channels while the program waits for something else.
        self.take_in: Callable[[frozenset[WorkerId]], None] = lambda _: None
        # Contains the handle of a pool's run until the run has ended and its failure has been raised.
        # The pool shares this list.
        self.unreported: list[Any] = []
        self._tally = Tally()
        self.history = History()
        self.feed = Feed(f"flowchan {plan.graph.name}", weakref.WeakMethod(self.stats))
        self.feed.listen(Journal(plan).record)
        self._paths = ItemPaths(plan, self.feed.tell)
        self._view_socket = ViewSocket(plan.graph.name, self.feed, channels.channels)
        self.scaler = AutoScaler(plan)
        self.feed.listen(self.scaler.record)
        self.asking: Requests | None = None
        self.recording = recording
        self._deadlocks = Deadlocks(self.started_at)
        self._breaks = Breaks(plan, channels.broken, channels.cause_of)
        self._executor = ActionExecutor(crew, channels, self._tally, self.feed)
        self._events: Channel[SupervisorEvent | Event] = Channel(1024)  # for threads, so no event is copied
        self._thread: threading.Thread | None = None

    # --- called by the run, on any thread ---

    def start(self) -> None:
        """Start all workers except those that collect results. On an error, undo the start and raise it."""
        self.feed.tell(RunBegan(len(self.plan.workers), self.plan.seed))
        try:
            self.crew.start(self.report)
            name = f"flowchan {self.plan.graph.name} supervisor"
            thread = threading.Thread(target=self._supervise, name=name, daemon=True)
            thread.start()
            self._thread = thread
        except BaseException as reason:
            self.unreported.clear()
            self._undo_start(reason)
            raise

    def _undo_start(self, reason: BaseException) -> None:
        """End the workers that have started. An error here must not hide ``reason``."""
        try:
            self._break(None)
            self.crew.cancel_tasks(all_of_them=True)
            self.crew.kill()
            self._close_crew(decisions.GRACE)
            self.crew.warn_of(self.state.abandoned)
        except Exception as error:
            reason.add_note(f"also, some workers that had started could not be ended: {text_of(error)}")

    def report(self, event: Event) -> None:
        """Accept an event from a worker, or raise ``Closed`` after the end of the run."""
        if type(event) is tuple:
            self._record_left(*event)
            return
        if isinstance(event, ItemSpans):
            self._paths.report(event)
            return
        self._tally.reported(event)
        if isinstance(event, Began | Started):
            self.feed.tell(event)
        else:
            self._events.put(event)

    def _record_left(self, marks: Marks, parts: int) -> None:
        """Record that an item left the graph or was split. If the file cannot be written, the run fails."""
        assert self.recording is not None
        try:
            self.recording.record(marks, parts)
        except OSError as reason:
            source = min(self.plan.sources)
            error = StageError(
                f"the finished items of source {source!r} could not be recorded in resume="
                f"{self.recording.path!r}: {text_of(reason)}; free space there and run the graph again",
                stage=source,
                worker="",
            )
            error.__cause__ = reason
            self.ask(decisions.Stuck(Failure(WorkerId(source, 0), error, None, self.pid)))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds for the run to end, and return whether it has ended.

        After the end of the run, the supervisor's thread and resources are also gone (R6). However, if the
        run has abandoned stuck threads, the thread may still be logging a warning about them.
        """
        if not self.ended.wait(timeout):
            return False
        thread, us = self._thread, threading.current_thread()
        if thread is not None and thread is not us and not self.state.abandoned:
            with interrupts_deferred():
                thread.join()
        return True

    def ask(self, event: SupervisorEvent) -> None:
        """Request a stop, an abort or a new number of workers. The call returns at once.

        A run that has ended ignores the request.
        """
        with contextlib.suppress(Closed):
            self._events.put(event)

    def cancel_request(self, question: int) -> None:
        """Tell the other hosts that no caller waits for the answer to this request any more.

        Event loops call this method, so it never blocks. If the queue is full, the method sends no message,
        and a worker may do some unnecessary work.
        """
        if self._has_hosts:
            with contextlib.suppress(Closed, Full):
                self._events.put_nowait(RequestCancelled(question))

    def settle_answers(self, item: Any) -> Any:
        """Send the answers in an item at an end of the graph to their callers.

        Return the rest of the item, or ``NOTHING``.
        """
        return item if self.asking is None else answers_in(item, self.asking.settle)

    def stats(self, window: float | None = None) -> RunStats:
        """Return the current statistics (R8).

        Rates and shares cover the last ``window`` seconds, or the whole run.
        """
        now = self._counters()
        return between(None if window is None else self.history.before(now, window), now)

    def _counters(self) -> RunStats:
        now = time.monotonic() if self.ended_at is None else self.ended_at
        account = self._tally.account(self.state, now - self.started_at, now)
        stats = summarise(self.plan, account, self.channels.snapshots(), self.crew.hosts())
        return dataclasses.replace(stats, decisions=self.scaler.decisions)

    # --- called by the supervisor's thread ---

    def _supervise(self) -> None:
        try:
            while self.state.phase != "ended":
                self.turn(self._next())
        except BaseException as error:  # a bug in flowchan; waiting threads must learn of it
            self.crashed = error
            self._break(error)
            self.crew.kill()
            self.state = dataclasses.replace(self.state, phase="ended", abandoned=self.state.alive)
        try:
            self._close_crew()
        finally:
            self.ended_at = time.monotonic()
            try:
                self._paths.end()
                stats = self.stats()
                self.feed.tell(RunEnded(stats.state, stats.elapsed, self.state.abandoned))
            # Release the other threads even if the program's logging handler raises.
            finally:
                if self.asking is not None:
                    self.asking.end()
                self.ended.set()
                self.feed.end()
                self._view_socket.close()
                if self.crashed is None and not self.state.failures:
                    self.unreported.clear()  # the end of the pool's block no longer has to wait for this run
        # Warn last, because warning may raise; by now, all waiting threads have learned of the run's end.
        self.crew.warn_of(self.state.abandoned)

    def _next(self) -> SupervisorEvent | Event:
        event: SupervisorEvent | Event = decisions.Tick()
        with contextlib.suppress(Empty):
            event = self._events.get(timeout=self._pause())
        return event

    def _pause(self) -> float:
        """Return the maximum number of seconds to wait for an event.

        Deadlock detection and timed decisions must run from time to time even if no event arrives.
        """
        if self._breaks.pending:
            return POLL_INTERVAL_S
        now = time.monotonic()
        if self._executor.due:
            return min(max(0.0, min(self._executor.due.values()) - now), break_cause.POLL_INTERVAL_S)
        late = self._late_at if self.state.phase == "finishing" and self._late_at > now else math.inf
        next_at = min(self._deadlocks.next_at, decisions.next_at(self.state), late, self.scaler.next_at)
        return max(POLL_INTERVAL_S, next_at - now)

    @property
    def _late_at(self) -> float:
        """Return the time after which workers that are no longer needed count as late."""
        return self.state.since + decisions.GRACE / 2

    def turn(self, event: SupervisorEvent | Event) -> None:
        """Handle an event, then everything that has become due."""
        before = self.state
        self._receive(event)
        self._breaks.check()
        if self._breaks.is_due(self._all_reported):
            self._tell_break()
        self._check_deadlock()
        self._cancel_tasks()
        if self.state is before:
            self._decide(decisions.Tick())
        for started in self._executor.start_due(self.state.goes_on):
            self._decide(started)
        for decision in self.scaler.due(self.state.goes_on, self._counters):
            self.feed.tell(decision)
            self._decide(Scale(decision.stage, decision.workers))
        self.history.sample(self._counters)
        self._view_socket.poll()

    def _receive(self, event: SupervisorEvent | Event) -> None:
        match event:
            case Result(stage, value):
                self.results[stage] = value
            case Answered():
                self._tally.record(event)
                if self.asking is not None:
                    self.asking.settle(event.question, event.value, event.error)
            case Retried() | ErrorSent():
                self._tally.record(event)
                self.feed.tell(event)
            case RequestCancelled(question):
                self.crew.cancel_request(question)
            case Began() | Started():
                self.report(event)
            case TriesMember() | MembersTried() | ItemSpans() | tuple():
                pass  # only other components use these events
            case Aborted():
                self._breaks.record(event)
            case Met():
                self._breaks.record_met(event)
            case Crashed(error):
                raise error
            case ProcessEnded(worker) | Death(worker):
                if worker not in self.state.alive or worker in self._breaks.ended():
                    self.crew.forget(worker)
                else:
                    self._decide(event)
            case Ended():
                if not self._breaks.keeps(event):
                    self._decide(event)
            case _:
                if isinstance(event, Failure) and self._breaks.has_reported(event.worker):
                    self._tell_break()  # the worker reported its broken channel before this failure
                self._decide(event)

    def _decide(self, event: SupervisorEvent) -> None:
        before, now = self.state, time.monotonic()
        if isinstance(event, Ended | Failure | ProcessEnded | Death) and event.worker in before.alive:
            self._tally.ended(event.worker)
            if isinstance(event, Ended):
                self._tally.ended_early(event)
            elif isinstance(event, Death) and not before.ends_with_peers(event.worker):
                self._tally.died(event)
        self.state, actions = decide(before, event, now)
        self.feed.tell_decision(Decided(event, before, self.state, actions))
        for action in actions:
            if isinstance(action, BreakChannels):
                self._break(self.state.failures[0].error if self.state.failures else None)
                continue
            for following in self._executor.carry_out(action, self.state.goes_on):
                self._decide(following)

    def _cancel_tasks(self) -> None:
        """Cancel source coroutines whose outputs have no readers, or all coroutines if the run is ending.

        In a run that is finishing, coroutines first get some time to end on their own.
        """
        late = time.monotonic() > self._late_at
        over = self.state.phase in ("failing", "aborting") or (self.state.phase == "finishing" and late)
        self.crew.cancel_tasks(over)

    def _tell_break(self) -> None:
        if (failure := self._breaks.failure()) is not None:
            self._decide(decisions.Broke(failure))
        for ended in self._breaks.ends():
            self._decide(ended)

    def _break(self, cause: BaseException | None) -> None:
        self._breaks.end()
        self.channels.break_all(cause)

    def _all_reported(self) -> bool:
        """Return whether the supervisor has handled all reports that workers have sent so far."""
        return self.crew.all_reported() and len(self._events) == 0

    def _check_deadlock(self) -> None:
        if time.monotonic() >= self._deadlocks.next_at:
            self.channels.close_unwanted()
        if self._executor.due:
            return
        found = self._deadlocks.check(
            time.monotonic(), self.state.alive, self.channels.activity, self._observe
        )
        if isinstance(found, decisions.Stuck):
            self._decide(found)
        elif found is not None:
            self.take_in(found)

    def _observe(self, unread: frozenset[WorkerId]) -> Observation | None:
        waits = self.crew.waits(self.state.alive)
        if waits is None:
            return None
        inputs, stats = frozenset(self.plan.inputs), waits.put_into(self.stats())
        return Observation(stats, unread, inputs, waits.moves, waits.counts)

    def _close_crew(self, timeout: float | None = None) -> None:
        self._events.close()  # first, because the threads joined below may wait for room in this channel
        stuck = self.crew.close(self.state.abandoned, timeout)
        self.state = dataclasses.replace(self.state, abandoned=self.state.abandoned | stuck)
