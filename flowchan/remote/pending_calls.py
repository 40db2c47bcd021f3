"""Manage calls from this process to the owner of remote channels.

Requests use the control stream. Each reply is used exactly once: by the caller or, if the caller has given
up, by the call's ``late`` function.
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
from flowchan.remote.messages import CallRequest, Cancel, Reply, describe_error
from flowchan.transport.descriptors import lacks
from flowchan.transport.interrupts import is_interrupt

CLOSED_HERE = "this process has closed its connection to their owner"


class Unanswered(Exception):
    """Raised when the owner has not replied in time. A late reply will be passed to ``late``."""


def is_transient(error: BaseException) -> bool:
    """Return whether decoding failed for a reason that does not depend on the item.

    Examples are an interrupt, or a lack of memory or descriptors in this process.
    """
    return is_interrupt(error) or lacks(error)


class PendingCall:
    """Call to which the owner has not replied yet.

    Args:
        late: Function to call with the reply if the caller has given up. If the request was never sent, the
            reply is an error.
        done: Function to call when the reply has arrived (default: wake :meth:`wait`).
    """

    def __init__(
        self,
        late: Callable[[Reply], None],
        done: Callable[[], None] | None = None,
    ) -> None:
        self.number = 0  # 0 until the request is sent
        self.late = late
        self.reply: Reply | None = None
        self.abandoned = self.is_over = False  # is_over ensures that `late` is called at most once
        self._has_reply = Latch()
        self.done: Callable[[], None] = done or self._has_reply.set

    def wait(self, within: float | None = None) -> None:
        """Wait up to ``within`` seconds for the reply."""
        self._has_reply.wait(within)

    def value(self) -> Any:
        """Return the value of the reply, or raise the exception that the call raised at the owner."""
        if self.reply is None:
            raise Unanswered
        if self.reply.error is not None:
            raise self.reply.error.exception()
        return self.reply.value


class Calls:
    """Calls to one owner that wait for replies."""

    _requests: Out[Any]

    def __init__(self, address: str) -> None:
        self.address = address
        self.lost = ""  # why the owner is lost; empty if it is not
        self._lock = threading.RLock()
        self._numbers = 0
        self._pending: dict[int, PendingCall] = {}

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
            what: Kind of the request.
            arguments: Arguments of the request.
            late: Function to call with the reply if the caller has given up or ``take`` failed. If the
                request was never sent, the reply is an error.
            take: Function that converts the value of the reply.
            within: Seconds to wait for the reply (default: no limit).
            first: Called before the request is sent.

        Returns:
            The result of ``take``.

        Raises:
            Unanswered: No reply arrived within ``within`` seconds.
        """
        call = PendingCall(late)
        try:
            first()
            self._send(call, channel, what, arguments)
            call.wait(within)
            return take(call.value())
        except BaseException as error:
            self._failed(call, error)
            raise

    def post(
        self,
        channel: int,
        what: str,
        arguments: tuple[Any, ...],
        done: Callable[[], None] | None = None,
    ) -> PendingCall:
        """Send a request without waiting; call ``done`` when the reply arrives."""
        call = PendingCall(lambda _: None, done)
        try:
            self._send(call, channel, what, arguments)
        except BaseException:
            self.abandon(call)
            raise
        return call

    def _send(self, call: PendingCall, channel: int, what: str, arguments: tuple[Any, ...]) -> None:
        """Register the call, then send its request.

        If an interrupt arrives between the two steps, the caller calls :meth:`abandon`.
        """
        with self._lock:
            self._numbers += 1
            call.number = self._numbers
            self._pending[call.number] = call
        try:
            self._requests.put(CallRequest(call.number, channel, what, arguments))
        except Exception as error:
            self._pending.pop(call.number, None)
            if isinstance(error, Closed) or (isinstance(error, ValueError) and self.lost):
                raise self.broken() from None
            raise
        if self.lost:
            self._fail_all()

    def _failed(self, call: PendingCall, error: BaseException) -> None:
        reply = call.reply
        used = reply is not None and reply.error is None and not isinstance(error, Unanswered)
        if not used or is_transient(error):
            self.abandon(call)

    def abandon(self, call: PendingCall) -> None:
        """Pass the reply to ``late``, now or when it arrives, because the caller no longer waits for it."""
        with self._lock:
            call.abandoned = True
            reply = call.reply
            if reply is None and call.number not in self._pending:  # the request was never sent
                reply = Reply(call.number, error=describe_error(ChannelError("cancelled")))
            late = reply is not None and not call.is_over
            call.is_over = call.is_over or late
        if reply is None:
            self._recall(call)
        elif late:
            call.late(reply)

    def _recall(self, call: PendingCall) -> None:
        """Ask the owner to reply now: with the result, or with ``CallCancelled``."""
        with contextlib.suppress(ChannelError, ValueError):
            self._requests.put_nowait(Cancel(call.number))

    def _receive_reply(self, reply: Reply) -> None:
        with self._lock:
            call = self._pending.pop(reply.number, None)
            callback = None if call is None else _settle(call, reply)
        if callback is not None:
            callback()

    def _fail_all(self) -> None:
        """Complete all pending calls with an error, because the owner is lost."""
        with self._lock:
            waiting, self._pending = list(self._pending.values()), {}
            callbacks = [
                _settle(call, Reply(call.number, error=describe_error(self.broken()))) for call in waiting
            ]
        for callback in callbacks:
            callback()

    def broken(self) -> Broken:
        """Return the error for calls to an owner that is lost or from which this process has disconnected."""
        error = Broken(f"the channels at {self.address} are broken: {self.lost or CLOSED_HERE}")
        error.__cause__ = HostError(self.lost or CLOSED_HERE, self.address)
        return error


def _settle(call: PendingCall, reply: Reply) -> Callable[[], None]:
    """Store the reply, and return the function to call once the lock is released.

    The caller must hold the lock on the pending calls.
    """
    call.reply = reply
    if not call.abandoned or call.is_over:
        return call.done
    call.is_over = True
    return functools.partial(call.late, reply)
