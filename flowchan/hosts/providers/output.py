"""What processes elsewhere write, on our standard error, with the host's name in front of each line."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections import deque
from dataclasses import dataclass
from typing import IO

LAST = 20
LONGEST = 64 * 1024  # of a line; what has no end of line is passed on in pieces of about this size
MARK = "flowchan-agent "
"""Begins what is meant for us and not for the user, up to the end of the line."""


@dataclass(frozen=True, slots=True)
class Said:
    """The last lines of a process, and what followed the last marks."""

    lines: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()

    def last(self) -> str:
        return next((line.strip() for line in reversed(self.lines) if line.strip()), "it said nothing")


class OutputRelay:
    """Passes a pipe on to our standard error, from a thread of its own, and remembers the last lines."""

    def __init__(self, host: str, pipe: IO[bytes]) -> None:
        self._prefix = f"[{host}] ".encode()
        self._pipe = pipe
        self._stop = os.eventfd(0)
        self._last: deque[str] = deque(maxlen=LAST)
        self._marks: deque[str] = deque(maxlen=LAST)
        os.set_blocking(pipe.fileno(), False)
        self._thread = threading.Thread(target=self._run, name=f"flowchan-output-{host}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Until the pipe's end, or until it is told to stop and has read what was there."""
        source = self._pipe.fileno()
        poll = select.poll()
        poll.register(source, select.POLLIN)
        poll.register(self._stop, select.POLLIN)
        rest = b""
        while True:
            stopping = any(ready == self._stop for ready, _ in poll.poll())
            try:
                some = os.read(source, LONGEST)
            except BlockingIOError:
                if stopping:
                    break
                continue
            *lines, rest = (rest + some).split(b"\n")
            for line in lines:
                self._pass_on(line)
            if not some or len(rest) >= LONGEST:
                if rest:
                    self._pass_on(rest)
                rest = b""
            if not some:
                return
        if rest:
            self._pass_on(rest)

    def _pass_on(self, line: bytes) -> None:
        line = line.rstrip(b"\r")
        text, mark, told = line.decode(errors="replace").partition(MARK)
        if mark:
            self._marks.append(told)
            if not text:
                return
            line = text.encode()  # what came before had no end of line
        self._last.append(text)
        if sys.__stderr__ is None:  # it was closed before Python began, and 2 is something else
            return
        try:
            os.write(2, self._prefix + line + b"\n")  # one call, so that lines of hosts do not mix
        except OSError:  # nobody reads our errors; the host must not wait for that
            pass

    def finish(self) -> Said:
        """For a process that has ended: passes on what is left in its pipe, and tells what was said. Others
        that hold the pipe, such as an ssh that stays for later connections, are not waited for."""
        if self._thread.is_alive():
            os.eventfd_write(self._stop, 1)
            self._thread.join()
        return Said(tuple(self._last), tuple(self._marks))

    def close(self) -> None:
        self.finish()
        if not self._pipe.closed:
            self._pipe.close()
            os.close(self._stop)
