"""Provide a work queue: one owner puts questions, and many workers take the questions and put answers.

The queue consists of two channels. The owner is the thread that created the queue; every other thread, in any
process, is a worker. Each call uses one of the two channels, depending on the calling thread. Only the
question channel is bounded. A worker therefore never blocks when it puts an answer, and the two sides cannot
deadlock. The number of unread answers is limited by the number of questions that the owner has put.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.util import Finalize
from typing import Any

from flowchan import Broken, Channel, Closed, Drained, Empty, Full, In
from flowchan.channel.transports import TRANSPORTS, Across
from flowchan.items.arguments import refuses_misspelt
from flowchan.pipelines.channel_backed import Shared
from flowchan.pipelines.registry import claim, find, naming
from flowchan.public import public

POLL_INTERVAL_S = 0.1
"""Seconds between two checks while the owner waits for the last answers."""

ANSWERS = {"threads": 10**12, "processes": 10**7, "hosts": 10**7}
"""Maximum number of unread answers: so large that memory runs out first.

Between processes, the number is smaller, because each slot costs 256 bytes of address space.
"""

OWNER_TIMEOUT_S = 10.0
"""Maximum seconds between the claim of a name and the publication of its queue.

A creator needs only microseconds for this, so one that takes longer has probably died.
"""


@public
class WorkQueue:
    """Queue for one owner's questions and many workers' answers, returned by :func:`workqueue`.

    Attributes:
        creator: True if this handle created the queue, False if it opened an existing one.

    Example:
        >>> from flowchan.pipelines import map, workqueue
        >>> def answer(queue, worker):
        ...     for question in queue:
        ...         queue.put(question * 10)
        >>> queue = workqueue()
        >>> workers = map(3, answer, queue)
        >>> queue.put_many([1, 2, 3])
        >>> queue.drain()
        >>> sorted([queue.get(), queue.get_nowait(), queue.get(timeout=1)])
        [10, 20, 30]
        >>> queue.close()
    """

    def __init__(self, sides: _SharedQueue, creator: bool) -> None:
        self._sides = sides
        self.creator = creator

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self._sides, self._sides.name)

    @property
    def name(self) -> str | None:
        """Return the name of the queue, or ``None``."""
        return self._sides.name

    @property
    def is_owner(self) -> bool:
        """Return True if the calling thread is the owner."""
        return self._sides.is_owner

    def put(self, item: Any, timeout: float | None = None) -> None:
        """Put a question as the owner, or an answer as a worker.

        Args:
            item: Any value that the queue's channels accept.
            timeout: Maximum seconds that the owner waits while the queue already holds ``capacity`` questions
                (default: no limit).

        Raises:
            Closed: The queue is closed.
            Full: ``timeout`` expired.
        """
        self._sides.ask(item, timeout) if self.is_owner else self._sides.answer(item, timeout)

    def put_many(self, items: Iterable[Any]) -> None:
        """Put several items, one after another.

        Args:
            items: Iterable of questions or answers.

        Raises:
            Closed: The queue is closed.
        """
        for item in items:
            self.put(item)

    def get(self, timeout: float | None = None) -> Any:
        """Get an answer as the owner, or a question as a worker.

        A worker finishes its question when it gets the next one, calls :meth:`close`, or ends after it has
        put an answer. If the worker ends or dies earlier, another worker gets the question.

        Args:
            timeout: Maximum seconds to wait (default: no limit).

        Returns:
            The answer or question.

        Raises:
            Drained: The queue is closed, and all questions are finished. For the owner, this also means that
                all answers have been read.
            Empty: ``timeout`` expired.
        """
        return self._sides.next_answer(timeout) if self.is_owner else self._sides.next_question(timeout)

    def get_nowait(self) -> Any:
        """Get the next item if one is available now.

        Returns:
            The answer or question.

        Raises:
            Empty: No item is available.
            Drained: The queue is closed and contains no more items for the caller.
        """
        return self.get(timeout=0)

    def __iter__(self) -> Iterator[Any]:
        """Yield the results of :meth:`get` until :meth:`get` raises ``Drained``.

        For a worker, iteration ends when the owner has closed the queue and all questions are finished. For
        the owner, it ends when the owner has also read all answers.
        """
        while True:
            try:
                item = self.get()
            except Drained:
                return
            yield item

    def drain(self, timeout: float | None = None) -> None:
        """Wait until every question has been answered. Afterwards, :meth:`get` still returns the answers.

        Only the owner may call this method, and each question must get exactly one answer.

        Args:
            timeout: Maximum seconds to wait (default: no limit).

        Raises:
            RuntimeError: The calling thread is not the owner.
            Empty: ``timeout`` expired.
        """
        if not self.is_owner:
            raise RuntimeError(
                "drain: the caller must be the owner of the work queue, which is the thread that created it"
            )
        self._sides.drain(timeout)

    def close(self) -> None:
        """Close the queue as the owner, or finish the current question as a worker.

        After the owner closes the queue, workers still answer the remaining questions, and the owner can read
        the answers. Further calls have no effect.
        """
        if self.is_owner:
            self._sides.channels[0].close()
        else:
            self._sides.leave()

    def __repr__(self) -> str:
        questions, answers = self._sides.channels
        name = "" if self.name is None else f" {self.name!r}"
        return f"<WorkQueue{name}, {len(questions)} questions and {len(answers)} answers inside>"


class _WorkerState:
    """State of one worker: its port, and whether it has answered its question."""

    def __init__(self, port: In[Any], answers: Channel[Any]) -> None:
        self.port = port
        self.answered = [False]
        # If the thread or process ends normally, an answered question is finished. Otherwise, closing the
        # port returns the question to the queue.
        self.leave = Finalize(self, _finish, (port, answers, self.answered), exitpriority=0)


def _finish(port: In[Any], answers: Channel[Any], answered: list[bool]) -> None:
    if answered[0]:
        with contextlib.suppress(Closed, Broken):
            answers.flush()
        port.close()


class _SharedQueue(Shared):
    """State that all handles of one queue share within a process."""

    name: str | None = None
    give_up_name: Callable[[], object] = staticmethod(lambda: None)
    _owner: tuple[int, threading.Thread] | None = None

    def make(self, name: str | None, capacity: int, across: Across) -> None:
        self.name = name
        self._owner = os.getpid(), threading.current_thread()
        self._open((Channel(capacity, across=across), Channel(ANSWERS[across], across=across)))
        # Keep the queue open when its last worker leaves, because another worker may join.
        self._keep_open = self.channels[0].reader()

    def _renew(self) -> None:
        self._worker = threading.local()
        self._kept: deque[Any] = deque()  # answers that drain() received and the owner has not read
        self._requested = self._received = 0

    def claim_name(self, name: str) -> bool:
        claimed = claim(name, WorkQueue(self, creator=True))
        if claimed is not None:
            self.give_up_name = weakref.finalize(self, claimed.close)
        return claimed is not None

    @property
    def is_local(self) -> bool:
        """True if this process created the queue."""
        return self._owner is not None and self._owner[0] == os.getpid()

    @property
    def is_owner(self) -> bool:
        return self._owner is not None and self._owner == (os.getpid(), threading.current_thread())

    # --- Owner ---

    def ask(self, item: Any, timeout: float | None) -> None:
        self.channels[0].put(item, timeout=timeout)
        self._requested += 1

    def next_answer(self, timeout: float | None) -> Any:
        return self._kept.popleft() if self._kept else self._receive(timeout)

    def drain(self, timeout: float | None) -> None:
        deadline = _deadline(timeout)
        while self._received < self._requested:
            self._kept.append(self._receive(_remaining(deadline)))

    def _receive(self, timeout: float | None) -> Any:
        questions, answers = self.channels
        deadline = _deadline(timeout)
        while True:
            remaining = _remaining(deadline)
            if questions.closed:  # the last worker may leave without answering
                if questions.drained and len(answers) == 0:
                    answers.close()
                remaining = POLL_INTERVAL_S if remaining is None else min(remaining, POLL_INTERVAL_S)
            try:
                item = answers.get(timeout=remaining)
            except Empty:
                if deadline is not None and time.monotonic() >= deadline:
                    raise
                continue
            self._received += 1
            return item

    # --- Worker ---

    def next_question(self, timeout: float | None) -> Any:
        state = self._state()
        if state is None:
            state = self._worker.state = _WorkerState(self.channels[0].reader(), self.channels[1])
        deadline = _deadline(timeout)
        if state.answered[0]:  # get() finishes the question, so its answer must reach the owner first
            try:
                self.channels[1].flush(timeout)
            except Full as error:
                raise Empty(f"an answer did not reach the queue's owner within {timeout:g} s") from error
        try:
            item = state.port.get(timeout=_remaining(deadline))
        except Drained:  # all questions are finished, so all answers are already in the channel
            self.channels[1].close()
            raise
        state.answered[0] = False
        return item

    def answer(self, item: Any, timeout: float | None) -> None:
        self.channels[1].put(item, timeout=timeout)
        state = self._state()
        if state is not None:
            state.answered[0] = True

    def leave(self) -> None:
        state = self._state()
        if state is not None:
            state.answered[0] = True
            state.leave()
            del self._worker.state

    def _state(self) -> _WorkerState | None:
        return getattr(self._worker, "state", None)


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def _remaining(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


# Named queues that this process created and that still exist.
_named: weakref.WeakValueDictionary[str, _SharedQueue] = weakref.WeakValueDictionary()


def _arrive(sides: _SharedQueue, name: str | None) -> WorkQueue:
    sides.name = name
    return WorkQueue(sides, creator=False)


@public
@refuses_misspelt("workqueue")
def workqueue(name: str | None = None, capacity: int = 64, across: Across = "threads") -> WorkQueue:
    """Create a work queue, or open the existing queue with this name.

    The first caller with a name creates the queue and owns it. Later callers open the queue as workers. The
    name stays taken while the creating process has a handle of the queue, even after the queue is closed. A
    late worker therefore sees a closed queue. If the owner calls this function again after closing the queue,
    the call creates a new queue.

    Args:
        name: Name of the queue. Without a name, the queue is always new.
        capacity: Maximum number of questions that wait for a worker (default: 64). The number of waiting
            answers is not limited. Only the value that the creator passes has an effect.
        across: ``"threads"`` (default): the name is valid in this process. ``"processes"``: the name is valid
            in all processes of the program, and the queue can be sent to them. ``"hosts"``: the queue can
            also be sent to other hosts, where the name is not valid.

    Returns:
        The queue, whose attribute ``creator`` is True if this call created it.

    Raises:
        TimeoutError: Another process has claimed the name, but did not publish its queue within 10 seconds.

    Example:
        >>> from flowchan.pipelines import map, workqueue
        >>> def answer(queue, worker):
        ...     for question in queue:
        ...         queue.put(question * 10)
        >>> queue = workqueue(capacity=8)
        >>> workers = map(3, answer, queue)
        >>> queue.put_many([1, 2, 3])
        >>> queue.close()
        >>> sorted(queue)
        [10, 20, 30]
    """
    sides = _SharedQueue()
    if name is None:
        sides.make(name, capacity, across)
        return WorkQueue(sides, creator=True)
    with naming:
        known = _named.get(name)
        if known is not None and known.is_local:
            if not (known.is_owner and known.channels[0].closed):
                return WorkQueue(known, creator=False)
            known.give_up_name()
        give_up = time.monotonic() + OWNER_TIMEOUT_S
        while True:
            opened = find(name)
            if isinstance(opened, WorkQueue):
                return opened
            if sides.name is None:
                sides.make(name, capacity, across)
            if not TRANSPORTS[across].copies or sides.claim_name(name):
                _named[name] = sides
                return WorkQueue(sides, creator=True)
            if time.monotonic() > give_up:
                raise TimeoutError(
                    f"workqueue: another process claimed the name {name!r}, but did not publish its queue "
                    "in time"
                )
            time.sleep(0.001)
