"""The events that the worker processes of one machine report, in order.

Workers put events into one channel. The thread that watches processes puts ``ProcessEnded`` into the same
channel when a process has ended. Each process puts in its own order, so ``ProcessEnded`` comes after
everything that the worker reported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from flowchan.channel.channel import Channel
from flowchan.errors import Broken, Closed
from flowchan.run.crew.part import Report
from flowchan.run.policy.events import Crashed, Event
from flowchan.run.worker.logs import Logged, log_locally

MOST_EVENTS = 1024


class Mail:
    """The channel of the reports of worker processes, with its reader."""

    def __init__(self) -> None:
        self.channel: Channel[Event | Logged] = Channel(MOST_EVENTS, across="processes")
        self._reader = self.channel.reader()

    def deliver(self, receive: Callable[[Event], None]) -> None:
        """Pass on each event until the mail is closed. Log records go to the program's loggers."""
        for event in self._reader:  # an event counts as unread until it is passed on
            if isinstance(event, Logged):
                log_locally(event)
            else:
                receive(event)

    def is_empty(self) -> bool:
        """Tell whether all reports so far have been passed on."""
        stats = self.channel.stats()
        return stats.inside + stats.leased == 0

    def close(self) -> None:
        """End :meth:`deliver`."""
        self.channel.close()


def run_helper(work: Callable[[], None], report: Callable[[], Report]) -> None:
    """Run ``work`` on a helper thread of a run.

    A failure ends the run, which would wait forever without the helper. ``report`` returns the function that
    takes the run's events at that time.
    """
    try:
        with contextlib.suppress(Closed, Broken):  # the run is over
            work()
    except BaseException as error:
        with contextlib.suppress(Closed):
            report()(Crashed(error))


def run_is_over(event: Event) -> None:
    """Reject an event: the run has ended."""
    raise Closed("the run is over")
