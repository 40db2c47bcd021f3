"""Track the state of one child in the program that started it."""

from __future__ import annotations

import collections
import itertools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from flowchan import Channel, ChildDied, Closed, Empty, StageError
from flowchan.channel.latch import Latch
from flowchan.pipelines.children.child_links import ChildLinks
from flowchan.run.policy.events import Death

STAGE = "children"
"""Name of the stage whose workers are the children."""


def released() -> Channel[Any]:
    """Return a closed channel that takes the place of a released channel."""
    channel: Channel[Any] = Channel(1)
    channel.close()
    return channel


class Alive:
    """Number of children that have not exited. The last exit closes the report channel."""

    def __init__(self, count: int, reports: Channel[Any]) -> None:
        self._ends = itertools.count(1)
        self._count, self._reports = count, reports
        self._next_end = Latch()
        self._replacing = threading.Lock()

    def one_ended(self) -> None:
        if next(self._ends) == self._count:
            self._reports.close()
            self._reports = released()
        with self._replacing:  # two exits at the same time must set two different latches
            ended, self._next_end = self._next_end, Latch()
        ended.set()

    def wait_for(self, condition: Callable[[], bool], until: float | None) -> None:
        """Wait until the condition is true or the deadline passes.

        The condition must depend only on which children have exited.
        """
        while True:
            ended = self._next_end  # read this first, so that the check below sees all earlier exits
            if condition() or not ended.wait(remaining(until)):
                return


class ChildState:
    """State of one child in the program that started it.

    Invariants: The reason is recorded before the channels are closed. A caller that finds a closed channel
    therefore also finds the reason. Only the first outcome of a child is recorded.

    Attributes:
        links: Channels of the child.
        host: Name of the child's host.
        pid: Process ID of the child; 0 until ``greeted`` is set.
        greeted: Set when the process ID is known or the child has exited.
        has_program: True if ``run`` has sent a function.
        ended: Set when the child has exited for any reason.
        alive: Count of the running children that the same call started.
        owner: Process ID of the program that started the child.
        value: Return value of the child's function.
    """

    def __init__(self, links: ChildLinks, alive: Alive) -> None:
        self.links, self.host, self.pid = links, "", 0
        self.owner = os.getpid()
        self.greeted, self.ended = Latch(), Latch()
        self.has_program = self.closing = False
        self.value: Any = None
        self.alive = alive
        self._why: Callable[[str], Exception] | None = None
        self._outcome = threading.Lock()
        self._unread: collections.deque[Any] = collections.deque()  # values that no call has returned yet
        self._joining = threading.Lock()
        self._joins = itertools.count(1)
        self._unmet = False  # True if an earlier join may have left a message

    @property
    def number(self) -> int:
        """Number of the child."""
        return self.links.number

    def is_ours(self) -> bool:
        """Return False in a process forked from the program that started the child."""
        return self.owner == os.getpid()

    # --- outcome ---

    def end(self, why: Callable[[str], Exception] | None = None, value: Any = None) -> None:
        """Record that the child has exited. ``why`` maps a call's name to the error that the call raises."""
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
        """Close the channels, because the program is closing the child or the run is ending."""
        with self._outcome:
            if self.ended.is_set() or self.closing:
                return
            self._why, self.closing = self._was_closed, True
        self.links.close()

    def release(self) -> None:
        """Release the channels of a child that has exited, and discard unreceived values."""
        self._unread.clear()
        self.links = ChildLinks(self.number, self.links.speed, *[released()] * 5)

    def _was_closed(self, call: str) -> Closed:
        return Closed(f"{call}: child {self.number} was closed")

    def failure(self, call: str) -> Exception | None:
        """Return the error for a call after the child has exited; None if its function has returned."""
        return None if self._why is None else self._why(call)

    def gone(self, call: str) -> Exception:
        """Return the error for a call that needs a running child, after the child has exited."""
        return self.failure(call) or Closed(f"{call}: child {self.number} has ended")

    # --- values ---

    def put(self, value: Any, until: float | None) -> None:
        self.links.down.put(value, remaining(until))

    def get(self, until: float | None) -> Any:
        return self._unread.popleft() if self._unread else self.links.up.get(remaining(until))

    def give_back(self, value: Any) -> None:
        """Keep a value for the next call, because the call that received the value has failed."""
        self._unread.appendleft(value)

    # --- rendezvous ---

    def begin_join(self, until: float | None) -> bool:
        """Wait until no other join uses this child. Return False if the deadline passes first."""
        wait = remaining(until)
        return self._joining.acquire(timeout=-1 if wait is None else wait)

    def ask(self, message: Any) -> int:
        """Send a join message and return its number."""
        if self._unmet:
            self._withdraw()
        self._unmet, number = True, next(self._joins)
        self.links.joins.put((number, message))
        return number

    def answered(self, number: int, until: float | None) -> None:
        """Wait until ``pause`` in the child has received the message with this number."""
        while self.links.answers.get(remaining(until)) != number:
            pass  # skip the answer to an earlier message that could not be withdrawn
        self._unmet = False

    def end_join(self) -> None:
        if self._unmet:
            self._withdraw()
        self._joining.release()

    def _withdraw(self) -> None:
        """Withdraw the message of a failed join, unless the child has read the message."""
        try:
            while True:
                self.links.joins.get_nowait()
        except (Empty, Closed):
            pass


def remaining(until: float | None) -> float | None:
    """Return the seconds until a deadline on the monotonic clock, at least 0; None without a deadline."""
    return None if until is None else max(0.0, until - time.monotonic())
