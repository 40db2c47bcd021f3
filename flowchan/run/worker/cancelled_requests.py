"""Boards that mark cancelled requests in shared memory.

The processes of a machine find a board by its path. The slot of a request is its number modulo ``PLACES``,
and holds that number once the request is cancelled. So cancelling sends no message, and a worker that takes
an item reads one word.

The program has one board for each run. Each agent has one for the workers of its host.
"""

from __future__ import annotations

import functools
import mmap
import os
import struct

from flowchan.run.policy import seeds

PLACES = 1 << 16
_PLACE = struct.Struct("Q")


class CancelledRequests:
    """Board of cancelled requests; other processes open it by its ``path``."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("flowchan questions")
        os.ftruncate(self._fd, PLACES * _PLACE.size)
        self._memory = mmap.mmap(self._fd, 0)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"

    def cross_off(self, question: int) -> None:
        _PLACE.pack_into(self._memory, _place(question), question)

    def close(self) -> None:
        self._memory.close()
        os.close(self._fd)
        forget_boards()


def use_board(path: str) -> None:
    """Set the board for the workers of this host; called in the agent that starts them."""
    global _of_host
    _of_host = path


_of_host = ""


def is_crossed_off(question: int, path: str) -> bool:
    """Return whether the request is cancelled.

    Workers call this with the ``path`` of the program's board.
    """
    memory = _memory(_of_host if seeds.worker().host else path)
    return memory is not None and bool(_PLACE.unpack_from(memory, _place(question))[0] == question)


def _place(question: int) -> int:
    """Return the offset of the request's slot in bytes."""
    return question % PLACES * _PLACE.size


@functools.lru_cache(maxsize=4)
def _memory(path: str) -> mmap.mmap | None:
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    except OSError:
        return None


def forget_boards() -> None:
    """Drop the open boards: the board of the next run may have the same path."""
    _memory.cache_clear()
