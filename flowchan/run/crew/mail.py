"""Deliver the events from worker processes on this machine, in order.

All workers put their events into one channel. When a process has ended, the watching thread puts
``ProcessEnded`` into the same channel, so this event follows everything that the worker reported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from flowchan.channel.channel import Channel
from flowchan.errors import Closed
from flowchan.run.crew.part import Report
from flowchan.run.policy.events import Crashed, Event
from flowchan.run.worker.logs import Logged, log_locally

MOST_EVENTS = 1024


class Mail:
    """Channel that carries the reports of worker processes, with its reader."""

    def __init__(self) -> None:
        self.channel: Channel[Event | Logged] = Channel(MOST_EVENTS, across="processes")
        self._reader = self.channel.reader()

    def deliver(self, receive: Callable[[Event], None]) -> None:
        """Pass on every event until the mail is closed. Pass log records to the program's loggers."""
        for event in self._reader:  # an event stays leased while it is passed on, so is_empty() counts it
            if isinstance(event, Logged):
                log_locally(event)
            else:
                receive(event)

    def is_empty(self) -> bool:
        """Return whether all reports that were sent so far have been passed on."""
        stats = self.channel.stats()
        return stats.inside + stats.leased == 0

    def close(self) -> None:
        """Let :meth:`deliver` pass on the remaining events and return."""
        self.channel.close()


def run_helper(work: Callable[[], None], report: Callable[[], Report]) -> None:
    """Run ``work`` on a helper thread of the run.

    If ``work`` raises, let the run fail, because the run would otherwise wait forever. This includes
    ``Broken``, because the workers' reports no longer arrive through a broken channel. ``report`` returns the
    function that currently receives the run's events.
    """
    try:
        with contextlib.suppress(Closed):  # raised after the end of the run
            work()
    except BaseException as error:
        with contextlib.suppress(Closed):
            report()(Crashed(error))


def run_is_over(event: Event) -> None:
    """Raise ``Closed`` to reject an event, because the run has ended."""
    raise Closed("the run has ended")
