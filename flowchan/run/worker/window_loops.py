"""Define the loops of ``window`` and ``join``. Each loop runs on a thread of the program."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, TypeVar

from flowchan.channel.channel import In, Out
from flowchan.channel.select import select
from flowchan.errors import Drained, Empty, LateItem
from flowchan.items.window import Window
from flowchan.run.worker.keyed_call import hashable
from flowchan.run.worker.operator_job import SKIPPED, OperatorJob

T = TypeVar("T")


class ArrivalClock:
    """Clock for times of arrival. The clock follows the system's clock but never goes back.

    If the system's clock is set back, this clock continues at its normal speed, so that open windows still
    end.
    """

    def __init__(self) -> None:
        self._ahead = -math.inf  # difference between this clock and the monotonic clock, in seconds

    def now(self) -> float:
        """Return the current time."""
        # Read the wall clock first, because a pause between the two calls can then only make this clock late.
        wall, steady = time.time(), time.monotonic()
        self._ahead = max(self._ahead, wall - steady)
        return self._ahead + steady


class Clock:
    """Determines the times of one stream's items, and keeps the latest time.

    Args:
        time_of: Function that returns the time of an item in seconds, or None to use the time of arrival.
        arrivals: Clock for times of arrival. Streams whose times are compared must share it.
    """

    def __init__(self, time_of: Callable[[Any], float] | None, arrivals: ArrivalClock) -> None:
        self._time_of = time_of
        self._arrivals = arrivals
        self.latest = -math.inf

    def time_of(self, item: Any) -> float:
        """Return the time of an item."""
        if self._time_of is None:
            return self._arrivals.now()
        seconds = float(self._time_of(item))
        if not math.isfinite(seconds):
            raise ValueError(f"time must return a finite number of seconds, got {seconds}")
        return seconds

    def saw(self, seconds: float) -> None:
        """Record the time of an item."""
        self.latest = max(self.latest, seconds)


class CountWindows:
    """Groups the items of each key into windows of ``size`` items; each ``every``-th item begins one."""

    def __init__(self, size: float, every: float) -> None:
        self._size, self._every = size, every
        self._counts: dict[Hashable, int] = {}
        self._open: dict[Hashable, deque[Window[Any]]] = {}
        self._emitted: dict[Hashable, float] = {}  # end of the last complete window of each key

    def add(self, key: Hashable, item: Any) -> Iterator[Window[Any]]:
        """Add an item, and yield the window that it completes, if there is one."""
        number = self._counts.get(key, 0)
        windows = self._open.setdefault(key, deque())
        if number % self._every == 0:
            windows.append(Window(key, number, number + self._size, []))
        self._counts[key] = number + 1
        for window in windows:
            window.items.append(item)
        if windows[0].end == number + 1:
            self._emitted[key] = windows[0].end
            yield windows.popleft()

    def rest(self) -> Iterator[Window[Any]]:
        """Yield the first open window of each key, unless complete windows contain all of its items."""
        for key, windows in self._open.items():
            if windows and self._emitted.get(key, 0) < self._counts[key]:
                yield windows[0]


class TimeWindows:
    """Groups the items of each key into windows of ``size`` seconds, which begin every ``every`` seconds."""

    def __init__(self, size: float, every: float) -> None:
        self._size, self._every = size, every
        self._open: dict[tuple[float, Hashable], Window[Any]] = {}
        self._ends: list[tuple[float, int, tuple[float, Hashable]]] = []
        self._order = itertools.count()
        self._closed = -math.inf

    def add(self, key: Hashable, item: Any, at: float) -> bool:
        """Add an item to its open windows. Return False if all its windows have been closed."""
        first = math.floor((at - self._size) / self._every) + 1
        last = math.floor(at / self._every)
        starts = [number * self._every for number in range(first, last + 1)]
        added = False
        for start in starts:
            if start + self._size > self._closed:
                self._window(key, start).items.append(item)
                added = True
        return added

    def _window(self, key: Hashable, start: float) -> Window[Any]:
        window = self._open.get((start, key))
        if window is None:
            window = self._open[start, key] = Window(key, start, start + self._size, [])
            heapq.heappush(self._ends, (window.end, next(self._order), (start, key)))
        return window

    def close(self, until: float) -> Iterator[Window[Any]]:
        """Close the windows that end at or before a given time, and yield them in the order of their ends."""
        self._closed = max(self._closed, until)
        while self._ends and self._ends[0][0] <= until:
            yield self._open.pop(heapq.heappop(self._ends)[2])

    @property
    def next_end(self) -> float:
        """Return the earliest end of the open windows, or infinity if no window is open."""
        return self._ends[0][0] if self._ends else math.inf


def window(job: OperatorJob, *, items: In[Any], out: Out[Window[Any]]) -> None:
    """Group the items into windows, and put each window when it is complete."""
    if job.options["seconds"] is None:
        _window_by_count(job, items, out)
    else:
        _window_by_time(job, items, out)


def _window_by_count(job: OperatorJob, items: In[Any], out: Out[Window[Any]]) -> None:
    windows = CountWindows(job.options["size"], job.options["every"])
    key_of = _keys(job.kind, job.options["key"])
    for item in items:
        key = _tried(job, key_of, item)
        if key is not SKIPPED:
            _put_all(out, windows.add(key, item))
        del item
    _put_all(out, windows.rest())


def _window_by_time(job: OperatorJob, items: In[Any], out: Out[Window[Any]]) -> None:
    options, arrives = job.options, job.options["time"] is None
    windows, arrivals = TimeWindows(options["seconds"], options["every"]), ArrivalClock()
    clock = Clock(options["time"], arrivals)
    keys, lateness = _keys(job.kind, options["key"]), options["allowed_lateness"]

    def key_and_time(item: Any) -> tuple[Hashable, float]:
        return keys(item), clock.time_of(item)

    while True:
        waits = arrives and windows.next_end < math.inf
        try:
            item = items.get(max(0.0, windows.next_end - arrivals.now()) if waits else None)
        except Empty:
            _put_all(out, windows.close(arrivals.now()))
            continue
        except Drained:
            break
        found = _tried(job, key_and_time, item)
        if found is SKIPPED:
            continue
        key, at = found
        if arrives:
            _put_all(out, windows.close(at))
        clock.saw(at)
        if not windows.add(key, item, at):
            _late(job, item, clock.latest - at)
        elif not arrives:
            _put_all(out, windows.close(clock.latest - lateness))
        del item, found
    _put_all(out, windows.close(math.inf))


def _late(job: OperatorJob, item: Any, seconds: float) -> None:
    lateness = job.options["allowed_lateness"]
    job.give_up(
        item,
        LateItem(
            f"{job.kind}: the item is {seconds:g} s behind the latest item, but allowed_lateness "
            f"is {lateness:g} s; increase allowed_lateness, or read the errors stream"
        ),
    )


def _keys(kind: str, key: Callable[[Any], Hashable] | None) -> Callable[[Any], Hashable]:
    """Return a checked key function. If ``key`` is None, all items have the key None."""
    return lambda item: None if key is None else hashable(key(item), kind)


def _tried(job: OperatorJob, call: Callable[[Any], T], item: Any) -> T | Any:
    """Return the result of a call, or SKIPPED if the item finally failed."""
    try:
        return call(item)
    except BaseException as error:
        return job.recover(call, item, error)


def _put_all(out: Out[Any], outputs: Iterator[Any]) -> None:
    for output in outputs:
        out.put(output)
        del output


class _Side(Generic[T]):
    """Keeps the items of one input of a join, by key and in the order of their times."""

    def __init__(self, reader: In[T], key: Callable[[Any], Hashable], clock: Clock) -> None:
        self.reader, self.clock = reader, clock
        self._key = _keys("join", key)
        self._by_key: dict[Hashable, list[tuple[float, T]]] = {}
        self._times: list[tuple[float, int, Hashable]] = []
        self._order = itertools.count()

    @property
    def latest(self) -> float:
        """Return the latest time of the items, or infinity if no more items can arrive."""
        channel = self.reader.channel
        return math.inf if channel.closed and not len(channel) else self.clock.latest

    def key_and_time(self, item: Any) -> tuple[Hashable, float]:
        return self._key(item), self.clock.time_of(item)

    def keep(self, key: Hashable, at: float, item: T) -> None:
        self._by_key.setdefault(key, []).append((at, item))
        heapq.heappush(self._times, (at, next(self._order), key))

    def near(self, key: Hashable, at: float, within: float) -> Iterator[T]:
        """Yield the items of a key whose times differ from ``at`` by at most ``within`` seconds."""
        for other, item in self._by_key.get(key, ()):
            if abs(other - at) <= within:
                yield item

    def drop_before(self, until: float) -> None:
        """Drop the items that are older than a given time."""
        while self._times and self._times[0][0] < until:
            key = heapq.heappop(self._times)[2]
            left = [pair for pair in self._by_key.pop(key, ()) if pair[0] >= until]
            if left:
                self._by_key[key] = left


def join(job: OperatorJob, *, left: In[Any], right: In[Any], out: Out[tuple[Any, Any]]) -> None:
    """Put pairs of items, one from each input, whose keys are equal and whose times are close."""
    options, within, lateness = job.options, job.options["within"], job.options["allowed_lateness"]
    arrivals = ArrivalClock()
    sides = (
        _Side(left, options["key"], Clock(options["time"], arrivals)),
        _Side(right, options["other_key"], Clock(options["other_time"], arrivals)),
    )
    # Items before this time may have been dropped, so an older item could miss partners and counts as late.
    closed = -math.inf
    while True:
        try:
            selected = select([left, right])
        except Drained:
            return
        item, is_left = selected.item, selected.channel is left
        own, other = sides if is_left else sides[::-1]
        found = _tried(job, own.key_and_time, item)
        if found is not SKIPPED:
            key, at = found
            if at < closed:
                _late(job, item, closed + lateness - at)
            else:
                own.clock.saw(at)
                own.keep(key, at, item)
                partners = other.near(key, at, within)
                _put_all(out, ((item, one) if is_left else (one, item) for one in partners))
                closed = max(closed, min(own.latest, other.latest) - lateness)
                own.drop_before(closed - within)
                other.drop_before(closed - within)
        del selected, item, found
