"""Serve a run to ``flowchan top`` and ``flowchan peek`` on a Unix socket.

Algorithm. The supervisor's thread calls :meth:`ViewSocket.poll` whenever it is awake. The first call after
``POLL_INTERVAL_S`` seconds creates the socket. A short run therefore has no socket. Later calls accept
connections from viewers. A run without viewers therefore needs no extra thread, and makes at most one system
call every ``POLL_INTERVAL_S`` seconds. Each viewer is a subscriber of the run's feed.

A viewer receives JSON lines: one "hello", then "stats", and an "end" when the run has ended. Writes never
block: a slow viewer misses statistics, but does not delay other viewers or the run. If the program is killed,
the connection closes without "end".

``flowchan top`` sends nothing. ``flowchan peek`` sends one line, and then receives items of a channel instead
of statistics (``item_viewer.py``).

Invariants. The socket has an abstract name (see unix(7)). A killed program therefore leaves no file behind.
Any user can connect to such a name. For this reason, each side checks that the peer belongs to the same user
or to root. A forked child closes its copies of the sockets, so that the connections close when the program
exits.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import socket
import struct
import sys
import time
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flowchan.channel.channel import Channel
from flowchan.run.observe.feed import Feed, Subscription
from flowchan.run.observe.stats_json import SCHEMA, to_json
from flowchan.run.policy.failures import text_of
from flowchan.run.policy.stats import RunStats

if TYPE_CHECKING:
    from flowchan.run.observe.item_viewer import ItemViewer

log = logging.getLogger("flowchan.run")

POLL_INTERVAL_S = 0.1
"""Minimum time from the start of the run to the first check for viewers, and between checks, in seconds."""
STATS_EVERY_S = 0.5
"""Seconds between "stats" lines to a viewer."""
END_S = 1.0
"""Time limit in seconds for sending the final statistics to a viewer that has read all others."""
MOST_RUNS = 1000
"""Maximum number of sockets per program."""
MOST_REQUEST = 4096
"""Maximum length of a viewer's request in bytes."""


def socket_prefix() -> str:
    """Return the common prefix of the socket names of this user's programs."""
    return f"flowchan-{os.geteuid()}-"


class ViewSocket:
    """Lets viewers connect to one run.

    Args:
        graph: Name of the graph.
        feed: Feed of the run.
        channels: Channels of the run, by name.
    """

    def __init__(self, graph: str, feed: Feed, channels: Mapping[str, Channel[Any]]) -> None:
        self._graph, self._feed, self._channels = graph, feed, channels
        self._due = time.monotonic() + POLL_INTERVAL_S
        self._listener: socket.socket | None = None
        self._name = ""
        self._viewers: list[ViewConnection] = []

    def poll(self) -> None:
        """Create the socket if it does not exist yet; otherwise accept the waiting viewers.

        Do nothing until the next check is due.
        """
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + POLL_INTERVAL_S
        try:
            if self._listener is None:
                self._listen()
            else:
                self._accept(self._listener)
        except (OSError, RuntimeError) as error:  # a failing socket must not affect the run
            if not self._name:  # the socket itself could not be created
                self._due = math.inf
            log.debug("graph %r cannot be shown by flowchan top: %s", self._graph, text_of(error))

    def _listen(self) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.setblocking(False)
        self._listener = listener
        _sockets.add(listener)
        for number in range(1, MOST_RUNS):
            name = f"{os.getpid()}-{number}"
            try:
                listener.bind(f"\0{socket_prefix()}{name}")
            except OSError as error:
                # Another run of this program, or another user's program, already uses this name.
                if error.errno == errno.EADDRINUSE:
                    continue
                raise
            self._name = name
            listener.listen()
            return
        raise OSError(f"this program already has view sockets for {MOST_RUNS} runs, the maximum")

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = listener.accept()
                _sockets.add(connection)
                if is_same_user(connection):
                    self._viewers = [one for one in self._viewers if not one.has_left]
                    self._viewers.append(
                        ViewConnection(connection, self._feed, self._channels, self._hello())
                    )
                else:
                    connection.close()

    def _hello(self) -> dict[str, Any]:
        program = " ".join(sys.orig_argv)
        return {
            "event": "hello", "schema": SCHEMA, "run": self._name, "graph": self._graph, "program": program
        }  # fmt: skip

    def close(self) -> None:
        """Close the socket and its connections. Call this after the feed has ended."""
        if self._listener is None:
            return
        self._listener.close()
        for viewer in self._viewers:
            viewer.end()


class ViewConnection:
    """Connection to one viewer."""

    def __init__(
        self,
        connection: socket.socket,
        feed: Feed,
        channels: Mapping[str, Channel[Any]],
        hello: dict[str, Any],
    ) -> None:
        self._connection, self._channels = connection, channels
        connection.setblocking(False)
        self._unsent = _line(hello)
        self._missed = False
        self._items: ItemViewer | None = None
        self._subscription: Subscription | None = None
        self._subscription = feed.subscribe(stats=self._show, every=STATS_EVERY_S)

    @property
    def has_left(self) -> bool:
        return self._connection.fileno() < 0

    def _show(self, stats: RunStats) -> None:
        """Send statistics, unless the viewer has not read all earlier lines yet."""
        if self._items is None:
            self._send()
            self._receive()
        if self._items is not None or self.has_left:
            # If subscribe() has not returned yet, the next call closes the subscription.
            if self._subscription is not None:
                self._subscription.close()
            return
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

    def _receive(self) -> None:
        """Read the viewer's request, and start to show items if there is one."""
        request = b""
        if not self._unsent:
            with contextlib.suppress(OSError):  # raised if no request has come, or if the viewer has left
                request = self._connection.recv(MOST_REQUEST)
        if request:
            from flowchan.run.observe.item_viewer import ItemViewer  # imported late: few runs need it

            self._items = ItemViewer(self._connection, self._channels, request, _line)

    def end(self) -> None:
        """Send the last lines if the viewer has read the earlier ones, and close the connection."""
        if self._items is not None:
            self._items.end(END_S)
            return
        with self._connection as connection, contextlib.suppress(OSError):
            if not self._missed:
                connection.settimeout(END_S)
                connection.sendall(self._unsent + _line({"event": "end"}))


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def is_same_user(connection: socket.socket) -> bool:
    """Return whether the peer of a connection belongs to this user or to root."""
    credentials = struct.Struct("3i")  # process id, user id, group id
    _, user, _ = credentials.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    )
    return user in (os.geteuid(), 0)


_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""Sockets that a forked child must close."""


def _after_fork() -> None:
    for one in list(_sockets):
        one.close()


os.register_at_fork(after_in_child=_after_fork)
