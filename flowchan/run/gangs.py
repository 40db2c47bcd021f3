"""The groups that the workers of gangs on this machine form, and what a worker does with its own. (Those of
gangs on hosts: ``hosts/crew.py``.)

A gang gets its group before it starts. An elastic one gets others: a worker that finds its group over does
not end. It says so, and waits for its seat in the next one; then its function is called again, with the item
in hand as the first. So does a worker that takes the place of one that died.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

from flowchan.channel.channel import Channel
from flowchan.declare.values import Stage
from flowchan.errors import Broken, Closed, Empty, MemberDied, MemberLeft
from flowchan.run.events import Bereft, Event, Failure, WorkerId
from flowchan.run.failures import Portable
from flowchan.run.opening import Ports

LOOK = 0.05
"""Seconds until who waits for a seat looks whether the run is over."""


class Gangs:
    """Those of one run, as its supervisor has them."""

    def __init__(self) -> None:
        self._seats: dict[WorkerId, Any] = {}
        self._next: dict[WorkerId, Channel[Any]] = {}  # by which elastic gangs get their next seats
        # Of elastic gangs: what oversees the group of the moment, and the ranks of those who are to be in it.
        self._groups: dict[str, tuple[Any, dict[WorkerId, int]]] = {}

    def form(self, stage: Stage, ids: Sequence[WorkerId]) -> None:
        """Makes a group for these workers, which are to be started."""
        assert stage.gang is not None
        members = stage.gang.group._make_all(len(ids), stage.name)
        if stage.gang.elastic:
            ranks = {id: rank for rank, id in enumerate(ids)}
            self._groups[stage.name] = members[0]._overseer(), ranks
        self._seats.update(zip(ids, members, strict=True))

    def seat(self, id: WorkerId) -> Any:
        """What the worker that is being started is given, if it has a seat."""
        return self._seats.pop(id, None)

    def next_seats(self, id: WorkerId, stage: Stage) -> Channel[Any] | None:
        """By which its later seats come to the worker that is being started."""
        if stage.gang is None or not stage.gang.elastic:
            return None
        self._next[id] = Channel(1, across="processes")
        return self._next[id]

    def meet(self, stage: Stage, ids: Sequence[WorkerId]) -> None:
        """Makes a group for these workers, which wait for it."""
        self.form(stage, ids)
        for id in ids:
            self._next[id].put(self._seats.pop(id))

    def disband(self, stage: str) -> None:
        """Ends the group of an elastic gang."""
        self._groups[stage][0].disband()

    def count_out(self, id: WorkerId) -> None:
        """A worker has died. Its mates wait for it no more, though it may not have taken its seat."""
        overseer, ranks = self._groups.get(id.stage, (None, {}))
        if id in ranks:
            overseer.count_out(ranks[id])

    def clear(self) -> None:
        """Leaves nothing."""
        self._seats.clear()
        self._next.clear()
        self._groups.clear()


class Membership:
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
        self._tell(Bereft(self._worker, over))
        while self._member is None:
            with contextlib.suppress(Empty):
                self._member = self._next.get(LOOK)
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
