"""Carry out the actions that ``decisions.decide`` returns for a run's workers and channels."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence

from flowchan.run.crew.part import CrewPart
from flowchan.run.crew.run_ports import RunChannels
from flowchan.run.observe.feed import Feed
from flowchan.run.observe.tally import Tally
from flowchan.run.policy.actions import (
    Action,
    DropQueued,
    EndGroup,
    EndServices,
    FormGroup,
    ReleasePorts,
    Replace,
    RestartGang,
    StopSources,
    Terminate,
    Warn,
)
from flowchan.run.policy.decisions import Stuck
from flowchan.run.policy.events import Ended, Failure, NotAdded, Warned, WorkerId
from flowchan.run.policy.failures import text_of
from flowchan.run.policy.scaling import AddWorker, RemoveWorker


class ActionExecutor:
    """Carries out the actions of one run. Only the supervisor's thread calls it.

    The methods return the events that the actions caused, so that the supervisor can decide on them next.

    Args:
        crew: Crew that manages the run's workers.
        channels: Channels of the run.
        tally: Counts and warnings of the run.
        feed: Feed that reports warnings to subscribers.

    Attributes:
        due: When to start each delayed replacement, on the monotonic clock.
    """

    def __init__(self, crew: CrewPart, channels: RunChannels, tally: Tally, feed: Feed) -> None:
        self._crew, self._channels, self._tally, self._feed = crew, channels, tally, feed
        self.due: dict[WorkerId, float] = {}

    def carry_out(self, action: Action, goes_on: bool) -> Iterable[Failure | Ended | Stuck]:
        """Carry out any action except ``BreakChannels``. ``goes_on`` is false if the run is ending."""
        match action:
            case StopSources():
                self._channels.stop_sources()
            case EndServices():
                self._channels.end_services()
            case DropQueued():
                self._channels.drop_queued()
            case ReleasePorts(worker):
                self._crew.release_ports(worker)
            case Terminate(worker, force):
                self._crew.terminate(worker, force)
            case Replace(worker, pause):
                return self._replace((worker,), worker, pause, goes_on)
            case RestartGang(workers, pause, died):
                return self._replace(workers, died, pause, goes_on)
            case EndGroup(stage):
                self._crew.end_group(stage)
            case FormGroup(workers):
                return self._form_group(workers)
            case AddWorker(worker):
                return self._add(worker)
            case RemoveWorker(worker):
                self._crew.remove(worker)
            case Warn(stage, topic, text):
                self._tally.warn(stage, topic, text)
                self._feed.tell(Warned(stage, text))
        return ()

    def _replace(
        self, workers: Sequence[WorkerId], blamed: WorkerId | None, pause: float, goes_on: bool
    ) -> Sequence[Failure | Ended]:
        """Replace dead workers. During a ``pause``, other workers may process the items of the dead ones."""
        later = pause > 0 or not goes_on
        failed = self._crew.replace(workers, blamed, later)
        if later:
            unfailed = {*workers} - {event.worker for event in failed}
            self.due.update(dict.fromkeys((id for id in workers if id in unfailed), time.monotonic() + pause))
        return failed

    def start_due(self, goes_on: bool) -> Iterable[Failure | Ended]:
        """Start the replacements whose pause is over, or cancel all replacements if the run is ending."""
        now = time.monotonic()
        due = [id for id, at in self.due.items() if at <= now or not goes_on]
        for id in due:
            del self.due[id]
        if not due:
            return ()
        return self._crew.start_workers(due) if goes_on else map(Ended, due)

    def _form_group(self, workers: Sequence[WorkerId]) -> Iterable[Stuck]:
        try:
            self._crew.form_group(workers)
        except OSError as error:
            return (Stuck(Failure(workers[0], error, None, os.getpid())),)
        return ()

    def _add(self, worker: WorkerId) -> Iterable[Ended]:
        """Start an additional worker. If that fails, the run continues without it."""
        try:
            self._crew.add(worker)
        except Exception as error:
            text = f"worker {worker} could not be added: {text_of(error)}"
            self._tally.last_error = text
            self._feed.tell(NotAdded(worker, text))
            return (Ended(worker),)
        return ()
