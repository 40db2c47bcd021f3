"""Connect to other programs' runs on this machine, for ``flowchan top`` and ``flowchan peek``.

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
from flowchan.run.observe.view_socket import is_same_user, socket_prefix
from flowchan.run.policy.stats import RunStats

ANSWER_S = 10.0
"""Time limit for the next line from a program, in seconds."""
MOMENT_S = 0.01
"""Time limit for reading a line that should have arrived already, in seconds."""


class ViewError(Exception):
    """Raised if a run cannot be shown."""


class NoAnswer(ViewError):
    """Raised if the program of a run has not answered in time."""


class ViewedRun:
    """Connection to a run of another program.

    Args:
        name: Name of the run, which is part of its socket's name.

    Raises:
        OSError: No program of this user has a socket with this name.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(ANSWER_S)
            self._socket.connect(f"\0{socket_prefix()}{name}")
            if not is_same_user(self._socket):
                raise PermissionError(f"run {name} belongs to another user")
            self._lines = self._socket.makefile("rb")
        except BaseException:
            self._socket.close()
            raise

    def answers_by(self, limit: float) -> None:
        """Wait for further lines from the program only until the monotonic time ``limit``."""
        self._socket.settimeout(max(MOMENT_S, limit - time.monotonic()))

    def hello(self) -> dict[str, Any]:
        """Return the first message, which describes the run.

        Raises:
            ViewError: The program does not answer, rejects this user, or uses another protocol.
        """
        message = self._next()
        if message is None:
            raise ViewError(f"run {self.name} has ended, or its program refuses this user")
        if message.get("schema") != SCHEMA:
            raise ViewError(
                f"run {self.name} belongs to a program that uses another version of flowchan; "
                "run the command from that version"
            )
        return message

    def statistics(self) -> Iterator[RunStats]:
        """Yield the run's statistics until it ends.

        Raises:
            ViewError: The program does not answer, or was killed.
        """
        while message := self._next():
            if message["event"] == "end":
                return
            if message["event"] == "stats":
                yield from_json(message["stats"])
        raise ViewError(f"the program of run {self.name} exited before the run ended")

    def items(self, channel: str, count: int) -> Iterator[dict[str, Any]]:
        """Yield the state of a channel, and then its next items. The items stay in the channel.

        Args:
            channel: Name of the channel.
            count: Number of items.

        Yields:
            Messages of the program, as ``flowchan.run.observe.item_viewer`` sends them.

        Raises:
            ViewError: The run has no such channel, or its program does not answer or was killed.
        """
        request = {"peek": channel, "count": count}
        with contextlib.suppress(OSError):  # the run has ended; no message follows
            self._socket.sendall(json.dumps(request).encode() + b"\n")
        while message := self._next():
            match message["event"]:
                case "refused":
                    raise ViewError(message["why"])
                case "channel":
                    self._socket.settimeout(None)  # the next item may come much later
                    yield message
                case "item":
                    yield message
                case "end":
                    return
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
    """Connect to the runs of this user.

    Args:
        chosen: Process ID of a program, or name of a run, to which the search is limited (default: all runs).

    Returns:
        The connections, sorted by process ID.
    """
    found = []
    for name in sorted(run_names(), key=lambda name: [int(part) for part in name.split("-")]):
        if chosen is None or chosen in (name, name.partition("-")[0]):
            with contextlib.suppress(OSError):
                found.append(ViewedRun(name))
    return found


def run_names() -> set[str]:
    """Return the names of the runs that have a socket for viewers."""
    sockets = Path("/proc/net/unix").read_text(errors="replace")
    return set(re.findall(rf" @{socket_prefix()}(\d+-\d+)$", sockets, re.MULTILINE))
