"""Mark cancelled requests on boards in shared memory.

All processes on a machine open a board by its path. A cancelled request's number is stored in the slot with
that number modulo ``SLOTS``. Cancelling therefore needs no message, and a worker that takes an item reads
only one word.

The program has one board per run, and each agent has one for the workers on its host.
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
    """Board of cancelled requests; other processes open it by its ``path``."""

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
    """Set the board for the workers of this host. The agent that starts them calls this."""
    global _of_host
    _of_host = path


_of_host = ""


def is_cancelled(question: int, path: str) -> bool:
    """Return whether the request is cancelled.

    Workers call this with the ``path`` of the program's board.
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
    """Close the open boards, because the next run's board may have the same path."""
    _memory.cache_clear()
