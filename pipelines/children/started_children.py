"""Start children as the workers of one stage, and track how they exit."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flowchan import Channel, Closed, Empty, Failed, Graph, Run, RunError, select
from flowchan.declare.placements import Placement
from flowchan.hosts import Pool
from flowchan.hosts.pool_channels import channel_maker
from flowchan.pipelines.children import parent_handle
from flowchan.pipelines.children.child_links import ChildLinks
from flowchan.pipelines.children.child_state import STAGE, Alive, ChildState, released
from flowchan.pipelines.user_calls import reason
from flowchan.run.policy.decisions import GRACE, Decided, EndWorker
from flowchan.run.policy.events import Death, Failure, WorkerId

WAITING = 64
"""``send`` blocks while this many values in one direction have not been received."""

States = Mapping[int, ChildState]


class StartedChildren:
    """Children that one call of ``start`` has started, and their run.

    Attributes:
        states: State of each child, by number.
        remote: True if the children run on a pool.
        graph: Graph in which the children are a stage.
    """

    def __init__(self, n: int, placement: Placement) -> None:
        self.remote = isinstance(placement, Pool)
        self.states: dict[int, ChildState] = {}
        make = channel_maker(placement)
        channel = make(WAITING * n)
        alive, self._reports = Alive(n, channel), Reports(channel, self.states)
        speeds: Mapping[str, float] = {}
        for number in range(1, n + 1):
            links = ChildLinks(number, 1.0, make(WAITING), make(WAITING), make(2), make(2), channel)
            self.states[number] = ChildState(links, alive)
        if isinstance(placement, Pool):
            speeds, placement = placement.speeds, placement.assigned(placement.dealt(n))
        self.graph = Graph(STAGE)
        places = self.graph.input("program")
        # Fail the item of a child that dies, and never retry it.
        done = places.map(
            parent_handle.child_main, name=STAGE, on=placement, workers=n, ordered=False, max_deaths=1,
            restarts=10**9,
        )  # fmt: skip
        self.graph._address(frozenset({"items"}))  # so that each worker gets its own item
        # These functions must not refer to this object. Otherwise, a reference cycle would keep it alive
        # until the garbage collector runs.
        done.errors.sink(functools.partial(_failed, self.states), name="failures")
        done.sink(functools.partial(_returned, self.states), name="results")
        where = f"{Path(self.graph.where.file).name}:{self.graph.where.line}"
        self.graph._drawn.update(
            {
                "program": f"starts children · {where}",
                STAGE: "one process each",
                "results": None,
                "failures": None,
            }
        )
        self._last_report, self._closing = "", threading.Lock()
        self._run: Run | None = self.graph.start()
        run = self._run
        feed = run._supervisor.feed
        feed.listen(functools.partial(_told, self.states))
        feed.at_end(functools.partial(_over, self.states))
        for planned in run._plan.workers:
            if planned.id.stage == STAGE:
                state = self.states[planned.id.number]
                state.host = planned.host
                state.links = state.links._replace(speed=speeds.get(planned.host, 1.0))
        self._reports.start()
        with contextlib.suppress(Closed):  # if the run has failed, every child has recorded the error
            run[places].put_many((number, state.links) for number, state in self.states.items())
            run[places].close()

    def report(self) -> str:
        """Return the report of the children's run."""
        return self._last_report if self._run is None else self._run.report()

    def print_reports(self) -> None:
        """Write the children's pending output to standard output."""
        self._reports.handle()

    def close_all(self) -> None:
        """Shut down all children."""
        self.close(self.states.values())

    def kill(self) -> None:
        """Kill the processes of all children that are alive, and abort their run."""
        run = self._run
        if run is None:
            return
        for child in self.states.values():
            child.begin_close()
        run.abort()  # before the kill, so that the supervisor replaces no child
        for number in self.states:
            run._supervisor.ask(EndWorker(WorkerId(STAGE, number), force=True))

    def close(self, children: Iterable[ChildState]) -> None:
        """Shut down these children if they are alive, and release their channels.

        Closed channels tell the children to exit. Children that do not exit get SIGTERM, then SIGKILL.
        """
        # A forked process must not end its parent's children.
        children = [child for child in children if child.is_ours()]
        if not children:
            return
        closing = [child for child in children if not child.ended.is_set()]
        for child in closing:
            child.begin_close()
        with self._closing:
            others = any(not (child.ended.is_set() or child.closing) for child in self.states.values())
            if self._run is not None and others:
                self._end_some(self._run, closing)
            elif self._run is not None:
                self._end_run(self._run, abort=bool(closing))
            self.print_reports()
            for child in children:
                child.release()

    def _end_run(self, run: Run, abort: bool) -> None:
        """End the run after all children have exited or been closed, and release its channels."""
        with contextlib.suppress(RunError):  # the calls to the children have raised this error
            if not abort:
                with contextlib.suppress(TimeoutError):
                    run.wait(GRACE)  # the supervisor may still be replacing a dead child
            run.abort()
            run.wait()
        self._reports.end()
        self._last_report, self._run = run.report(), None

    def _end_some(self, run: Run, children: list[ChildState]) -> None:
        for force in (False, True):
            until = time.monotonic() + GRACE
            if all(child.ended.wait(max(0.0, until - time.monotonic())) for child in children):
                return
            for child in children:
                if not child.ended.is_set():
                    run._supervisor.ask(EndWorker(WorkerId(STAGE, child.number), force))
        for child in children:
            child.ended.wait()


class Reports:
    """Prints the output of children on a thread of this program, and records their process IDs."""

    def __init__(self, channel: Channel[tuple[int, int | str]], states: States) -> None:
        self._channel, self._states = channel, states
        # No caller may return while another caller is still printing a report.
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name=f"flowchan {STAGE} reports", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Handle the last reports after all children have exited, and release the channel."""
        self._thread.join()
        self.handle()
        self._channel = released()

    def _serve(self) -> None:
        while not self._channel.drained:
            select(ready=[self._channel])
            self.handle()

    def handle(self) -> None:
        """Handle all reports that have arrived."""
        with self._lock:
            while True:
                try:
                    number, report = self._channel.get_nowait()
                except (Empty, Closed):
                    return
                if isinstance(report, int):
                    self._states[number].pid = report
                    self._states[number].greeted.set()
                elif sys.stdout is not None:
                    with contextlib.suppress(OSError, ValueError):  # standard output may be closed
                        sys.stdout.write(report)
                        sys.stdout.flush()


def _returned(states: States, result: tuple[int, Any]) -> None:
    number, value = result
    states[number].end(value=value)


def _failed(states: States, failed: Failed[Any]) -> None:
    states[failed.item.number].failed(reason(failed.error))


def _told(states: States, told: Any) -> None:
    """Record the deaths and failures of children, on the supervisor's thread."""
    if not isinstance(told, Decided):
        return
    match told.event:
        case Death(WorkerId(stage, number)) as death if stage == STAGE:
            states[number].died(death)
        case Failure(WorkerId(stage, number), error) if stage == STAGE and number in states:
            states[number].failed(error)
    for state in states.values():
        if told.after.phase == "failing" and told.after.failures:
            state.failed(told.after.failures[0].error)
        elif told.after.phase == "aborting":
            state.begin_close()


def _over(states: States) -> None:
    """Record that the remaining children have exited, because their run has ended."""
    for state in states.values():
        state.begin_close()
        state.end()
