"""Tell workers through shared memory which requests have been cancelled.

The shared memory is called a board, and all processes on a machine open it by its path. The board stores the
number of a cancelled request in the slot whose index is that number modulo ``SLOTS``. Cancelling a request
therefore needs no message, and checking a request reads only one word.

The program has one board per run. Each agent has one for the workers on its host.
"""

from __future__ import annotations

import functools
import mmap
import os
import struct

from flowchan.run.policy import seeds

SLOTS = 1 << 16
_SLOT = struct.Struct("Q")


class CancelledRequests:
    """Board of cancelled requests. Other processes open the board by its ``path``."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("flowchan questions")
        os.ftruncate(self._fd, SLOTS * _SLOT.size)
        self._memory = mmap.mmap(self._fd, 0)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"

    def mark_cancelled(self, question: int) -> None:
        _SLOT.pack_into(self._memory, _slot_offset(question), question)

    def close(self) -> None:
        self._memory.close()
        os.close(self._fd)
        forget_boards()


def use_board(path: str) -> None:
    """Set the board for all workers of this host. An agent calls this function before it starts workers."""
    global _of_host
    _of_host = path


_of_host = ""


def is_cancelled(question: int, path: str) -> bool:
    """Return whether a request has been cancelled.

    ``path`` is the path of the program's board. A worker on another host uses its agent's board instead.
    """
    memory = _memory(_of_host if seeds.worker().host else path)
    return memory is not None and bool(_SLOT.unpack_from(memory, _slot_offset(question))[0] == question)


def _slot_offset(question: int) -> int:
    """Return the byte offset of the request's slot."""
    return question % SLOTS * _SLOT.size


@functools.lru_cache(maxsize=4)
def _memory(path: str) -> mmap.mmap | None:
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    except OSError:
        return None


def forget_boards() -> None:
    """Close the boards that this process has opened. The next run may reuse their paths."""
    _memory.cache_clear()
