"""Manage one agent from the driver: the process that the provider started, the link and the control stream.

Each agent that is started on a host is a new *incarnation*, whose number is called its epoch.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from flowchan import _core
from flowchan.channel.channel import Channel
from flowchan.channel.latch import Latch
from flowchan.errors import Broken, Closed, Empty, Full
from flowchan.hosts.agent_messages import AgentReport, Command, Leave, Waiting
from flowchan.hosts.agent_threads import POLL_INTERVAL_S, AgentThreads
from flowchan.hosts.host_clock import HostClock
from flowchan.hosts.providers.provider import AGENT, Launch, Provider, StartedAgent
from flowchan.transport import link_events
from flowchan.transport.dial import LONGEST

log = logging.getLogger("flowchan.hosts")

START = 60.0
"""Seconds within which an agent must dial after the provider has placed it."""
MOST_REPORTS = 64
"""Reports of one agent that are handled before those of another agent."""


class AgentCallbacks(NamedTuple):
    """Callbacks for an agent's events.

    Attributes:
        report: Receives each report from the agent and its workers.
        finished: Receives the number of a stream whose outputs have all been put.
        not_remade: Receives the numbers of a stream and of an output port, if an item was lost and could not
            be reproduced.
        refused: Receives the numbers of a stream and of an input port whose item cannot leave this machine.
        ends: Reports workers that have ended and whose outputs have all arrived. Returns whether more workers
            are ending.
        late: Returns whether the agent has not killed a worker in time.
        over: Called once when the agent is dead, unless the handle was closed before.
        help: Runs the functions of the handle's threads, and reports their exceptions to the run.
    """

    report: Callable[[AgentHandle, AgentReport], None]
    finished: Callable[[AgentHandle, int], None]
    refused: Callable[[AgentHandle, int, int], None]
    not_remade: Callable[[AgentHandle, int, int], None]
    ends: Callable[[AgentHandle], bool]
    late: Callable[[AgentHandle], bool]
    over: Callable[[AgentHandle], None]
    help: Callable[[Callable[[], None]], None]


class AgentHandle:
    """One incarnation of a host's agent.

    The incarnation ends when the agent is known to be dead or has been silent for too long. The driver then
    fences the agent: it closes the agent's connection, rejects new ones, and ignores all messages.

    ``AgentThreads`` calls :meth:`handle_events` and :meth:`check` on one thread, and :meth:`receive_reports`
    on another.
    """

    def __init__(
        self,
        provider: Provider,
        number: int,
        epoch: int,
        peer_timeout: float,
        callbacks: AgentCallbacks,
        threads: AgentThreads,
    ) -> None:
        self.host = provider.hosts[number]
        self.number, self.epoch = number, epoch
        self.why = ""  # why the agent ended
        self.has_connected = False
        self.echoed = 0  # number of the agent's last echo
        self.clock = HostClock()
        self.waiting = Waiting(0, {})  # the agent's last report of waiting workers
        self.is_decided = Latch()  # set once the agent has dialled or ended
        self._provider, self._peer_timeout = provider, peer_timeout
        self._callbacks = callbacks
        self._address = ""
        # For each direction: how many seconds had passed without an item when the connection last broke.
        self._stuck_here = self._stuck_there = 0.0
        self._why_broken = ""
        # True once the log warns that connections break before any item arrives.
        self._has_warned = False
        self._closed = False  # true if the run is over, so the agent's reports and failures are ignored
        self._refuses_connections = False
        self._lock = threading.Lock()
        self._started: StartedAgent | None = None
        self._starting: threading.Thread | None = None
        # The time at which an agent without a connection counts as lost, and the reason.
        self._give_up_at, self._give_up_why = math.inf, ""
        self._was_connected = False  # whether the link was connected at the last check
        self._connected_at = time.monotonic()  # when the link was last seen connected
        self._happened: deque[link_events.LinkEvent] = deque()  # events for the report thread
        self._unsent: deque[Command] = deque()  # commands that wait for room in the channel
        self._sending: threading.Thread | None = None  # thread that sends the unsent commands
        self._send_lock = threading.Lock()
        self._commands: Channel[Command] = Channel(1024, across="processes")
        self._events: Channel[AgentReport] = Channel(1024, across="processes")
        self._reports, self._reports_writer = self._events.reader(), self._events.writer()
        self._commands_reader = self._commands.reader()
        self.link = _core.Link(True)
        self.link.open_stream(0, [self._commands_reader], [self._reports_writer])
        self._threads = threads
        self._ready = threads.add(self)
        self.link.announce(self._ready, threads.events, threads.reports)

    def begin(self, name: str, launch: dict[str, Any]) -> None:
        """Start the agent in the background. ``launch`` contains the parameters that the agent reads."""
        self._address = launch["address"]
        orders = {**launch, "number": self.number, "epoch": self.epoch, "peer_timeout": self._peer_timeout}
        line = json.dumps(orders).encode() + b"\n"
        work = functools.partial(self._start, Launch(AGENT, line))
        self._starting = threading.Thread(
            target=self._callbacks.help, args=(work,), name=f"{name} {self.host} start", daemon=True
        )
        self._starting.start()

    def meet(self, sock: socket.socket, stuck: float = 0.0, outputs: str = "") -> None:
        """Attach an authenticated connection from an agent that has just started or has lost its connection.

        ``stuck`` is the number of seconds for which every connection has broken before any of the agent's
        items arrived. ``outputs`` is the address at which other agents fetch outputs that this agent keeps.
        """
        with self._lock:
            if self.why or self._refuses_connections:
                sock.close()
                return
            self._note_stuck(self._stuck_here, stuck)
            if not self.has_connected:
                self.link.set_fetch_address(outputs)
            self.link.attach(sock.detach())
            self.has_connected = True
        self.is_decided.set()

    def send(self, command: Command) -> None:
        """Send a command. If the control stream is full, a thread sends the command later."""
        with self._send_lock:
            if self._sending is None:
                try:
                    self._commands.put_nowait(command)
                except (Closed, Broken):  # the agent may have ended
                    return
                except Full:
                    self._sending = threading.Thread(target=self._send_rest, daemon=True)
                    self._sending.start()
                else:
                    return
            self._unsent.append(command)

    def _send_rest(self) -> None:
        """Send the commands that had no room, in order."""
        while True:
            with self._send_lock:
                if not self._unsent:
                    self._sending = None
                    return
                command = self._unsent.popleft()
            with contextlib.suppress(Closed, Broken):
                self._commands.put(command)

    def hint(self, command: Command) -> None:
        """Send an optional command, which is dropped if the control stream is full."""
        with self._send_lock, contextlib.suppress(Closed, Broken, Full):
            if self._sending is None:
                self._commands.put_nowait(command)

    def end(self, why: str) -> None:
        """Fence the agent: ignore its messages from now on."""
        with self._lock:
            if self.why or self._closed:
                return
            self.why = why
        self.link.close()
        self.kill()
        self._commands.close()
        self._reports_writer.close()  # its reader still gets the messages that have arrived
        self._threads.reports.add(self._ready)
        self.is_decided.set()

    def kill(self) -> None:
        """Kill the process in which the agent runs."""
        if self._started is not None:
            self._started.kill()

    def leave(self) -> None:
        """Ask the agent to end, because the run is over."""
        with self._lock:
            self._closed = True
        self.hint(Leave())  # if this message is lost, the agent is killed

    def close(self, give_up: float) -> None:
        """Wait until ``give_up`` for the agent to end, and release everything.

        Call this method after the agent has ended, or after :meth:`leave`. An agent that never dialled has
        nothing to finish, so the method does not wait for it.
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

    def _has_ended(self) -> bool:
        return self._started is None or self._started.ended() is not None

    def join(self) -> None:
        """Wait for the handle's threads to end."""
        for thread in (self._starting, self._sending):
            if thread is not None:
                thread.join()

    def _start(self, launch: Launch) -> None:
        """Start the agent. This runs on a separate thread, because the provider may need much time."""
        try:
            self._started = self._provider.start(self.number, launch)
        except Exception as error:
            self.end(str(error))
            return
        self._connected_at = time.monotonic()
        self._give_up_why = (
            f"its agent did not connect to {self._address} within {START:g} s; open that address to the "
            "host, or set address= to another address of this machine"
        )
        self._give_up_at = self._connected_at + START
        self._threads.events.add(self._ready)

    # --- the thread that watches the links ---

    def handle_events(self) -> float | None:
        """See :class:`ServedAgent`."""
        while not (self.why or self._closed):
            event = link_events.next_event(self.link, 0)
            match event:
                case None:
                    return self._next_check()
                case link_events.LinkClosed():
                    return None
                case link_events.ItemTooLarge():
                    self.end("it sent an item larger than the channel's max_bytes")
                case link_events.LinkBroken(why, stuck):
                    self._give_up_at = time.monotonic() + 1.5 * self._peer_timeout
                    self._give_up_why = self._why_broken = why
                    self._note_stuck(stuck, self._stuck_there)
                    if stuck > self._peer_timeout:
                        self.end(self._stuck_reason())
                case _:
                    self._happened.append(event)
                    self._threads.reports.add(self._ready)
        return None

    def _next_check(self) -> float:
        now = time.monotonic()
        pause = self._peer_timeout / 4
        self._was_connected = bool(self.link.state()["connected"])
        if self._was_connected:
            self._connected_at = now
        else:
            pause = link_events.unconnected_pause(self._connected_at, pause, POLL_INTERVAL_S)
        return now + pause

    def check(self, late: float) -> float | None:
        """See :class:`ServedAgent`."""
        if self.why or self._closed:
            return None
        was_connected = self._was_connected
        self.link.excuse(late)
        at = self.handle_events()
        if at is None:
            return None
        if self._callbacks.late(self):
            self.end(f"it did not kill a worker within {1.5 * self._peer_timeout:g} s")
        # If the connection has just been made or lost, wait for the next check.
        elif was_connected and self._was_connected:
            silent = self.link.state()["heard_ago"]
            if silent > 1.5 * self._peer_timeout:
                self.end(f"it sent nothing for {silent:.1f} s")
        elif not was_connected and not self._was_connected and self._started is not None:
            self._check_unconnected(self._started)
        return None if self.why else at

    def _check_unconnected(self, started: StartedAgent) -> None:
        ended = started.ended()
        if not self.has_connected and started.waits():
            self._give_up_at = time.monotonic() + START
        if ended is not None or time.monotonic() > self._give_up_at:
            reason = f"; {self._stuck_reason()}" if self.is_stuck() else ""
            self.end((ended or self._give_up_why) + reason)

    def is_stuck(self) -> bool:
        """Return whether the last connection broke before any item arrived."""
        return max(self._stuck_here, self._stuck_there) > 0

    def _stuck_reason(self) -> str:
        return link_events.STUCK.format(max(self._stuck_here, self._stuck_there), self._why_broken)

    def _note_stuck(self, here: float, there: float) -> None:
        """Record for how long no item has arrived. Warn once if connections break before any item arrives."""
        self._stuck_here, self._stuck_there = here, there
        if self.is_stuck() and not self._has_warned:
            self._has_warned = True
            log.warning(
                "host %s: the connection broke before any item arrived (%s); the agent reconnects, with "
                "pauses of up to %g s, and gives up when nothing has arrived for %g s",
                self.host, self._why_broken, LONGEST, self._peer_timeout,
            )  # fmt: skip

    # --- the thread that receives reports ---

    def receive_reports(self) -> bool | None:
        """See :class:`ServedAgent`."""
        try:
            while self._happened:
                self._handle_event(self._happened.popleft())
            more = self._callbacks.ends(self)
            for _ in range(MOST_REPORTS):
                try:
                    report = self._reports.get_nowait()
                except Empty:
                    return more
                except (Closed, Broken):
                    raise
                except Exception as error:
                    self.end(f"it sent a report that can't be unpickled: {error!r}")
                    continue
                self._callbacks.report(self, report)
                del report
                more = self._callbacks.ends(self)
        except (Closed, Broken):  # raised after the last report, or when the run is over
            return None
        self._threads.reports.add(self._ready)  # more reports may have arrived
        return more

    def _handle_event(self, event: link_events.LinkEvent) -> None:
        match event:
            case link_events.StreamFinished(stream):
                self._callbacks.finished(self, stream)
            case link_events.ItemRefused(stream, port):
                self._callbacks.refused(self, stream, port)
            case link_events.OutputNotRemade(stream, port):
                self._callbacks.not_remade(self, stream, port)

    def is_lost(self) -> bool:
        """Return whether the agent has ended before the end of the run."""
        return bool(self.why) and not self._closed

    def over(self) -> None:
        """See :class:`ServedAgent`."""
        self._callbacks.over(self)
