"""Serve the statistics of a run to ``flowchan top`` on a Unix socket.

Algorithm. The supervisor's thread calls :meth:`ViewSocket.poll` whenever the thread is awake. The first call
that is due creates the socket, so a short run creates no socket. Later calls accept connections from viewers.
A run without viewers therefore needs no additional thread, and makes at most one system call every
``POLL_INTERVAL_S`` seconds. Each viewer is a subscriber of the run's feed.

A viewer receives JSON lines: one "hello", then "stats", and finally "end" when the run has ended. The viewer
sends nothing. Writes never block, so a slow viewer misses statistics but does not delay other viewers or the
run. If the program is killed, the connection closes without "end".

Invariants. The folder belongs to the user, and only the user may access it. The peer of a connection is the
same user or root. A forked child closes its copies of the sockets, so the connections close when the program
exits. If a program is killed, its socket file stays behind; the next viewer removes the file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import socket
import stat
import struct
import sys
import time
import weakref
from pathlib import Path
from typing import Any

from flowchan.run.observe.feed import Feed, Subscription
from flowchan.run.observe.stats_json import SCHEMA, to_json
from flowchan.run.policy.failures import text_of
from flowchan.run.policy.stats import RunStats

log = logging.getLogger("flowchan.run")

POLL_INTERVAL_S = 0.1
"""Minimum number of seconds between two checks for new viewers, and before the first check."""
STATS_EVERY_S = 0.5
"""Seconds between two "stats" lines for a viewer."""
END_S = 1.0
"""Time limit for sending the final statistics to a viewer that has kept up, in seconds."""
MOST_RUNS = 1000
"""Maximum number of sockets of one program."""


def view_folders() -> list[Path]:
    """Return the folders that may contain sockets of this user's programs. New sockets go into the first."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    first = [Path(runtime) / "flowchan"] if runtime and is_private(Path(runtime)) else []
    return [*first, Path(os.environ.get("TMPDIR") or "/tmp") / f"flowchan-{os.geteuid()}"]


def is_private(folder: Path) -> bool:
    """Return whether the folder exists, belongs to this user and is inaccessible to others."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


class ViewSocket:
    """Socket of one run.

    Args:
        graph: Name of the graph.
        feed: Feed of the run.
    """

    def __init__(self, graph: str, feed: Feed) -> None:
        self._graph, self._feed = graph, feed
        self._due = time.monotonic() + POLL_INTERVAL_S
        self._listener: socket.socket | None = None
        self._path: Path | None = None
        self._viewers: list[ViewConnection] = []

    def poll(self) -> None:
        """Create the socket or accept viewers, if either is due."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + POLL_INTERVAL_S
        try:
            if self._listener is None:
                self._listen()
            else:
                self._accept(self._listener)
        except (OSError, RuntimeError) as error:  # the run does not depend on its viewers
            if self._path is None:  # no socket could be created
                self._due = math.inf
            log.debug("graph %r cannot be shown by flowchan top: %s", self._graph, text_of(error))

    def _listen(self) -> None:
        folder = view_folders()[0]
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        if not is_private(folder):
            raise PermissionError(
                f"{folder} must be owned by this user and have mode 0700; delete it so that flowchan can "
                "create it again"
            )
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._listener = listener
        _sockets.add(listener)
        for number in range(1, MOST_RUNS):
            path = folder / f"{os.getpid()}-{number}"
            try:
                listener.bind(str(path))
            except OSError:
                if path.exists():  # another run of this program, or of a program in another container
                    continue
                raise
            self._path = path
            listener.listen()
            return
        raise OSError(f"{folder} already has {MOST_RUNS} sockets of this program, which is the maximum")

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = listener.accept()
                _sockets.add(connection)
                if _user_of(connection) in (os.geteuid(), 0):
                    self._viewers = [one for one in self._viewers if not one.has_left]
                    self._viewers.append(ViewConnection(connection, self._feed, self._hello()))
                else:
                    connection.close()

    def _hello(self) -> dict[str, Any]:
        name = "" if self._path is None else self._path.name
        program = " ".join(sys.orig_argv)
        return {"event": "hello", "schema": SCHEMA, "run": name, "graph": self._graph, "program": program}

    def close(self) -> None:
        """Close the socket and its connections. The feed must have ended."""
        if self._listener is None:
            return
        self._listener.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        for viewer in self._viewers:
            viewer.end()


class ViewConnection:
    """Connection to one viewer."""

    def __init__(self, connection: socket.socket, feed: Feed, hello: dict[str, Any]) -> None:
        self._connection = connection
        connection.setblocking(False)
        self._unsent = _line(hello)
        self._missed = False
        self._subscription: Subscription | None = None
        self._subscription = feed.subscribe(stats=self._show, every=STATS_EVERY_S)

    @property
    def has_left(self) -> bool:
        return self._connection.fileno() < 0

    def _show(self, stats: RunStats) -> None:
        """Send statistics, unless the viewer has not read all earlier lines yet."""
        self._send()
        self._missed = bool(self._unsent)
        if not self._missed:
            self._unsent = _line({"event": "stats", "stats": to_json(stats)})
            self._send()

    def _send(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[self._connection.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:  # the viewer has left
            self._connection.close()
            # If subscribe() has not returned yet, the next call closes the subscription.
            if self._subscription is not None:
                self._subscription.close()

    def end(self) -> None:
        """Send the last lines, if the viewer has kept up, and close the connection."""
        with self._connection as connection, contextlib.suppress(OSError):
            if not self._missed:
                connection.settimeout(END_S)
                connection.sendall(self._unsent + _line({"event": "end"}))


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def _user_of(connection: socket.socket) -> int:
    """Return the user ID of the program at the other end of a connection."""
    credentials = struct.Struct("3i")  # process ID, user ID, group ID
    _, user, _ = credentials.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    )
    return int(user)


_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""Sockets of this process, which a forked child must not keep open."""


def _after_fork() -> None:
    for one in list(_sockets):
        one.close()


os.register_at_fork(after_in_child=_after_fork)
