"""A work queue: one owner puts questions, many workers take them and put answers, over one object.

The queue is two channels. Who calls decides which one is meant: the owner is the thread that made the queue,
every other thread, of any process, is a worker. Nobody can stand still because both directions are full: only
the questions are bounded. So workers go on whatever the owner waits for (a place for a question, the end of a
worker, something else), and what bounds the answers is what the owner asks for.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.util import Finalize
from typing import Any

from flowchan import Channel, Drained, Empty, In
from flowchan.channel.transports import TRANSPORTS, Across
from flowchan.items.arguments import refuses_misspelt
from flowchan.pipelines.channel_backed import Shared
from flowchan.pipelines.registry import claim, find, naming

POLL_INTERVAL_S = 0.1
"""Seconds between two looks of an owner that waits for the last answers."""

ANSWERS = {"threads": 10**12, "processes": 10**7, "hosts": 10**7}
"""Answers that may wait for the owner: more than memory holds. Between processes each place costs 256 bytes
of address space, hence the smaller number."""

OWNER_TIMEOUT_S = 10.0
"""Seconds for which a name may be taken before it can be found: the maker needs microseconds, unless it is
stopped."""


class WorkQueue:
    """The handle that :func:`workqueue` gives. ``creator``: whether this handle made the queue or opened
    it."""

    def __init__(self, sides: _Sides, creator: bool) -> None:
        self._sides = sides
        self.creator = creator

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self._sides, self._sides.name)

    @property
    def name(self) -> str | None:
        """The name it was made with."""
        return self._sides.name

    @property
    def is_owner(self) -> bool:
        """Whether the calling thread is the owner."""
        return self._sides.is_owner

    def put(self, item: Any, timeout: float | None = None) -> None:
        """The owner puts a question, and waits while ``capacity`` of them are inside; a worker puts an
        answer. Raises ``Closed`` after :meth:`close`, ``Full`` when ``timeout`` seconds are over."""
        self._sides.ask(item, timeout) if self.is_owner else self._sides.answer(item, timeout)

    def put_many(self, items: Iterable[Any]) -> None:
        """Puts all of them, one by one."""
        for item in items:
            self.put(item)

    def get(self, timeout: float | None = None) -> Any:
        """The owner gets an answer, a worker a question. Raises ``Drained`` at the end, ``Empty`` when
        ``timeout`` seconds are over.

        A question that a worker got is finished when that worker asks for the next one, calls :meth:`close`,
        or ends after an answer. If it ends or is killed before, another worker gets the question.
        """
        return self._sides.next_answer(timeout) if self.is_owner else self._sides.next_question(timeout)

    def get_nowait(self) -> Any:
        """As :meth:`get`; raises ``Empty`` when there is nothing now."""
        return self.get(timeout=0)

    def __iter__(self) -> Iterator[Any]:
        """What :meth:`get` gives, until the end: for a worker when the owner has closed the queue and all
        questions are finished, for the owner when it has all answers besides."""
        while True:
            try:
                item = self.get()
            except Drained:
                return
            yield item

    def drain(self, timeout: float | None = None) -> None:
        """Waits until there is an answer to every question, and keeps the answers for :meth:`get`. The owner
        may call it, where workers give one answer to each question. Raises ``Empty`` when ``timeout`` seconds
        are over."""
        if not self.is_owner:
            raise RuntimeError(
                "drain: only the owner of a work queue, the thread that made it, can wait for its answers"
            )
        self._sides.drain(timeout)

    def close(self) -> None:
        """The owner: no more questions; those inside are still done, and the answers can be read.
        A worker: is done with the question it has. May be called again."""
        if self.is_owner:
            self._sides.channels[0].close()
        else:
            self._sides.leave()

    def __repr__(self) -> str:
        questions, answers = self._sides.channels
        name = "" if self.name is None else f" {self.name!r}"
        return f"<WorkQueue{name}, {len(questions)} questions and {len(answers)} answers inside>"


class _Hand:
    """What one worker holds: its port, and whether it has answered the question it has."""

    def __init__(self, port: In[Any]) -> None:
        self.port = port
        self.answered = [False]
        # When the thread or the process ends in an orderly way, an answered question is finished. Otherwise
        # dropping the port gives it back.
        self.leave = Finalize(self, _finish, (port, self.answered), exitpriority=0)


def _finish(port: In[Any], answered: list[bool]) -> None:
    if answered[0]:
        port.close()


class _Sides(Shared):
    """What all handles of one queue share within a process."""

    name: str | None = None
    give_up_name: Callable[[], object] = staticmethod(lambda: None)
    _owner: tuple[int, threading.Thread] | None = None

    def make(self, name: str | None, capacity: int, across: Across) -> None:
        self.name = name
        self._owner = os.getpid(), threading.current_thread()
        self._open((Channel(capacity, across=across), Channel(ANSWERS[across], across=across)))
        self._stay = self.channels[0].reader()  # the queue outlives its last worker: another may come

    def _renew(self) -> None:
        self._worker = threading.local()
        self._kept: deque[Any] = deque()  # answers that drain took in and the owner has not asked for yet
        self._asked = self._received = 0

    def claim_name(self, name: str) -> bool:
        claimed = claim(name, WorkQueue(self, creator=True))
        if claimed is not None:
            self.give_up_name = weakref.finalize(self, claimed.close)
        return claimed is not None

    @property
    def is_at_home(self) -> bool:
        """Whether this is the process that made it."""
        return self._owner is not None and self._owner[0] == os.getpid()

    @property
    def is_owner(self) -> bool:
        return self._owner is not None and self._owner == (os.getpid(), threading.current_thread())

    # --- the owner ---

    def ask(self, item: Any, timeout: float | None) -> None:
        self.channels[0].put(item, timeout=timeout)
        self._asked += 1

    def next_answer(self, timeout: float | None) -> Any:
        return self._kept.popleft() if self._kept else self._receive(timeout)

    def drain(self, timeout: float | None) -> None:
        deadline = _deadline(timeout)
        while self._received < self._asked:
            self._kept.append(self._receive(_left(deadline)))

    def _receive(self, timeout: float | None) -> Any:
        questions, answers = self.channels
        deadline = _deadline(timeout)
        while True:
            left = _left(deadline)
            if questions.closed:  # the last worker may leave without a word
                if questions.drained and len(answers) == 0:
                    answers.close()
                left = POLL_INTERVAL_S if left is None else min(left, POLL_INTERVAL_S)
            try:
                item = answers.get(timeout=left)
            except Empty:
                if deadline is not None and time.monotonic() >= deadline:
                    raise
                continue
            self._received += 1
            return item

    # --- a worker ---

    def next_question(self, timeout: float | None) -> Any:
        hand = self._hand()
        if hand is None:
            hand = self._worker.hand = _Hand(self.channels[0].reader())
        try:
            item = hand.port.get(timeout=timeout)
        except Drained:  # every question is finished, so all answers are there
            self.channels[1].close()
            raise
        hand.answered[0] = False
        return item

    def answer(self, item: Any, timeout: float | None) -> None:
        self.channels[1].put(item, timeout=timeout)
        hand = self._hand()
        if hand is not None:
            hand.answered[0] = True

    def leave(self) -> None:
        hand = self._hand()
        if hand is not None:
            hand.answered[0] = True
            hand.leave()
            del self._worker.hand

    def _hand(self) -> _Hand | None:
        return getattr(self._worker, "hand", None)


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


# The named queues that this process made, as long as it has them.
_named: weakref.WeakValueDictionary[str, _Sides] = weakref.WeakValueDictionary()


def _arrive(sides: _Sides, name: str | None) -> WorkQueue:
    sides.name = name
    return WorkQueue(sides, creator=False)


@refuses_misspelt("workqueue")
def workqueue(name: str | None = None, capacity: int = 64, across: Across = "threads") -> WorkQueue:
    """A work queue. With a ``name``, whoever asks for the name first makes the queue and owns it; every other
    call with it opens that queue as a worker's. The options count for the maker. ``capacity``: how many
    questions may wait for a worker. Answers may wait without number.

    ``across="threads"``: the name holds in this process. ``across="processes"``: it holds in all processes of
    the program, however multiprocessing started them and whichever of them made the queue, and the queue can
    also be sent to them. ``across="hosts"``: it can be sent to other hosts, too, where its name does not
    hold.

    The name belongs to the queue until the process that made it has no handle of it any more, so that a
    worker that comes late finds it closed. Its owner, when it has closed the queue, makes a new one with the
    name. Raises ``TimeoutError`` when the process that has the name does not say where its queue is.
    """
    sides = _Sides()
    if name is None:
        sides.make(name, capacity, across)
        return WorkQueue(sides, creator=True)
    with naming:
        known = _named.get(name)
        if known is not None and known.is_at_home:
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
                    f"workqueue: a process has the name {name!r} and does not say where its queue is"
                )
            time.sleep(0.001)
