"""Boards on which questions are crossed off for whose answers nobody waits any more: memory that the
processes of a machine find by its path. A question's place is its number modulo ``PLACES``, and holds the
number once it is crossed off. So nobody need be told, and who takes an item up looks at one word.

The program has a board for each run, and each agent one for the workers of its host.
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
    """A new one. ``path``: where others find it."""

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
    """In an agent: the board for the workers of its host, which it starts."""
    global _of_host
    _of_host = path


_of_host = ""


def is_crossed_off(question: int, path: str) -> bool:
    """For a worker. ``path``: of the program's board."""
    memory = _memory(_of_host if seeds.worker().host else path)
    return memory is not None and bool(_PLACE.unpack_from(memory, _place(question))[0] == question)


def _place(question: int) -> int:
    """In bytes."""
    return question % PLACES * _PLACE.size


@functools.lru_cache(maxsize=4)
def _memory(path: str) -> mmap.mmap | None:
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    except OSError:
        return None


def forget_boards() -> None:
    """Another run has another board, perhaps by the same path."""
    _memory.cache_clear()
