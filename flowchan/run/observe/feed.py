"""Pass the events and statistics of a run to subscribers.

All views of a run are subscribers. Views therefore need no access to the supervisor.

Algorithm. One thread serves all subscribers. The thread starts with the first subscriber, and ends when the
last subscriber leaves or the run ends. Without subscribers, an event therefore costs only the test of a flag.
The thread computes statistics only when they are due for some subscriber. Subscribers that are due at the
same time and have the same window receive the same value. Events queue up until the next delivery. A slow
subscriber can therefore delay other subscribers, but never a worker. When the run ends, each subscriber
receives its remaining events and the final statistics.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

from flowchan.run.observe.problems import RecentProblems
from flowchan.run.policy.decisions import Decided, Tick
from flowchan.run.policy.failures import text_of
from flowchan.run.policy.stats import RunStats
from flowchan.transport.interrupts import interrupts_deferred

log = logging.getLogger("flowchan.run")

RECENT_S = 5.0
"""Length of the window that displayed rates and shares cover, in seconds."""
EVENTS_EVERY_S = 0.1
"""Seconds between deliveries of events."""
MOST_EVENTS = 10_000
"""Maximum number of events queued for a slow subscriber. At this limit, the oldest are dropped."""


class Subscription:
    """Subscription to a run's feed, which is active until it is closed.

    It can be used as a context manager.
    """

    def __init__(
        self,
        feed: Feed,
        stats: Callable[[RunStats], object] | None,
        events: Callable[[Any], object] | None,
        every: float,
        window: float | None,
    ) -> None:
        self._feed, self._stats, self._events = feed, stats, events
        self._every, self._window = every, window
        self._kept: deque[Any] = deque(maxlen=MOST_EVENTS)
        self._context = contextvars.copy_context()  # in a notebook, output goes to the cell of this context
        self.due = 0.0 if stats is not None else float("inf")

    def keep(self, event: Any) -> None:
        if self.listens:
            self._kept.append(event)

    @property
    def listens(self) -> bool:
        return self._events is not None

    def serve(self, now: float, stats: Callable[[float | None], RunStats], last: bool = False) -> None:
        """Deliver the queued events, and also the statistics if they are due.

        The last statistics always cover the whole run.
        """
        while self._kept:
            self._call(self._events, self._kept.popleft())
        if self._stats is not None and (last or now >= self.due):
            self.due = now + self._every
            self._call(self._stats, stats(None if last else self._window))

    def _call(self, subscriber: Callable[[Any], object] | None, value: Any) -> None:
        """Call the subscriber. If it raises, end its subscription without affecting the run."""
        if subscriber is None:
            return
        try:
            self._context.run(subscriber, value)
        except Exception as error:
            self._stats = self._events = None
            self.due = float("inf")
            log.warning("a subscriber of a run's feed failed and was removed: %s", text_of(error))

    def close(self) -> None:
        """End the subscription.

        After the end of the run, wait until the subscriber has received the final statistics.
        """
        self._feed._leave(self)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with interrupts_deferred():
            self.close()


class Feed:
    """Passes the events and statistics of one run to subscribers.

    ``stats`` is a weak reference to the function that computes statistics for a window. The run can therefore
    be freed without garbage collection.

    Attributes:
        problems: The run's latest failures, deaths and warnings.
    """

    def __init__(self, name: str, stats: weakref.ref[Callable[[float | None], RunStats]]) -> None:
        self._name, self._ref = name, stats
        # All methods enter this lock directly, not through the condition. Entering the condition would run
        # Python code, in which a signal handler could raise an exception and so leave the lock locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._subscriptions: tuple[Subscription, ...] = ()
        self.problems = RecentProblems()
        self._listeners: tuple[Callable[[Any], object], ...] = (self.problems.record,)
        self._thread: threading.Thread | None = None
        self._over = False
        self._at_end: tuple[Callable[[], object], ...] = ()

    def subscribe(
        self,
        *,
        stats: Callable[[RunStats], object] | None = None,
        events: Callable[[Any], object] | None = None,
        every: float = 1.0,
        window: float | None = RECENT_S,
    ) -> Subscription:
        """Call a subscriber with statistics and events, on the feed's thread.

        Args:
            stats: Receives the statistics of the run, as :class:`~flowchan.RunStats`: immediately, then after
                each interval, and once after the end of the run.
            events: Receives the workers' events and the supervisor's decisions, in order (see
                ``flowchan.run.policy.events``). Events arrive before the statistics that include them.
            every: Seconds between deliveries of statistics (default: 1).
            window: Length in seconds of the window that rates and shares cover; ``None`` for the whole run.
                The last statistics always cover the whole run.

        Returns:
            The subscription. Close it to stop the calls.
        """
        new = Subscription(self, stats, events, every, window)
        with self._lock:
            over = self._over
            if not over:
                self._subscriptions += (new,)
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._serve, name=f"{self._name} feed", daemon=True
                    )
                    self._thread.start()
                self._changed.notify_all()
        if over:
            new.serve(time.monotonic(), self._stats, last=True)
        return new

    def _stats(self, window: float | None) -> RunStats:
        stats = self._ref()
        assert stats is not None  # a subscriber or the supervisor keeps the run alive
        return stats(window)

    def listen(self, listener: Callable[[Any], object]) -> None:
        """Call a listener with each event and each complete decision, on the reporting thread.

        The listener must not raise an exception.
        """
        self._listeners += (listener,)

    def tell(self, event: Any) -> None:
        """Pass an event to the listeners at once, and to the subscribers at the next delivery."""
        for listener in self._listeners:
            listener(event)
        for subscription in self._subscriptions:
            subscription.keep(event)

    def tell_decision(self, decided: Decided) -> None:
        """Pass a decision to the listeners, and its event to the subscribers unless it is a ``Tick``."""
        for listener in self._listeners:
            listener(decided)
        if not isinstance(decided.event, Tick):
            for subscription in self._subscriptions:
                subscription.keep(decided.event)

    def at_end(self, call: Callable[[], object]) -> None:
        """Call a function at the end of the feed, or immediately if the feed has already ended.

        The run's ``wait()`` returns only after the function has returned. If the function raises, log a
        warning.
        """
        with self._lock:
            over = self._over
            if not over:
                self._at_end += (call,)
        if over:
            call()

    def end(self) -> None:
        """End the feed, and return when all subscribers have received the final statistics."""
        with self._lock:
            self._over = True
            thread, calls = self._thread, self._at_end
            self._at_end = ()
            self._changed.notify_all()
        _join(thread)
        for call in calls:
            try:
                call()
            except Exception as error:  # call the other functions anyway, because they release resources
                log.warning("a function could not be called at the end of a run: %s", text_of(error))

    def _leave(self, one: Subscription) -> None:
        with self._lock:
            thread = self._thread
            if not self._over:
                self._subscriptions = tuple(other for other in self._subscriptions if other is not one)
                if self._subscriptions:
                    return
                self._thread = None
                self._changed.notify_all()
        _join(thread)

    def _serve(self) -> None:
        me = threading.current_thread()
        while True:
            with self._lock:
                if self._over or self._thread is not me:
                    break
                served = self._subscriptions
            now, stats = time.monotonic(), functools.cache(self._stats)
            for subscription in served:
                subscription.serve(now, stats)
            with self._lock:
                if not self._over and self._thread is me and served == self._subscriptions:
                    self._changed.wait(max(0.0, self._next(served) - time.monotonic()))
        if self._over:
            stats = functools.cache(self._stats)
            for subscription in self._subscriptions:
                subscription.serve(0.0, stats, last=True)
            self._subscriptions = ()

    def _next(self, served: tuple[Subscription, ...]) -> float:
        """Return the time of the next delivery to a subscriber."""
        listen = any(one.listens for one in served)
        soon = time.monotonic() + (EVENTS_EVERY_S if listen else 60.0)
        return min([soon, *(one.due for one in served)])


def _join(thread: threading.Thread | None) -> None:
    if thread is not None and thread is not threading.current_thread():
        thread.join()
