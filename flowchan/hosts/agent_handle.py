"""The driver's handle of one agent: the provider's process, the link, and the control stream.

Each agent that is started for a host is a new *incarnation*, numbered by its epoch.
"""

from __future__ import annotations

import contextlib
import functools
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from flowchan import _core
from flowchan.channel.channel import Channel
from flowchan.errors import Broken, Closed, Empty, Full
from flowchan.hosts.agent_messages import AgentReport, Command, Leave, Waiting
from flowchan.hosts.providers.provider import AGENT, Launch, Provider, StartedAgent
from flowchan.transport import link_events

START = 60.0
"""Seconds within which an agent must dial, counted from when the provider has placed it."""
POLL_INTERVAL_S = 0.05
"""Seconds between two polls of an agent that is not connected, and of a channel that may be broken while the
last outputs of a worker are on their way."""


class AgentCallbacks(NamedTuple):
    """Callbacks for the events of an agent.

    Attributes:
        report: Takes each report of the agent and its workers.
        finished: Takes the number of a stream whose outputs have all been put.
        refused: Takes the numbers of a stream and of its input port whose item can't leave this machine.
        ends: Reports workers that have ended and whose outputs have all arrived. Returns whether others
            follow.
        over: Called once when the agent is dead, unless the handle was closed before.
        help: Runs the thread functions of the handle within the run.
    """

    report: Callable[[AgentHandle, AgentReport], None]
    finished: Callable[[AgentHandle, int], None]
    refused: Callable[[AgentHandle, int, int], None]
    ends: Callable[[AgentHandle], bool]
    over: Callable[[AgentHandle], None]
    help: Callable[[Callable[[], None]], None]


class AgentHandle:
    """One incarnation of a host's agent.

    It ends when the agent is known to be dead, or has been silent for too long. Then the agent is fenced: its
    connection is closed, new ones are refused, and its messages no longer count.

    Two threads belong to it: one starts and watches the agent, and one receives its reports.
    """

    def __init__(
        self, provider: Provider, number: int, epoch: int, peer_timeout: float, callbacks: AgentCallbacks
    ) -> None:
        self.host = provider.hosts[number]
        self.number, self.epoch = number, epoch
        self.why = ""  # why it ended
        self.has_connected = False
        self.echoed = 0  # number of the last echo
        self.waiting = Waiting(0, {})  # last report of its workers' waits
        self.is_decided = threading.Event()  # the agent has dialled, or has ended
        self._provider, self._peer_timeout = provider, peer_timeout
        self._callbacks = callbacks
        self._address = ""
        self._closed = False  # the run is over: reports and failures of the agent no longer count
        self._refuses_connections = False
        self._lock = threading.Lock()
        self._started: StartedAgent | None = None
        self._threads: list[threading.Thread] = []
        self._commands: Channel[Command] = Channel(1024, across="processes")
        self._events: Channel[AgentReport] = Channel(1024, across="processes")
        self._reports, self._reports_writer = self._events.reader(), self._events.writer()
        self._commands_reader = self._commands.reader()
        self.link = _core.Link(True)
        self.link.open_stream(0, [self._commands_reader], [self._reports_writer])

    def begin(self, name: str, launch: dict[str, Any]) -> None:
        """Start the agent in the background. ``launch`` holds the parameters that it reads."""
        self._address = launch["address"]
        orders = {**launch, "number": self.number, "epoch": self.epoch, "peer_timeout": self._peer_timeout}
        line = json.dumps(orders).encode() + b"\n"
        watch = functools.partial(self._watch, Launch(AGENT, line))
        for work, what in ((watch, "watch"), (self._listen, "letters")):
            title = f"{name} {self.host} {what}"
            thread = threading.Thread(target=self._callbacks.help, args=(work,), name=title, daemon=True)
            thread.start()
            self._threads.append(thread)

    def meet(self, sock: socket.socket) -> None:
        """Attach the connection ``sock`` of the authenticated agent, at the first dial or after a break."""
        with self._lock:
            if self.why or self._refuses_connections:
                sock.close()
                return
            self.link.attach(sock.detach())
            self.has_connected = True
        self.is_decided.set()

    def send(self, command: Command) -> None:
        """Send a command."""
        with contextlib.suppress(Closed, Broken):  # the agent has ended
            self._commands.put(command)

    def hint(self, command: Command) -> None:
        """Send a command that may be lost: it is dropped while the control stream is full."""
        with contextlib.suppress(Closed, Broken, Full):
            self._commands.put_nowait(command)

    def end(self, why: str) -> None:
        """Fence the agent: its messages no longer count."""
        with self._lock:
            if self.why or self._closed:
                return
            self.why = why
        self.link.close()
        self.kill()
        self._commands.close()
        self._reports_writer.close()  # messages that have arrived are still delivered
        self.is_decided.set()

    def kill(self) -> None:
        """Kill the process that holds the agent."""
        if self._started is not None:
            self._started.kill()

    def leave(self) -> None:
        """Tell the agent to end, because the run is over."""
        with self._lock:
            self._closed = True
        self.send(Leave())

    def close(self, give_up: float) -> None:
        """Wait for the agent to end, until ``give_up``, and release everything.

        Call it after the agent has ended or after :meth:`leave`. An agent that has never dialled has nothing
        to finish.
        """
        pause = threading.Event()
        while self.has_connected and not self._has_ended() and time.monotonic() < give_up:
            pause.wait(0.005)
        with self._lock:
            self._refuses_connections = True
        self.link.close()
        self._commands.close()
        self._reports_writer.close()
        self.join()
        if self._started is not None:
            self._started.close()

    def is_closing(self) -> bool:
        """Tell whether one of its threads still runs."""
        return any(thread.is_alive() for thread in self._threads)

    def _has_ended(self) -> bool:
        return self._started is None or self._started.ended() is not None

    def join(self) -> None:
        """Wait for its threads."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    # --- the threads ---

    def _watch(self, launch: Launch) -> None:
        try:
            self._started = self._provider.start(self.number, launch)
        except Exception as error:
            self.end(str(error))
            return
        since = time.monotonic() + START
        why = (
            f"its agent did not connect to {self._address} within {START:g} s; open that address "
            "for the host, or set address= to another address of this machine"
        )
        for event in link_events.watch(self.link, self._peer_timeout / 4, POLL_INTERVAL_S):
            if self.why or self._closed:
                return
            match event:
                case link_events.StreamFinished(stream):
                    self._callbacks.finished(self, stream)
                case link_events.ItemRefused(stream, port):
                    self._callbacks.refused(self, stream, port)
                case link_events.ItemTooLarge():
                    self.end("it sent an item that is larger than the channel's max_bytes")
                case link_events.LinkBroken(why):
                    since = time.monotonic() + 1.5 * self._peer_timeout
                case link_events.LinkIdle(connected=True, silent=silent):
                    if silent > 1.5 * self._peer_timeout:
                        self.end(f"it sent nothing for {silent:.1f} s")
                case link_events.LinkIdle():
                    ended = self._started.ended()
                    if not self.has_connected and self._started.waits():
                        since = time.monotonic() + START
                    if ended is not None or time.monotonic() > since:
                        self.end(ended or why)

    def _listen(self) -> None:
        more = False
        with contextlib.suppress(Closed, Broken):  # the last message has been delivered, or the run is over
            while True:
                report = None
                with contextlib.suppress(Empty):
                    report = self._reports.get(timeout=POLL_INTERVAL_S if more else None)
                if report is not None:
                    self._callbacks.report(self, report)
                    del report
                more = self._callbacks.ends(self)
        if self.why and not self._closed:
            self._callbacks.over(self)
