"""Find orphans: channels that still contain items, but that no process has open any more.

The owner need not keep the channels inside these items any longer. A process that drops a channel cannot know
whether it was the last user, because forked children share the channel's memory. However, all users of a
channel share one open file description of this memory. A lock on the file shows whether this description is
still open.
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
    """Shared lock on a channel's memory, which every user of the channel holds.

    :class:`Orphans` tests this lock to find out whether the channel still has a user.
    """

    def __init__(self, channel: Channel[Any]) -> None:
        self._fd = channel._fd
        self._inode = os.fstat(self._fd).st_ino
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def dropped(self, number: int) -> Orphans | None:
        """Return the channel as a possible orphan, or None if its descriptor cannot be duplicated.

        Call this before the channel's descriptor is closed. The result is None if the descriptor is already
        closed, or if this process is out of descriptors.
        """
        with contextlib.suppress(OSError):
            dropped = Orphans(number, os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR))
            return dropped if os.fstat(dropped.fd).st_ino == self._inode else None
        return None


class Orphans:
    """Channel that may have no users any more.

    Args:
        number: Channel's number at its owner.
        fd: Descriptor of the channel's memory.
    """

    def __init__(self, number: int, fd: int) -> None:
        self.number, self.fd = number, fd

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.fd)

    def is_unused(self) -> bool:
        """Return whether no process uses the channel any more."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def items(self) -> list[Any]:
        """Return the items in the channel, sealed.

        The memory of an aborted channel still contains its items, which are returned as well.
        """
        return contextvars.copy_context().run(self._items)

    def _items(self) -> list[Any]:
        keeps_sealed.set(True)
        found = []
        with contextlib.suppress(Exception):  # raised when the channel is empty or damaged
            channel: Channel[Any] = Channel.__new__(Channel)
            _core.Channel.__init__(channel, fd=os.dup(self.fd), socket=-1, name="")
            channel._undo_abort()
            while True:
                found.append(channel.get_nowait())
        return found
