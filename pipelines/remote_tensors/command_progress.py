"""Store the number of the command that a node is running, in memory that outlives the node.

If a command kills its node, the program reads the command's number from this memory. The memory works only on
the program's machine. For a node on another host, the program knows only which commands have been answered.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

from flowchan.items.program_file import ProgramFile

WORDS = 2
SIZE = 8 * WORDS


class CommandProgress:
    """Progress of a node. The program reads it after the node has died.

    Word 0 is the number of the client that issued the command; the program is client 0. Before a command, the
    node sets word 1 to the command's number. After the command, it negates word 1. Only the node writes these
    words.
    """

    def __init__(self) -> None:
        self._file = ProgramFile("flowchan remote command")
        os.ftruncate(self._file.fd, SIZE)
        self._words: Any = None

    def __getstate__(self) -> ProgramFile:
        return self._file

    def __setstate__(self, file: ProgramFile) -> None:
        self._file, self._words = file, None

    @property
    def words(self) -> memoryview:
        """Return the mapped words as signed integers."""
        if self._words is None:
            self._words = memoryview(mmap.mmap(self._file.fd, SIZE)).cast("q")
        words: memoryview = self._words
        return words

    def running(self) -> int | None:
        """Return the number of the running command, or minus the number of the last finished command.

        Return None if the command came from a client other than the program.
        """
        client, number = self.words
        return None if client else number
