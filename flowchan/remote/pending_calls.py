"""Calls from this process to the owner of remote channels.

Requests go over the control stream. Each reply is used once: by the caller, or by the call's ``late``
function if the caller has given up.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

from flowchan.channel.channel import Out
from flowchan.channel.latch import Latch
from flowchan.errors import Broken, ChannelError, Closed, HostError
from flowchan.remote.messages import CallRequest, Cancel, Reply, wrong
from flowchan.transport.descriptors import lacks
from flowchan.transport.interrupts import is_interrupt

CLOSED_HERE = "this process has closed its connection to them"


class Unanswered(Exception):
    """The owner has not replied in time; its reply will go to ``late``."""


def is_not_now(error: BaseException) -> bool:
    """Return whether an item could not be decoded for a reason outside of the item.

    Such reasons are an interrupt, and a lack of memory or descriptors in this process.
    """
    return is_interrupt(error) or lacks(error)


class PendingCall:
    """A call that the owner has not answered yet.

    Args:
        late: Receives the reply if the caller has given up. If the request was never sent, the reply is an
            error.
        done: Called when the reply has arrived (default: wake :meth:`wait`).
    """

    def __init__(
        self,
        late: Callable[[Reply], None],
        done: Callable[[], None] | None = None,
    ) -> None:
        self.number = 0  # until it is sent
        self.late = late
        self.answer: Reply | None = None
        self.abandoned = self.is_over = False  # over: `late` was called or is about to be
        self._answered = Latch()
        self.done: Callable[[], None] = done or self._answered.set

    def wait(self, within: float | None = None) -> None:
        """Wait up to ``within`` seconds for the reply."""
        self._answered.wait(within)

    def value(self) -> Any:
        """Return the value of the reply, or raise the exception that the call raised at the owner."""
        if self.answer is None:
            raise Unanswered
        if self.answer.wrong is not None:
            raise self.answer.wrong.error()
        return self.answer.value


class Calls:
    """The pending calls to one owner."""

    _asks: Out[Any]

    def __init__(self, address: str) -> None:
        self.address = address
        self.lost = ""  # why the owner is lost; empty while it is not
        self._lock = threading.RLock()
        self._numbers = 0
        self._asked: dict[int, PendingCall] = {}

    def ask(
        self,
        channel: int,
        what: str,
        *arguments: Any,
        late: Callable[[Reply], None] = lambda _: None,
        take: Callable[[Any], Any] = lambda value: value,
        within: float | None = None,
        first: Callable[[], None] = lambda: None,
    ) -> Any:
        """Send a request, wait for the reply, and return ``take(value)``.

        Args:
            channel: Number of the channel at the owner.
            what: Kind of request.
            arguments: Its arguments.
            late: Receives the reply if the caller has given up or ``take`` failed. It receives an error if
                the request was never sent.
            take: Converts the value.
            within: Seconds to wait for the reply (default: no limit).
            first: Called before the request is sent.

        Raises:
            Unanswered: There was no reply within ``within`` seconds.
        """
        asked = PendingCall(late)
        try:
            first()
            self._send(asked, channel, what, arguments)
            asked.wait(within)
            return take(asked.value())
        except BaseException as error:
            self._failed(asked, error)
            raise

    def post(
        self,
        channel: int,
        what: str,
        arguments: tuple[Any, ...],
        done: Callable[[], None] | None = None,
    ) -> PendingCall:
        """Send a request without waiting, and call ``done`` when the reply arrives."""
        asked = PendingCall(lambda _: None, done)
        try:
            self._send(asked, channel, what, arguments)
        except BaseException:
            self.abandon(asked)
            raise
        return asked

    def _send(self, asked: PendingCall, channel: int, what: str, arguments: tuple[Any, ...]) -> None:
        """Register the call, then send its request: an interrupt in between abandons the call."""
        with self._lock:
            self._numbers += 1
            asked.number = self._numbers
            self._asked[asked.number] = asked
        try:
            self._asks.put(CallRequest(asked.number, channel, what, arguments))
        except Exception as error:
            self._asked.pop(asked.number, None)
            if isinstance(error, Closed) or (isinstance(error, ValueError) and self.lost):
                raise self.broken() from None
            raise
        if self.lost:
            self._answer_all()

    def _failed(self, asked: PendingCall, error: BaseException) -> None:
        answer = asked.answer
        used = answer is not None and answer.wrong is None and not isinstance(error, Unanswered)
        if not used or is_not_now(error):
            self.abandon(asked)

    def abandon(self, asked: PendingCall) -> None:
        """Give the reply to ``late``, now or when it arrives, because the caller does not use it."""
        with self._lock:
            asked.abandoned = True
            answer = asked.answer
            if answer is None and asked.number not in self._asked:  # it was never sent
                answer = Reply(asked.number, wrong=wrong(ChannelError("cancelled")))
            late = answer is not None and not asked.is_over
            asked.is_over = asked.is_over or late
        if answer is None:
            self._recall(asked)
        elif late:
            asked.late(answer)

    def _recall(self, asked: PendingCall) -> None:
        """Ask the owner to answer now, either with the result or with ``Recalled``."""
        with contextlib.suppress(ChannelError, ValueError):
            self._asks.put_nowait(Cancel(asked.number))

    def _answered(self, said: Reply) -> None:
        with self._lock:
            asked = self._asked.pop(said.number, None)
            tell = None if asked is None else _settle(asked, said)
        if tell is not None:
            tell()

    def _answer_all(self) -> None:
        """Answer all pending calls with an error, because the owner is lost."""
        with self._lock:
            waiting, self._asked = list(self._asked.values()), {}
            told = [_settle(asked, Reply(asked.number, wrong=wrong(self.broken()))) for asked in waiting]
        for tell in told:
            tell()

    def broken(self) -> Broken:
        """Return the error for calls after the owner was lost or left."""
        error = Broken(f"the channels of {self.address} are broken: {self.lost or CLOSED_HERE}")
        error.__cause__ = HostError(self.lost or CLOSED_HERE, self.address)
        return error


def _settle(asked: PendingCall, answer: Reply) -> Callable[[], None]:
    """Store the reply, and return the function to call after the lock is released.

    The caller holds the lock of the calls.
    """
    asked.answer = answer
    if not asked.abandoned or asked.is_over:
        return asked.done
    asked.is_over = True
    return functools.partial(asked.late, answer)
