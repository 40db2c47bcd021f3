"""Messages from one member to another: a channel for each pair that uses one, made by its first message.

The sender makes it and shows in the group's memory where it is; the receiver opens it there. So a message
needs no receiver that waits: a channel's worth of them is on its way at most.
"""

from __future__ import annotations

import os
import time
import weakref
from typing import Any

from flowchan import _core
from flowchan.channel.channel import Channel, In, Out
from flowchan.channel.channel import _arrive as arrive
from flowchan.errors import Broken, Closed, Drained, MemberDied, MemberLeft
from flowchan.transport.descriptors import Borrowed

_PAUSE = 0.001
_PACKED = 1 << 32
_LEFT = 1  # as the core says it


class Lanes:
    """Those of one member."""

    def __init__(self, member: _core.Group) -> None:
        self._member = weakref.proxy(member)  # who drops a member leaves at once
        self._out: dict[int, Out[Any]] = {}
        self._in: dict[int, In[Any]] = {}

    def send(self, x: Any, to: int, timeout: float | None) -> None:
        if to not in self._out:
            channel: Channel[Any] = Channel(across="processes")
            self._out[to] = channel.writer()
            at = channel._fd + _PACKED * (channel._socket + 1)
            self._member._show_lane(to, at, os.fstat(channel._fd).st_ino)
        try:
            self._out[to].put(x, timeout)
        except (Broken, Closed) as error:
            raise self._gone(to, "send") from error

    def receive(self, source: int, timeout: float | None) -> Any:
        give_up = None if timeout is None else time.monotonic() + timeout
        while source not in self._in:
            if self._open(source):
                break
            if self._is_gone(source) and not self._open(source):
                raise self._gone(source, "receive")
            if give_up is not None and time.monotonic() > give_up:
                raise TimeoutError(f"rank {source} has sent nothing to rank {self._member.rank} in time")
            time.sleep(_PAUSE)
        left = None if give_up is None else max(0.0, give_up - time.monotonic())
        try:
            return self._in[source].get(left)
        except (Broken, Drained) as error:
            raise self._gone(source, "receive") from error

    def close(self) -> None:
        """Waits for receivers that have not opened what was sent to them, as long as they are there."""
        for to, port in self._out.items():
            while not self._is_open(port) and not self._is_gone(to):
                time.sleep(_PAUSE)
            port.close()
        for port_in in self._in.values():
            port_in.close()
        self._out.clear()
        self._in.clear()

    def _open(self, source: int) -> bool:
        where = self._member._lane_from(source)
        if where is None:
            return False
        pid, at, inode = where
        socket, fd = divmod(at, _PACKED)
        try:
            self._in[source] = arrive(Borrowed(pid, fd, socket - 1, inode), "").reader()
        except (Broken, OSError) as error:
            raise self._gone(source, "receive") from error
        return True

    @staticmethod
    def _is_open(port: Out[Any]) -> bool:
        stats = port.channel.stats()
        return bool(stats.readers or stats.items_out) or port.closed

    def _is_gone(self, member: int) -> bool:
        _, gone, _, _, _, alive, _ = self._member._see(member)
        return bool(gone) or not alive

    def _gone(self, member: int, call: str) -> MemberDied:
        left = self._member._see(member)[1] == _LEFT
        kind, how = (MemberLeft, "has left") if left else (MemberDied, "died")
        return kind(f"{call} can't be done: rank {member} {how}", (member,), call)
