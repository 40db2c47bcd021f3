"""Messages from one member to another: a channel for each pair that uses one, made by its first message.

The sender makes it and shows in the group's memory where it is; the receiver opens it there. So a message
needs no receiver that waits: a channel's worth of them is on its way at most.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from flowchan.channel.channel import Channel, In, Out
from flowchan.channel.channel import _arrive as arrive
from flowchan.channel.select import NothingReady, select
from flowchan.errors import Broken, Closed, Drained, Empty, Full, GroupError, MemberDied, MemberLeft
from flowchan.transport.descriptors import Borrowed

_PAUSE = 0.001
_LOOK = 0.02
_chance = random.Random()  # the program's own numbers stay as they are
_PACKED = 1 << 32
_AT_ONCE = 128  # channels of one select
_LEFT = 1  # as the core says it


class Member(Protocol):
    """Whose messages they are. ``_ranks``: what errors call the members."""

    _ranks: Sequence[int]

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def _see(self, member: int) -> tuple[int, int, int, int, bool, bool, bool, bool]: ...
    def _lane_from(self, member: int) -> tuple[int, int, int] | None: ...
    def _show_lane(self, to: int, at: int, inode: int) -> None: ...


class Lanes:
    """Those of one member."""

    def __init__(self, member: Member) -> None:
        self._member = weakref.proxy(member)  # who drops a member leaves at once
        self._made: dict[int, Out[Any]] = {}
        self._out: dict[int, Out[Any]] = {}  # those of them that are shown
        self._found: set[int] = set()  # receivers that have opened theirs, whose ends end them
        self._in: dict[int, In[Any]] = {}
        self._lock = threading.Lock()  # a lane is made once, and opened once

    def send(self, x: Any, to: int, timeout: float | None) -> None:
        port = self._out.get(to)
        if port is None:
            port = self._show(to)
        try:
            if to in self._found or self._is_open(port):
                self._found.add(to)
                port.put(x, timeout)
            else:
                self._put_unfound(port, x, to, timeout)
        except (Broken, Closed) as error:
            raise self._gone(to, "send") from error

    def _show(self, to: int) -> Out[Any]:
        """One that Ctrl-C has kept from being shown is shown by the next send."""
        with self._lock:
            if to not in self._made:
                made: Channel[Any] = Channel(across="processes")
                self._made[to] = made.writer()
            port = self._made[to]
            channel = port.channel
            at = channel._fd + _PACKED * (channel._socket + 1)
            self._member._show_lane(to, at, os.fstat(channel._fd).st_ino)
            self._out[to] = port
        return port

    def _put_unfound(self, port: Out[Any], x: Any, to: int, timeout: float | None) -> None:
        """To a receiver that may end without having opened the channel, of which that would not tell."""
        give_up = math.inf if timeout is None else time.monotonic() + timeout
        if self._is_gone(to):
            raise self._gone(to, "send")
        try:
            port.put(x, 0.0)
            return
        except Full:
            if not self._opens(port, to, give_up):
                raise
        port.put(x, None if give_up == math.inf else max(0.0, give_up - time.monotonic()))

    def _opens(self, port: Out[Any], to: int, give_up: float) -> bool:
        """Waits for it, since nobody takes anything before, and each put packs its item anew."""
        pause = _PAUSE
        while not self._is_open(port):
            if self._is_gone(to):
                raise self._gone(to, "send") from None
            if (left := give_up - time.monotonic()) <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LOOK)
        return True

    def receive(self, source: int, timeout: float | None) -> Any:
        give_up = None if timeout is None else time.monotonic() + timeout
        while source not in self._in:
            if self._open(source):
                break
            if self._is_gone(source) and not self._open(source):
                raise self._gone(source, "receive")
            if give_up is not None and time.monotonic() > give_up:
                raise self._late(source)
            time.sleep(_PAUSE)
        left = None if give_up is None else max(0.0, give_up - time.monotonic())
        try:
            return self._in[source].get(left)
        except Empty:
            raise self._late(source) from None
        except (Broken, Drained) as error:
            raise self._gone(source, "receive") from error

    def receive_any(self, timeout: float | None) -> tuple[Any, int]:
        give_up = None if timeout is None else time.monotonic() + timeout
        others = set(range(self._member.size)) - {self._member.rank}
        while True:
            gone = {source for source in others if self._is_gone(source)}  # it has sent all that it will
            may_open = {source for source in others - set(self._in) if not self._try(source)} - gone
            died = {source for source in gone if not self._has_left(source)}
            left = None if give_up is None else max(0.0, give_up - time.monotonic())
            if died or gone == others:
                left = 0.0
            found = self._from_one(min(_PAUSE, _PAUSE if left is None else left) if may_open else left)
            if found is not None:
                return found
            if died or gone == others:
                raise self._gone(min(died or gone), "receive_any")
            if give_up is not None and time.monotonic() > give_up:
                raise TimeoutError(f"nobody has sent anything to {self._named(self._member.rank)} in time")

    def _from_one(self, wait: float | None) -> tuple[Any, int] | None:
        """What one of the open channels has within so many seconds; of several any."""
        sources = {port: source for source, port in self._in.copy().items()}  # another thread may add to it
        ports = _chance.sample(list(sources), len(sources))
        for port in ports:
            with contextlib.suppress(Empty, Drained, Broken):
                return port.get_nowait(), sources[port]
        if ports:
            with contextlib.suppress(NothingReady, Drained, Broken):
                done = select(ports[:_AT_ONCE], timeout=_PAUSE if len(ports) > _AT_ONCE else wait)
                return done.item, sources[done.channel]
        if wait != 0:
            time.sleep(_PAUSE)  # until it is seen who is gone, or has sent for the first time
        return None

    def close(self, wait: bool = True) -> None:
        """Waits for receivers that have not opened what was sent to them, as long as they are there."""
        with self._lock:
            made = [*self._made.items()]
        for to, port in made:
            while wait and not self._is_open(port) and not self._is_gone(to):
                time.sleep(_PAUSE)
            port.close()
        for port_in in [*self._in.values()]:
            port_in.close()
        self._made.clear()
        self._out.clear()
        self._in.clear()

    def _open(self, source: int) -> bool:
        where = self._member._lane_from(source)
        if where is None:
            return False
        pid, at, inode = where
        socket, fd = divmod(at, _PACKED)
        with self._lock:
            if source in self._in:
                return True
            try:
                channel = arrive(Borrowed(pid, fd, socket - 1, inode), "")
                # Kept as it is made, in one call: a reader that Ctrl-C drops would end the sender's.
                self._in.update(zip((source,), map(In, (channel,)), strict=True))
            except (Broken, OSError) as error:
                raise self._gone(source, "receive") from error
        return True

    def _try(self, source: int) -> bool:
        with contextlib.suppress(MemberDied):
            return self._open(source)
        return False

    @staticmethod
    def _is_open(port: Out[Any]) -> bool:
        stats = port.channel.stats()
        return bool(stats.readers or stats.items_out) or port.closed

    def _is_gone(self, member: int) -> bool:
        _, gone, _, _, _, alive, *_ = self._member._see(member)
        return bool(gone) or not alive

    def _has_left(self, member: int) -> bool:
        return bool(self._member._see(member)[1] == _LEFT)

    def _gone(self, member: int, call: str) -> GroupError:
        if self._member._see(self._member.rank)[-1]:
            return GroupError(f"{call} was not done: this member has left")
        kind, how = (MemberLeft, "has left") if self._has_left(member) else (MemberDied, "died")
        rank = self._member._ranks[member]
        return kind(f"{call} can't be done: {self._named(member)} {how}", (rank,), call)

    def _late(self, source: int) -> TimeoutError:
        mine = self._named(self._member.rank)
        return TimeoutError(f"{self._named(source)} has sent nothing to {mine} in time")

    def _named(self, member: int) -> str:
        return f"rank {self._member._ranks[member]}"
