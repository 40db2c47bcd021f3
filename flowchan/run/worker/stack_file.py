"""Write a worker process's Python stacks to an in-memory file when a signal asks for them.

Algorithm. The program and the worker process share the file. At its start, the worker writes one byte:
``READY``, or ``REFUSED`` if another handler uses the signal. To request the stacks, the program truncates the
file after this byte, sends the signal, and reads the file until it contains a complete dump. The core writes
a mark before and after each dump (stack_dumps.cpp). An earlier dump that the truncation cut off has no
opening mark, so the program ignores it.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import context, reduction
from typing import Any

from flowchan import _core

SIGNAL = signal.SIGRTMIN + 7 if sys.platform == "linux" else signal.SIGUSR2  # only Linux has worker processes
"""Signal that asks a worker process for its stacks. It kills a process that has not prepared for it."""
READY, REFUSED = b"+", b"-"
_DEATH, _BEGIN, _END = b"\x01", b"\x02", b"\x03"  # markers in the file, written by the core


class StackFile:
    """In-memory file for the stacks of one worker process."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("flowchan stacks")
        # In append mode, writes go to the end of the file even after the program has truncated it.
        fcntl.fcntl(self._fd, fcntl.F_SETFL, os.O_APPEND)

    def __getstate__(self) -> dict[str, Any]:
        assert context.get_spawning_popen() is not None  # only a new worker process may receive the file
        return {"_fd": reduction.DupFd(self._fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._fd = state["_fd"].detach()

    def serve(self) -> None:
        """Begin to write this process's stacks at each signal, even while C code holds the GIL."""
        ready = _core._claim_signal(SIGNAL)
        if ready:
            faulthandler.register(SIGNAL, self._fd, all_threads=True)
            _core._frame_dumps(SIGNAL, self._fd)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [SIGNAL])  # the program may block all signals
        os.write(self._fd, READY if ready else REFUSED)

    @property
    def state(self) -> bytes:
        """Return ``READY`` or ``REFUSED``, or ``b""`` if the process is still starting."""
        return os.pread(self._fd, 1, 0)

    def clear(self) -> None:
        """Remove all dumps."""
        os.ftruncate(self._fd, len(READY))

    def answer(self) -> str | None:
        """Return the dump written since :meth:`clear`, or None if it is not complete yet."""
        _, mark, dump = self._contents().rpartition(_END)[0].rpartition(_BEGIN)
        return dump.decode(errors="replace") if mark else None

    def last_words(self) -> str:
        """Return the stacks that the process wrote just before its death, or an empty string."""
        _, _, dump = self._contents().partition(_DEATH)
        return dump.partition(_END)[0].decode(errors="replace")

    def _contents(self) -> bytes:
        return os.pread(self._fd, os.fstat(self._fd).st_size, 0)

    def close(self) -> None:
        os.close(self._fd)


def serving_stacks(file: StackFile, main: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Run a worker process's main function, and let it write its stacks to ``file`` on request."""
    file.serve()
    main(*arguments)
