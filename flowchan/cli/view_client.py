"""Connect to runs of other programs on this machine, which ``flowchan top`` shows.

``flowchan.run.observe.view_socket`` describes the protocol.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flowchan.run.observe.stats_json import SCHEMA, from_json
from flowchan.run.observe.view_socket import is_private, view_folders
from flowchan.run.policy.stats import RunStats

ANSWER_S = 10.0
"""Maximum wait for the next line from a program, in seconds."""
MOMENT_S = 0.01
"""Seconds in which a line that has already arrived is read."""
STALE_S = 5.0
"""Age in seconds from which a socket file is removed if no program listens on it.

A program that has just created the file may not be listening yet."""


class ViewError(Exception):
    """A run of another program cannot be shown."""


class NoAnswer(ViewError):
    """The program of a run does not answer in time."""


class ViewedRun:
    """Connection to a run of another program.

    Args:
        path: Socket of the run.

    Raises:
        OSError: No program listens on the socket.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(ANSWER_S)
            self._socket.connect(str(path))
            self._lines = self._socket.makefile("rb")
        except BaseException:
            self._socket.close()
            raise

    def answers_by(self, limit: float) -> None:
        """Wait for the program's next lines only until ``time.monotonic()`` reaches ``limit``."""
        self._socket.settimeout(max(MOMENT_S, limit - time.monotonic()))

    def hello(self) -> dict[str, Any]:
        """Return the first message, which describes the run.

        Raises:
            ViewError: The program does not answer, refuses this user or uses another protocol.
        """
        message = self._next()
        if message is None:
            raise ViewError(f"run {self.name} has ended, or its program refuses this user")
        if message.get("schema") != SCHEMA:
            raise ViewError(
                f"run {self.name} belongs to a program that uses another version of flowchan; "
                "run `flowchan top` from that version"
            )
        return message

    def statistics(self) -> Iterator[RunStats]:
        """Yield the statistics of the run until it has ended.

        Raises:
            ViewError: The program does not answer or was killed.
        """
        while message := self._next():
            if message["event"] == "end":
                return
            if message["event"] == "stats":
                yield from_json(message["stats"])
        raise ViewError(f"the program of run {self.name} exited before the run ended")

    def _next(self) -> dict[str, Any] | None:
        try:
            line = self._lines.readline()
        except TimeoutError:
            raise NoAnswer(
                f"the program of run {self.name} has sent nothing for {ANSWER_S:g} s; it may be suspended"
            ) from None
        except ConnectionError:
            return None
        if not line.endswith(b"\n"):
            return None
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        """Close the connection. The run continues."""
        self._lines.close()
        self._socket.close()


def viewed_runs(chosen: str | None = None) -> list[ViewedRun]:
    """Connect to this user's runs, and remove the sockets of killed programs.

    Args:
        chosen: Process ID of a program, or name of a run, to limit the search (default: all runs).

    Returns:
        The connections, sorted by process ID.
    """
    found = []
    for path in sorted(_sockets(), key=lambda path: [int(part) for part in path.name.split("-")]):
        if chosen is None or chosen in (path.name, path.name.partition("-")[0]):
            with contextlib.suppress(OSError):
                try:
                    found.append(ViewedRun(path))
                except ConnectionRefusedError:
                    if time.time() - path.lstat().st_mtime > STALE_S:
                        path.unlink()
    return found


def _sockets() -> Iterator[Path]:
    for folder in view_folders():
        if is_private(folder):
            yield from (path for path in folder.iterdir() if re.fullmatch(r"\d+-\d+", path.name))
