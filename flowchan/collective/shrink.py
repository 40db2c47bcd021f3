"""Shrink a group on one host to its surviving members.

Each survivor publishes that it has arrived, and waits for an offer. When all have arrived, the survivor with
the lowest rank creates the memory of a new group and offers it to the other survivors. The members then
complete one round in the new group, so that all of them agree that it is valid. If another member dies before
that round ends, the survivors try again.
"""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from flowchan import _core
from flowchan.collective.point_to_point import LocalPeers
from flowchan.errors import GroupError
from flowchan.transport.descriptors import Borrowed, take_over

COME = 1
"""Value that a member publishes instead of an offer's inode if it has arrived but offers nothing."""
_PLACE = 1 << 32
_PAUSE, _LONGEST_PAUSE = 0.001, 0.02
_NOT_ALLOWED = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM}


class ShrinkMember(Protocol):
    """Methods and attributes that shrinking needs from a member of a single-host group."""

    _ranks: Sequence[int]
    _local: LocalPeers

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def _fd(self) -> int: ...
    def _see(self, member: int) -> tuple[int, int, int, int, bool, bool, bool, bool]: ...
    def _count_out(self, member: int) -> None: ...
    def _channel_from(self, member: int, offer: bool = False) -> tuple[int, int, int] | None: ...
    def _publish_channel(self, member: int, fd: int, inode: int, offer: bool = False) -> None: ...
    def _give_up(self) -> None: ...
    def _take_slot(self) -> None: ...
    def _title(self) -> str: ...
    def _has_met(self, timeout: float | None) -> bool: ...
    def close(self) -> None: ...


M = TypeVar("M", bound=ShrinkMember)


class Shrinking(Generic[M]):
    """One member's side of shrinking the group ``old``.

    ``member(fd, rank)`` creates a member of a new group. After the monotonic time ``give_up``, ``run`` raises
    ``TimeoutError``.
    """

    def __init__(self, old: M, member: Callable[[int, int], M], give_up: float) -> None:
        self._old, self._member, self._give_up = old, member, give_up
        self._others = [member for member in range(old.size) if member != old.rank]
        self._tried: set[int] = {COME}
        self._pause = _PAUSE

    def run(self) -> M:
        """Form the new group and close the old one.

        If this member gives up or is interrupted, the other members treat it like a member that has left.
        """
        old = self._old
        *_, over = old._see(old.rank)
        if over:
            raise GroupError(f"{old!r} was closed; create a new group")
        old._take_slot()
        try:
            old._give_up()  # members that still use the old group raise MemberDied
            old._local.close(wait=False)  # members that wait for messages from this one also raise MemberDied
            for member in self._others:
                old._publish_channel(member, 0, COME, True)
            while (new := self._try()) is None:
                pass
            return new
        finally:
            old.close()

    def _try(self) -> M | None:
        old = self._old
        survivors = [member for member in range(old.size) if member == old.rank or self._is_survivor(member)]
        new = self._lead(survivors) if survivors[0] == old.rank else self._follow()
        if new is None:
            self._wait(survivors)
            return None
        endless = self._give_up == math.inf
        return new if new._has_met(None if endless else max(0.0, self._give_up - time.monotonic())) else None

    def _is_survivor(self, member: int) -> bool:
        """Return whether the member has not left, and is alive or may still join."""
        *_, alive, _, over = self._old._see(member)
        return alive and not over

    def _has_come(self, member: int) -> bool:
        return self._old._channel_from(member, True) is not None

    def _wait(self, survivors: list[int]) -> None:
        if time.monotonic() > self._give_up:
            absent = [self._old._ranks[member] for member in survivors if member in self._others]
            late = [rank for rank in absent if not self._has_come(rank)] or absent
            raise TimeoutError(f"shrink of {self._old._title()} timed out: ranks {late} did not arrive")
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _lead(self, survivors: list[int]) -> M | None:
        """Create the group once all survivors have arrived, and wait until each one has joined or is gone."""
        old = self._old
        if not all(self._has_come(member) for member in survivors if member != old.rank):
            return None
        new = self._member(_core.Group._make(len(survivors)), 0)
        try:
            new._take_slot()
            inode = os.fstat(new._fd).st_ino
            for place, member in enumerate(survivors[1:], 1):
                old._publish_channel(member, new._fd + _PLACE * place, inode, True)
            while absent := [place for place in range(1, len(survivors)) if not new._see(place)[0]]:
                for place in absent:
                    if not self._is_survivor(survivors[place]):
                        new._count_out(place)
                self._wait([survivors[place] for place in absent])
        except BaseException:
            new.close()  # so that members that have joined do not wait in the new group
            raise
        return new

    def _follow(self) -> M | None:
        """Join a group that another member offers, if there is one."""
        for member in self._others:
            pid, at, inode = self._old._channel_from(member, True) or (0, 0, COME)
            if inode in self._tried:
                continue
            self._tried.add(inode)
            place, fd = divmod(at, _PLACE)
            try:
                opened, _ = take_over(Borrowed(pid, fd, -1, inode))
                new = self._member(opened, place)
            except OSError as error:
                if error.errno in _NOT_ALLOWED and self._is_survivor(member):
                    raise
                continue  # the member that made the offer is gone or has withdrawn the offer
            new._take_slot()
            return new
        return None
