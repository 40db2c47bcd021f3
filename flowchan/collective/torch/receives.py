"""Run the backend's receives in the background while their caller sends."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from flowchan.collective.array_access import described
from flowchan.collective.group import Group
from flowchan.collective.handles import end_before_threads
from flowchan.collective.torch.works import Work, timed
from flowchan.errors import GroupError, Mismatch
from flowchan.transport.interrupts import unless_interrupted

_TURN = 0.02
"""Seconds after which a receiving thread lets another thread receive."""

Tensors = Sequence[torch.Tensor]


class Receives:
    """Receive operations that run while their caller sends.

    Receives from one source run one at a time, and so do receives that accept any source. A receive that
    accepts any source may get a message for which a receive from only that sender is waiting. The two kinds
    of receives therefore take turns, and each first checks the messages that the other kind has received.
    This rule keeps each sender's messages in order.
    """

    def __init__(self, member: Group) -> None:
        self._member = member
        self._threads: dict[int | None, ThreadPoolExecutor] = {}
        # Guards the attributes below. Methods enter the lock itself, not the condition: if a signal handler
        # raised in Condition.__enter__(), the lock would stay locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._other: defaultdict[tuple[int, Hashable], deque[Any]] = defaultdict(deque)
        self._waiting: Counter[int | None] = Counter()  # number of waiting receives, by source
        self._receiving: set[int | None] = set()  # sources from which some thread is receiving
        self._has_received_from_any = self._closed = False
        end_before_threads(self, Receives.close)

    def start(self, tensors: Tensors, source: int | None, tag: int, limit: float | None) -> Work:
        """Start to receive tensors from ``source``, each within ``limit`` seconds."""
        if source not in self._threads:
            self._threads[source] = ThreadPoolExecutor(1, thread_name_prefix=f"flowchan-receive-{source}")
        going_on = self._threads[source].submit(self._receive, tensors, source, tag, limit)
        return Work(list(tensors), going_on)

    def _receive(self, tensors: Tensors, source: int | None, tag: int, limit: float | None) -> int:
        """Receive all tensors from the sender of the first tensor, and return that sender's rank."""
        for x in tensors:
            with timed(limit):
                source, found = self.next(source, tag, limit)
            if found.dtype != x.dtype or found.numel() != x.numel():
                raise Mismatch(
                    f"rank {source} sent {described(found)}, but the receiver's tensor is {described(x)}"
                )
            with torch.no_grad():
                x.copy_(found.reshape(x.shape))

        assert source is not None
        return source

    def next(self, source: int | None, tag: Hashable, limit: float | None) -> tuple[int, Any]:
        """Return the sender and the content of the next message with this tag.

        Even with a ``limit`` of 0, a message that has arrived is returned.
        """
        give_up = math.inf if limit is None else time.monotonic() + limit
        is_late = False
        with self._lock:
            self._waiting[source] += 1
            try:
                while (came := self._of(source, tag)) is None:
                    if self._closed:
                        raise GroupError(f"receive failed: {self._member!r} is closed")
                    if is_late:
                        sender = "any rank" if source is None else f"rank {source}"
                        raise TimeoutError(f"receive: no message from {sender} arrived in time")
                    is_late = time.monotonic() >= give_up
                    if self._may_receive(source):
                        self._receive_next(source)
                    else:
                        self._changed.wait(None if limit is None else _TURN)
                return came
            finally:
                self._waiting[source] -= 1
                self._changed.notify_all()

    def _may_receive(self, source: int | None) -> bool:
        others = sum(self._waiting.values()) - self._waiting[None]
        if source is None:
            return not self._receiving and not (self._has_received_from_any and others)
        if source in self._receiving:
            return False
        return None not in self._receiving and (self._has_received_from_any or not self._waiting[None])

    def _receive_next(self, source: int | None) -> None:
        """Receive one message, and store the message for the call that waits for its tag.

        If no message arrives within ``_TURN`` seconds, return, so that another thread can receive.
        """
        self._receiving.add(source)
        self._lock.release()
        received: Any = None
        try:
            if source is None:
                received = self._member.receive_any(timeout=_TURN)
            else:
                received = self._member.receive(source, timeout=_TURN), source
        except unless_interrupted(TimeoutError):
            pass
        finally:
            self._lock.acquire()
            if received is not None:
                (its_tag, found), sender = received
                self._other[sender, its_tag].append(found)
            self._receiving.remove(source)
            self._has_received_from_any = source is None
            self._changed.notify_all()

    def _of(self, source: int | None, tag: Hashable) -> tuple[int, Any] | None:
        """Return the next received message with this tag, or None."""
        for (sender, its_tag), waiting in self._other.items():
            if its_tag == tag and source in (None, sender):
                found = waiting.popleft()
                if not waiting:
                    del self._other[sender, its_tag]
                return sender, found
        return None

    def close(self) -> None:
        """End the receives that are waiting, because the member is about to leave the group."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads.values():
            thread.shutdown(wait=True, cancel_futures=True)
