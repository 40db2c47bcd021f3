"""Log a run to the standard logger ``flowchan.run``.

The log records the start and end of the run, and each worker process that starts, dies or is replaced. The
log also contains warnings about stages, items blamed for deaths, and workers that do not end in time. The
start and end of the run have level INFO, process starts DEBUG, problems WARNING, and blamed items ERROR.
Records about a worker have the attributes ``stage`` and ``number``; records about a stage have ``stage``.
Nothing appears unless the program configures logging. Exceptions that the run raises are not logged.
"""

from __future__ import annotations

import logging
from typing import Any

from flowchan.run.policy import decisions, seeds
from flowchan.run.policy.actions import Terminate
from flowchan.run.policy.decisions import AbortRequested, Decided, StopRequested, Tick
from flowchan.run.policy.events import Death, NotAdded, RunBegan, RunEnded, Started, Warned, WorkerId
from flowchan.run.policy.plan import Plan
from flowchan.run.policy.restart_limit import RESTART_PERIOD_S, uses_restart
from flowchan.run.policy.scaling import ScalingDecision

log = logging.getLogger("flowchan.run")
log.addHandler(logging.NullHandler())


class Journal:
    """Writes the log of one run from the events of its feed.

    No method raises. If one of the program's logging filters raises, ``logging`` reports the error like a
    handler's error.
    """

    def __init__(self, plan: Plan) -> None:
        self._graph = f"graph {plan.graph.name!r}"
        self._limits = plan.limits()

    def record(self, event: Any) -> None:
        """Log an event from the feed, unless events of its kind are not logged."""
        match event:
            case RunBegan(workers, seed):
                self._log(logging.INFO, f"{self._graph} starts with {workers} workers, seed {seed}")
            case Started(worker, pid, host):
                self._log(logging.DEBUG, f"worker {worker} starts as {_where(pid, host)}", worker)
            case Decided():
                self._decided(event)
            case ScalingDecision(_, stage, before, workers, reason):
                text = f"stage {stage!r}: workers {before} → {workers}: {reason}"
                self._log(logging.INFO, text, stage=stage)
            case NotAdded(worker, text):
                self._log(logging.WARNING, text, worker)
            case Warned(stage, text):
                self._log(logging.WARNING, text, stage=stage)
            case RunEnded(state, seconds, stuck):
                for worker in sorted(stuck, key=str):
                    text = f"worker {worker} is still running code that cannot be interrupted"
                    self._log(logging.WARNING, text, worker)
                self._log(logging.INFO, f"{self._graph} is {state} after {seconds:.2f} s")

    def _decided(self, decided: Decided) -> None:
        event, before, after = decided.event, decided.before, decided.after
        if isinstance(event, Death):
            self._died(event, decided)
        elif isinstance(event, StopRequested) and before.phase == "running":
            kept = "the items in flight" if event.finish_queued else "the items that workers are processing"
            self._log(logging.INFO, f"{self._graph} is stopping: {kept} are being finished")
        elif isinstance(event, AbortRequested) and after.phase != before.phase:
            self._log(logging.INFO, f"{self._graph} is aborted")
        elif isinstance(event, Tick) and (before.phase, after.phase) == ("stopping", "aborting"):
            text = "did not end within the timeout of stop(), so it is aborted"
            self._log(logging.WARNING, f"{self._graph} {text}")
        if not after.goes_on:
            for action in decided.actions:
                if isinstance(action, Terminate):
                    self._slow(action)

    def _died(self, death: Death, decided: Decided) -> None:
        before, after, stage = decided.before, decided.after, death.worker.stage
        if not death.summary or not before.goes_on or before.ends_with_peers(death.worker):
            return
        what = f"the process of worker {death.worker} ({_where(death.pid, death.host)}) {death.summary}"
        if after.failures != before.failures:
            what += "; it is not replaced, and the run fails"
        elif uses_restart(death):
            used, limit = len(after.recent_restarts[stage]), self._limits.get(stage, 0)
            what += f"; it is replaced (restart {used} of {limit} in {RESTART_PERIOD_S:g} s)"
        else:
            what += "; it is replaced"
        if death.stack:
            what += f"\nits stack was (most recent call last):\n{death.stack.rstrip()}"
        self._log(logging.WARNING, what, death.worker)

    def _slow(self, ended: Terminate) -> None:
        """Log that a process did not end in time."""
        how = "killed" if ended.force else "terminated"
        waited = decisions.GRACE * (1 + ended.force)
        text = f"worker {ended.worker} did not end within {waited:g} s and is {how}"
        self._log(logging.WARNING, text, ended.worker)

    def _log(self, level: int, text: str, worker: WorkerId | None = None, stage: str = "") -> None:
        about: dict[str, Any] = {"stage": stage} if stage else {}
        if worker is not None:
            about = {"stage": worker.stage, "number": worker.number}
        try:
            log.log(level, text, extra=about)
        except Exception:
            logging.Handler().handleError(log.makeRecord(log.name, level, __file__, 0, text, (), None))


def blamed(item: str, why: str) -> None:
    """Log that an item failed because workers died while they processed the item.

    The worker that holds the item calls this function.
    """
    worker = seeds.worker()
    about = {"stage": worker.stage, "number": worker.number}
    log.error("stage %r gave up on item %s: %s", worker.stage, item, why, extra=about)


def _where(pid: int, host: str) -> str:
    return f"pid {pid}" + (f" on host {host}" if host else "")
