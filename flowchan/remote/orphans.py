"""Channels across hosts that nobody has any more, while there are items in them: the channels in those items
need not be kept for them any longer.

Who drops a channel can't know whether it is the last: forked children have its memory, too. All of them share
the open file of that memory, which a lock tells apart from one that was opened anew.
"""

from __future__ import annotations

import contextlib
import contextvars
import fcntl
import os
from collections.abc import Callable
from typing import Any

from flowchan import _core
from flowchan.channel.channel import Channel
from flowchan.items.codec import keeps_sealed


class OrphanMemory:
    """That of a channel, held as all who have it do: a :class:`Orphans` can see whether any are left."""

    def __init__(self, channel: Channel[Any]) -> None:
        self._fd = channel._fd
        self._inode = os.fstat(self._fd).st_ino
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def dropped(self, number: int) -> Orphans | None:
        """To be called before its descriptor is closed. None: it is too late, or there are no descriptors."""
        with contextlib.suppress(OSError):
            dropped = Orphans(number, os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR))
            return dropped if os.fstat(dropped.fd).st_ino == self._inode else None
        return None


class Orphans:
    """One of them, by its number at its home."""

    def __init__(self, number: int, fd: int) -> None:
        self.number, self.fd = number, fd

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.fd)

    def is_nobodys(self) -> bool:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def items(self) -> list[Any]:
        """What was in it, sealed. Also of a channel that was aborted: its memory has them still."""
        return contextvars.copy_context().run(self._items)

    def _items(self) -> list[Any]:
        keeps_sealed.set(True)
        found = []
        with contextlib.suppress(Exception):  # it is empty, or whatever can be wrong with what nobody wants
            channel: Channel[Any] = Channel.__new__(Channel)
            _core.Channel.__init__(channel, fd=os.dup(self.fd), socket=-1, name="")
            channel._undo_abort()
            while True:
                found.append(channel.get_nowait())
        return found
