"""Log the events of a run with the standard ``logging``, under the logger ``flowchan.run``.

The log covers the start and end of the run, and worker processes that start, die or are replaced. It also
covers blamed items and workers that do not end in time. Start and end are INFO, starts of processes DEBUG,
problems WARNING, and blamed items ERROR. Records about a worker have its ``stage`` and ``number``. Nothing is
shown unless the program configures logging. Exceptions that the run raises at its end are not logged.
"""

from __future__ import annotations

import logging
from typing import Any

from flowchan.run.policy import decisions, seeds
from flowchan.run.policy.decisions import (
    AbortAsked,
    Died,
    PolicyState,
    StopAsked,
    SupervisorEvent,
    Terminate,
    Tick,
)
from flowchan.run.policy.events import Started, WorkerId
from flowchan.run.policy.failures import text_of
from flowchan.run.policy.plan import Plan

log = logging.getLogger("flowchan.run")
log.addHandler(logging.NullHandler())


class Journal:
    """Journal of one run.

    It never raises: an exception from a filter of the program is shown like one from a handler.
    """

    def __init__(self, plan: Plan) -> None:
        self._graph = f"graph {plan.graph.name!r}"
        self._limits = plan.limits()
        self._workers = len(plan.workers)
        self._seed = plan.seed

    def begins(self) -> None:
        """Log the start of the run."""
        self._log(logging.INFO, f"{self._graph} begins with {self._workers} workers, seed {self._seed}")

    def started(self, event: Started) -> None:
        """Log the start of a worker's process."""
        self._log(
            logging.DEBUG, f"worker {event.worker} starts as {_where(event.pid, event.host)}", event.worker
        )

    def decided(self, event: SupervisorEvent, before: PolicyState, after: PolicyState) -> None:
        """Log the supervisor's decision about an event."""
        if isinstance(event, Died):
            self._died(event, before, after)
        elif isinstance(event, StopAsked) and before.phase == "running":
            self._log(logging.INFO, f"{self._graph} stops; items in flight are finished")
        elif isinstance(event, AbortAsked) and after.phase != before.phase:
            self._log(logging.INFO, f"{self._graph} is broken off")
        elif isinstance(event, Tick) and (before.phase, after.phase) == ("stopping", "aborting"):
            text = f"was stopped, and no item has moved for {decisions.STOP_SECONDS:g} s"
            self._log(logging.WARNING, f"{self._graph} {text}: it is broken off")

    def _died(self, died: Died, before: PolicyState, after: PolicyState) -> None:
        stage, failure = died.worker.stage, died.failure
        if not died.how or before.phase not in ("running", "stopping"):
            return
        what = f"the process of worker {died.worker} ({_where(failure.pid, failure.host)}) {died.how}"
        if after.failures != before.failures:
            what += "; it is not replaced, and the run fails"
        elif died.counts:
            what += f"; it is replaced, restart {after.restarts[stage]} of {self._limits.get(stage, 0)}"
        else:
            what += "; it is replaced"
        self._log(logging.WARNING, what, died.worker)

    def not_added(self, worker: WorkerId, error: BaseException) -> str:
        """Log that another worker of a stage could not be started, and return the text."""
        text = f"worker {worker} could not be added: {text_of(error)}"
        self._log(logging.WARNING, text, worker)
        return text

    def slow(self, ended: Terminate) -> None:
        """Log that the supervisor ends a process that should have ended on its own."""
        how = "killed" if ended.force else "terminated"
        waited = decisions.GRACE * (1 + ended.force)
        self._log(
            logging.WARNING,
            f"worker {ended.worker} has not ended {waited:g} s after it should have, and is {how}",
            ended.worker,
        )

    def ends(self, state: str, seconds: float, stuck: frozenset[WorkerId]) -> None:
        """Log the end of the run and the threads that are ``stuck`` in the user's code."""
        for worker in sorted(stuck, key=str):
            self._log(logging.WARNING, f"worker {worker} still runs code that cannot be interrupted", worker)
        self._log(logging.INFO, f"{self._graph} is {state} after {seconds:.2f} s")

    def _log(self, level: int, text: str, worker: WorkerId | None = None) -> None:
        about: dict[str, Any] = {} if worker is None else {"stage": worker.stage, "number": worker.number}
        try:
            log.log(level, text, extra=about)
        except Exception:
            logging.Handler().handleError(log.makeRecord(log.name, level, __file__, 0, text, (), None))


def blamed(item: str, why: str) -> None:
    """Log that an item failed because workers died with it; called in the worker that has the item."""
    info = seeds.worker()
    about = {"stage": info.stage, "number": info.number}
    log.error("stage %r gave up item %s: %s", info.stage, item, why, extra=about)


def _where(pid: int, host: str) -> str:
    return f"pid {pid}" + (f" on host {host}" if host else "")
