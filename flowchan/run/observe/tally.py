"""Count events of a run, such as retries and deaths, which the counters of its channels do not show."""

from __future__ import annotations

from collections import Counter

from flowchan.run.observe.clocks import WorkerClocks
from flowchan.run.observe.measure import Account
from flowchan.run.policy.events import (
    Answered,
    Began,
    Death,
    Ended,
    ErrorSent,
    Event,
    Failure,
    Retried,
    Started,
    WorkerId,
)
from flowchan.run.policy.transitions import PolicyState


class Tally:
    """Keeps the counts of one run.

    Worker threads report their events on their own threads. The events of other workers arrive on the thread
    of their part of the crew. The supervisor calls all other methods. :meth:`account` copies each table in
    one step.
    """

    def __init__(self) -> None:
        self.last_error = ""
        self._retried: Counter[str] = Counter()
        self._unwanted: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._clocks = WorkerClocks()
        self._pids: dict[WorkerId, int] = {}  # process ids of running processes
        self._warnings: dict[tuple[str, str], str] = {}  # latest warning by stage and topic

    def reported(self, event: Event) -> None:
        """Record an event, on the reporting thread.

        A worker must start its clock on its own thread. This method therefore cannot leave the start to the
        supervisor.
        """
        if isinstance(event, Began):
            self._clocks.begin(event.worker)
        elif isinstance(event, Started):
            self._pids[event.worker] = event.pid
            self._clocks.started(event)
        elif isinstance(event, Ended | Failure):
            self._clocks.update(event.worker)

    def record(self, event: Retried | Answered | ErrorSent) -> None:
        """Record the retry, answer or failure of an item."""
        if isinstance(event, Retried):
            self._retried[event.worker.stage] += 1
        elif isinstance(event, Answered):
            self._refused[event.worker.stage] += event.failed
        else:
            self.last_error = event.text

    def ended(self, worker: WorkerId) -> None:
        """Stop the clock of a worker that has ended."""
        self._clocks.end(worker)
        self._pids.pop(worker, None)

    def ended_early(self, ended: Ended) -> None:
        """Count the items whose outputs had no reader, for a worker that ended early."""
        self._unwanted[ended.worker.stage] += ended.unwanted

    def died(self, death: Death) -> None:
        """Record how a worker died."""
        if death.summary:
            self.last_error = f"worker {death.worker} {death.summary}"

    def warn(self, stage: str, topic: str, text: str) -> None:
        """Keep a warning for the report. It replaces an earlier one about the same stage and topic."""
        self._warnings[stage, topic] = text

    def account(self, state: PolicyState, elapsed: float, now: float) -> Account:
        """Return a copy of the current counts."""
        return Account(
            state,
            max(elapsed, 1e-9),
            Counter(self._retried),
            Counter(self._unwanted),
            self._clocks.until(now),
            dict(self._pids),
            self.last_error,
            Counter(self._refused),
            tuple(self._warnings.copy().values()),
        )
