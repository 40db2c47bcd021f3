"""Facts of a run that its channels do not count. The events of the run update them."""

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
    """The counts of one run.

    Workers on threads report on their own threads, and all others on the thread of their part. The
    supervisor calls the rest. :meth:`account` copies each table in one step.
    """

    def __init__(self) -> None:
        self.last_error = ""
        self._retried: Counter[str] = Counter()
        self._unwanted: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._clocks = WorkerClocks()
        self._pids: dict[WorkerId, int] = {}  # of worker processes that have not ended
        self._warnings: dict[tuple[str, str], str] = {}  # by stage and topic

    def reported(self, event: Event) -> None:
        """Note an event where it is reported: the clock of a worker's thread is there only then."""
        if isinstance(event, Began):
            self._clocks.begin(event.worker)
        elif isinstance(event, Started):
            self._pids[event.worker] = event.pid
            self._clocks.started(event)
        elif isinstance(event, Ended | Failure):
            self._clocks.update(event.worker)

    def record(self, event: Retried | Answered | ErrorSent) -> None:
        """Note what has become of an item."""
        if isinstance(event, Retried):
            self._retried[event.worker.stage] += 1
        elif isinstance(event, Answered):
            self._refused[event.worker.stage] += event.failed
        else:
            self.last_error = event.text

    def ended(self, worker: WorkerId) -> None:
        """Note that a worker works no longer."""
        self._clocks.end(worker)
        self._pids.pop(worker, None)

    def ended_early(self, ended: Ended) -> None:
        """Note the items of a worker that had no reader."""
        self._unwanted[ended.worker.stage] += ended.unwanted

    def died(self, death: Death) -> None:
        """Note how a worker died."""
        if death.summary:
            self.last_error = f"worker {death.worker} {death.summary}"

    def warn(self, stage: str, topic: str, text: str) -> None:
        """Keep the last warning about a topic of a stage for the report."""
        self._warnings[stage, topic] = text

    def account(self, state: PolicyState, elapsed: float, now: float) -> Account:
        """Give the counts at this moment."""
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
