"""What the worker of a gang does with its membership of the gang's group."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

from flowchan.channel.channel import Channel
from flowchan.errors import Broken, Closed, Empty, MemberDied, MemberLeft
from flowchan.run.policy.events import Event, Failure, GroupLost, WorkerId
from flowchan.run.policy.failures import Portable
from flowchan.run.worker.opening import Ports

POLL_INTERVAL_S = 0.05
"""Seconds until who waits for a seat looks whether the run is over."""


class GangMembership:
    """A worker's own in the group of its gang, in an elastic one of the moment. ``next_seats``: by which that
    gets the others; ``member``: the first one, none where it takes the place of another worker."""

    def __init__(
        self,
        worker: WorkerId,
        member: Any,
        next_seats: Channel[Any] | None,
        tell: Callable[[Event], None],
        ports: Ports,
    ) -> None:
        self._worker, self._member, self._next, self._tell = worker, member, next_seats, tell
        self._ports = ports
        self._group: Any = None

    def enter(self) -> None:
        """Takes its first seat."""
        if self._member is None:
            self._await_seat(None)
        self._sit_down()

    def work(self, call: Callable[[Any], None]) -> None:
        """Calls it with its group, and again with the next one when that is over."""
        while (over := self._worked(call)) is not None:
            self._member._abandon()
            for reader in self._ports.inputs.values():
                reader._begin_again()
            self._await_seat(over)
            self._sit_down()

    def _worked(self, call: Callable[[Any], None]) -> Failure | None:
        """What has ended the group, if something has. Nothing that the call has made outlives it here."""
        try:
            call(self._group)
        except MemberDied as error:
            return self._over(error)
        return None

    def _sit_down(self) -> None:
        """In the first group for which all come."""
        while True:
            try:
                self._group = self._member.__enter__()
                return
            except MemberDied as error:
                self._await_seat(self._over(error))

    def _over(self, error: MemberDied) -> Failure:
        """Raises it where there is no other group."""
        if self._next is None:
            raise error
        return Failure(self._worker, Portable(error), None, os.getpid())

    def _await_seat(self, over: Failure | None) -> None:
        """Raises :class:`Broken` when the run is over."""
        assert self._next is not None
        self._member = None
        self._tell(GroupLost(self._worker, over))
        while self._member is None:
            with contextlib.suppress(Empty):
                self._member = self._next.get(POLL_INTERVAL_S)
            if any(port.channel.broken for port in self._ports.everything()):
                raise Broken("no group follows in a run that is over")

    def close(self, ended_by: BaseException | None) -> None:
        """The others hear that it has left; that it is gone, if it misses a mate itself, if nobody reads what
        it puts, or if its channels broke under it. In both these cases its agent may have died: then all
        begin again."""
        if self._member is None:
            return
        misses = isinstance(ended_by, MemberDied) and not isinstance(ended_by, MemberLeft)
        unread = isinstance(ended_by, Closed)
        if misses or unread or any(port.channel.broken for port in self._ports.everything()):
            self._member._abandon()
        else:
            self._member.close()
