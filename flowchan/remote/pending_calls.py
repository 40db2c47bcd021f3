"""Calls that the home of channels does for somebody here: what is asked goes over the control line, and each
answer is used once, by who waits for it or, when nobody does any more, by what was said for that case."""

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


class Unanswered(Exception):
    """The server has not answered in time. What it still answers is heard late."""


def is_not_now(error: BaseException) -> bool:
    """Whether an error in the making of an item says nothing of the item: the call was interrupted, or this
    process lacks memory or descriptors."""
    return is_interrupt(error) or lacks(error)


class PendingCall:
    """A call that home does for somebody here. ``late`` hears the answer, or that it was not done, when
    nobody waits for it any more."""

    def __init__(
        self,
        late: Callable[[Reply], None],
        done: Callable[[], None] | None = None,
    ) -> None:
        self.number = 0  # until it is on its way
        self.late = late
        self.answer: Reply | None = None
        self.abandoned = self.is_over = False  # over: `late` has heard of it, or does
        self._answered = Latch()
        self.done: Callable[[], None] = done or self._answered.set

    def wait(self, within: float | None = None) -> None:
        self._answered.wait(within)

    def value(self) -> Any:
        """What home answered. Raises what the call raised there."""
        if self.answer is None:
            raise Unanswered
        if self.answer.wrong is not None:
            raise self.answer.wrong.error()
        return self.answer.value


class Calls:
    """Those to one home."""

    _asks: Out[Any]

    def __init__(self, address: str) -> None:
        self.address = address
        self.lost = ""  # why
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
        """Return what ``take`` makes of home's answer. ``late`` hears it when nobody waits any more, or could
        take it. Raises :class:`Unanswered` after ``within`` seconds. ``first`` is done before; if the call
        never goes, ``late`` hears that."""
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
        """Nobody waits here; ``done`` is called when it is answered."""
        asked = PendingCall(lambda _: None, done)
        try:
            self._send(asked, channel, what, arguments)
        except BaseException:
            self.abandon(asked)
            raise
        return asked

    def _send(self, asked: PendingCall, channel: int, what: str, arguments: tuple[Any, ...]) -> None:
        """It is known here before it is on its way: whoever is interrupted from then on abandons it."""
        with self._lock:
            self._numbers += 1
            asked.number = self._numbers
            self._asked[asked.number] = asked
        try:
            self._asks.put(CallRequest(asked.number, channel, what, arguments))
        except Exception as error:
            self._asked.pop(asked.number, None)
            if isinstance(error, Closed) or (
                isinstance(error, ValueError) and self.lost
            ):  # the port is closed
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
        """Nobody waits for it any more, or takes its answer."""
        with self._lock:
            asked.abandoned = True
            answer = asked.answer
            if answer is None and asked.number not in self._asked:  # it never went
                answer = Reply(asked.number, wrong=wrong(ChannelError("cancelled")))
            late = answer is not None and not asked.is_over
            asked.is_over = asked.is_over or late
        if answer is None:
            self._recall(asked)
        elif late:
            asked.late(answer)

    def _recall(self, asked: PendingCall) -> None:
        """Have the server answer it at once: with what it has just done, or that it was recalled."""
        with contextlib.suppress(ChannelError, ValueError):
            self._asks.put_nowait(Cancel(asked.number))

    def _answered(self, said: Reply) -> None:
        with self._lock:
            asked = self._asked.pop(said.number, None)
            tell = None if asked is None else _settle(asked, said)
        if tell is not None:
            tell()

    def _answer_all(self) -> None:
        """By an error: home is lost."""
        with self._lock:
            waiting, self._asked = list(self._asked.values()), {}
            told = [_settle(asked, Reply(asked.number, wrong=wrong(self.broken()))) for asked in waiting]
        for tell in told:
            tell()

    def broken(self) -> Broken:
        error = Broken(f"the channels of {self.address} are broken: {self.lost or 'they were left'}")
        error.__cause__ = HostError(self.lost or "they were left", self.address)
        return error


def _settle(asked: PendingCall, answer: Reply) -> Callable[[], None]:
    """Who is to be told. With the lock of the calls held."""
    asked.answer = answer
    if not asked.abandoned or asked.is_over:
        return asked.done
    asked.is_over = True
    return functools.partial(asked.late, answer)
