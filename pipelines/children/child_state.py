"""Keep what the program knows about one child."""

from __future__ import annotations

import collections
import itertools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from flowchan import Channel, ChildDied, Closed, Empty, StageError
from flowchan.pipelines.children.child_links import ChildLinks
from flowchan.run.policy.events import Death

STAGE = "children"
"""Name of the stage whose workers are the children."""


def released() -> Channel[Any]:
    """Return a closed channel that takes the place of channels that are released."""
    channel: Channel[Any] = Channel(1)
    channel.close()
    return channel


class Alive:
    """Number of children that have not ended. The channel of reports closes after the last one."""

    def __init__(self, count: int, reports: Channel[Any]) -> None:
        self._ends = itertools.count(1)
        self._count, self._reports = count, reports
        self._changed = threading.Condition()

    def one_ended(self) -> None:
        if next(self._ends) == self._count:
            self._reports.close()
            self._reports = released()
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[], bool], until: float | None) -> None:
        """Wait until the condition holds, which only an end of a child may change, or the deadline passes."""
        with self._changed:
            self._changed.wait_for(condition, remaining(until))


class ChildState:
    """State of one child in the program that started it.

    Invariants. ``ended`` is set before the channels are closed. A caller that finds a channel closed
    therefore also finds the reason. A child ends only once: the first outcome counts.

    Attributes:
        links: Channels of the child.
        host: Name of its host.
        pid: Its process id; 0 until ``greeted`` is set.
        greeted: Set when the process id is known or the child has ended.
        has_program: True if ``run`` has sent a program.
        ended: Set when the child has ended in any way.
        alive: Count of the children of the same start.
        owner: Process id of the program that started the child.
        value: Return value of its program.
    """

    def __init__(self, links: ChildLinks, alive: Alive) -> None:
        self.links, self.host, self.pid = links, "", 0
        self.owner = os.getpid()
        self.greeted, self.ended = threading.Event(), threading.Event()
        self.has_program = self.closing = False
        self.value: Any = None
        self.alive = alive
        self._why: Callable[[str], Exception] | None = None
        self._outcome = threading.Lock()
        self._unread: collections.deque[Any] = collections.deque()  # received, but not returned to a caller
        self._joining = threading.Lock()
        self._joins = itertools.count(1)
        self._unmet = False  # True if a message of an earlier join may be left

    @property
    def number(self) -> int:
        """Number of the child."""
        return self.links.number

    def is_ours(self) -> bool:
        """Return False in a fork of the program that started the child."""
        return self.owner == os.getpid()

    # --- how the child ends ---

    def end(self, why: Callable[[str], Exception] | None = None, value: Any = None) -> None:
        """Record that the child has ended. ``why`` makes the error for a call, given the call's name."""
        with self._outcome:
            if self.ended.is_set():
                return
            if not self.closing:
                self._why, self.value = why, value
            self.ended.set()
        self.greeted.set()
        self.links.close()
        self.alive.one_ended()

    def died(self, death: Death) -> None:
        """Record that the child's process has died."""
        code, pid, number = death.exitcode, death.pid or self.pid, self.number
        where = f"pid {pid or 'unknown'}" + (f", host {death.host!r}" if death.host else "")

        def why(call: str) -> ChildDied:
            return ChildDied(
                f"{call}: child {number} ({where}) {death.how}",
                number=number,
                host=death.host,
                pid=pid,
                signal=-code if code is not None and code < 0 else None,
                exitcode=None if code is None or code < 0 else code,
            )

        self.end(why)

    def failed(self, error: BaseException) -> None:
        """Record that the child's function has raised an exception."""

        def why(call: str) -> StageError:
            text = f"{call}: child {self.number} failed: {type(error).__name__}: {error}"
            found = StageError(text, stage=STAGE, worker=f"child {self.number}")
            found.__cause__ = error
            return found

        self.end(why)

    def begin_close(self) -> None:
        """Close the channels, because the program closes the child or the run ends."""
        with self._outcome:
            if self.ended.is_set() or self.closing:
                return
            self._why, self.closing = self._was_closed, True
        self.links.close()

    def release(self) -> None:
        """Release the channels of a child that has ended, with the values that were not received."""
        self._unread.clear()
        self.links = ChildLinks(self.number, self.links.speed, *[released()] * 5)

    def _was_closed(self, call: str) -> Closed:
        return Closed(f"{call}: child {self.number} was closed")

    def failure(self, call: str) -> Exception | None:
        """Return the error for a call to a child that has ended; None if its function has returned."""
        return None if self._why is None else self._why(call)

    def gone(self, call: str) -> Exception:
        """Return the error for a call that needs a child that has ended."""
        return self.failure(call) or Closed(f"{call}: child {self.number} has ended")

    # --- values ---

    def put(self, value: Any, until: float | None) -> None:
        self.links.down.put(value, remaining(until))

    def get(self, until: float | None) -> Any:
        return self._unread.popleft() if self._unread else self.links.up.get(remaining(until))

    def give_back(self, value: Any) -> None:
        """Make this value the next one, because the call that received it did not return it."""
        self._unread.appendleft(value)

    # --- rendezvous ---

    def begin_join(self, until: float | None) -> bool:
        """Let one join at a time meet this child. Return False if another one lasts too long."""
        wait = remaining(until)
        return self._joining.acquire(timeout=-1 if wait is None else wait)

    def ask(self, message: Any) -> int:
        """Put the message of a join, and return its number."""
        if self._unmet:
            self._withdraw()
        self._unmet, number = True, next(self._joins)
        self.links.joins.put((number, message))
        return number

    def answered(self, number: int, until: float | None) -> None:
        """Wait until the child has returned from ``pause`` with this message."""
        while self.links.answers.get(remaining(until)) != number:
            pass  # the answer to a message that could not be withdrawn
        self._unmet = False

    def end_join(self) -> None:
        if self._unmet:
            self._withdraw()
        self._joining.release()

    def _withdraw(self) -> None:
        """Take back a message that the child has not read, because its join has failed."""
        try:
            while True:
                self.links.joins.get_nowait()
        except (Empty, Closed):
            pass


def remaining(until: float | None) -> float | None:
    """Return the seconds until a moment on the monotonic clock, at least 0; None without a limit."""
    return None if until is None else max(0.0, until - time.monotonic())
