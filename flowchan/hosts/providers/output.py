"""Relay remote processes' output to standard error, with the host's name before each line."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections import deque
from dataclasses import dataclass
from typing import IO

LAST = 20
LONGEST = 64 * 1024  # maximum bytes in a line; a longer line is relayed in pieces of about this size
MARK = "flowchan-agent "
"""Mark in a line; the text after it is meant for the provider, not for the user."""


@dataclass(frozen=True, slots=True)
class ProcessOutput:
    """Last lines of a process's output, and the texts after the marks that occurred in the output last."""

    lines: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()

    def last(self) -> str:
        return next((line.strip() for line in reversed(self.lines) if line.strip()), "no output")


class OutputRelay:
    """Relays a pipe to standard error in a separate thread, and keeps the last lines."""

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
        """Relay until the pipe ends, or until the relay has been stopped and the pipe is empty."""
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
        text, mark, marked = line.decode(errors="replace").partition(MARK)
        if mark:
            self._marks.append(marked)
            if not text:
                return
            line = text.encode()  # text before the mark that did not end with a newline
        self._last.append(text)
        if sys.__stderr__ is None:  # stderr was closed before Python started, so 2 is another file
            return
        try:
            # Write in a single call, so that lines from different hosts do not mix.
            os.write(2, self._prefix + line + b"\n")
        except OSError:  # standard error has no reader; drop the line, so that the host never waits
            pass

    def finish(self) -> ProcessOutput:
        """Relay the remaining output of a process that has ended, and return its last lines.

        Do not wait for other processes that have the pipe open, such as an ssh process that stays for later
        connections.
        """
        if self._thread.is_alive():
            os.eventfd_write(self._stop, 1)
            self._thread.join()
        return ProcessOutput(tuple(self._last), tuple(self._marks))

    def close(self) -> None:
        self.finish()
        if not self._pipe.closed:
            self._pipe.close()
            os.close(self._stop)
