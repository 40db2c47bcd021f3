"""Run an agent: the process that runs the workers of one run on one host.

``python -m flowchan.hosts.agent`` reads one line of JSON from standard input, dials the driver, and starts a
process for each worker.

Each port of a worker has a separate ring, which the link fills or empties. A remote worker is therefore
recovered like a local worker. When the worker dies, its rings return the items that it was processing, and
the replacement receives these items.

An agent has three threads: one carries out the driver's commands, one maintains the link, and one watches the
worker processes. If an agent hears nothing from the driver for ``peer_timeout`` seconds, it ends with its
workers.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import flowchan.run.graph  # noqa: F401 - for workers, whose code usually imports flowchan.Graph
from flowchan import _core
from flowchan.channel.channel import Channel, In, Out, most_bytes
from flowchan.errors import Broken, Closed, HostError
from flowchan.hosts.agent_messages import (
    AskStacks,
    AskWaits,
    ClockReading,
    Close,
    Command,
    Echo,
    Lacking,
    Leave,
    NewMembership,
    PeerEnded,
    Recover,
    Release,
    Start,
    Waiting,
    WorkerWaits,
    WrittenStack,
    refusal,
    too_large,
)
from flowchan.hosts.code import lacking
from flowchan.hosts.kept_outputs import KeptOutputs
from flowchan.run.crew.process_stacks import stacks_of_processes
from flowchan.run.crew.recovery import take_up
from flowchan.run.crew.worker_processes import WorkerProcesses
from flowchan.run.observe.cgroups import local_cores
from flowchan.run.policy.actions import Terminate
from flowchan.run.policy.events import Failure, ProcessEnded, RequestCancelled, Started, WorkerId
from flowchan.run.policy.failures import Portable
from flowchan.run.worker import logs
from flowchan.run.worker.cancelled_requests import CancelledRequests, use_board
from flowchan.run.worker.gang_membership import Memberships
from flowchan.run.worker.opening import Ports, SharedWithRun, open_ports
from flowchan.transport import link_events
from flowchan.transport.dial import Backoff, reach
from flowchan.transport.link_events import AHEAD, BEHIND
from flowchan.transport.versions import versions


@dataclass(frozen=True)
class Orders:
    """Parameters that the driver sends to a new agent."""

    secret: bytes
    address: str
    number: int
    epoch: int
    peer_timeout: float
    graph: str
    tls: bool
    levels: dict[str, int]  # log levels of the program's loggers

    @classmethod
    def read(cls, line: str) -> Orders:
        """Parse the line that the driver sends. Raise ``ValueError`` if it is malformed."""
        try:
            orders = json.loads(line)
            orders["secret"] = bytes.fromhex(orders["secret"])
            return cls(**orders)
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                "an agent must be started by a run, which sends settings on standard input; declare a "
                "stage with on=pool, or use flowchan run --hosts"
            ) from None


class _PortNames(NamedTuple):
    """Names of the channels for each port of a worker."""

    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    errors: str | None


@dataclass
class _Worker:
    """Worker on this host, with its channels and ports.

    Attributes:
        start: Command that started the worker.
        channels: Channels behind its ports.
        ports: Ends of these channels that the worker's process uses.
        ends: Opposite ends of these channels, which the link uses.
    """

    start: Start
    channels: dict[str, Channel[Any]]
    ports: Ports
    ends: tuple[list[Out[Any]], list[In[Any]]]


class Agent:
    """Runs the workers of one run on this host; see the module docstring."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        commands: Channel[Command] = Channel(1024, across="processes")
        self._events: Channel[Any] = Channel(1024, across="processes")
        self._commands = commands.reader()
        # The link uses these ends of the two channels.
        self._commands_writer, self._reports_reader = commands.writer(), self._events.reader()
        self._workers: dict[WorkerId, _Worker] = {}
        # Channels that carry new memberships to the workers of elastic gangs.
        self._next_memberships: dict[WorkerId, Channel[Any]] = {}
        self._cancelled = CancelledRequests()
        use_board(self._cancelled.path)
        self._processes = WorkerProcesses(orders.graph, self._events, self._report_process_end)
        logs.set_levels(orders.levels)  # before forking, so that workers inherit the levels
        self._link = _core.Link(False)
        self._link.open_stream(0, [self._commands_writer], [self._reports_reader])
        peers = orders.address, orders.secret, orders.tls, orders.peer_timeout
        try:
            self._kept = KeptOutputs(self._link, *peers)
        except OSError as error:
            self._give_up(f"can't listen for other agents: {error.strerror}")

    def run(self) -> None:
        """Carry out commands until the driver reports the end of the run."""
        self._link.attach(self._dial("can't reach the driver").detach())
        for work in (self._keep_link, self._processes.watch, self._kept.serve):
            threading.Thread(target=_or_end, args=(work,), daemon=True).start()
        for command in self._commands:
            if isinstance(command, Leave):
                break
            self._do(command)
        self._processes.end()  # let the workers finish their work
        self._end(0)

    def _end(self, code: int) -> NoReturn:
        self._processes.kill()
        os._exit(code)

    # --- the driver's commands ---

    def _do(self, command: Command) -> None:
        if isinstance(command, Start):
            missing = lacking(command.modules)
            if missing:
                self._events.put(Lacking(command.id, missing))
            else:
                self._start(command)
        elif isinstance(command, NewMembership) and command.worker in self._next_memberships:
            self._next_memberships[command.worker].put(self._reached(command.membership))
        elif isinstance(command, Recover):
            self._recover(self._workers[command.worker], command.blame)
        elif isinstance(command, Terminate):
            self._processes.terminate(command.worker, command.force)
        elif isinstance(command, Echo):
            self._events.put(command)
        elif isinstance(command, ClockReading):
            self._events.put(ClockReading(command.asked, time.monotonic_ns()))
        elif isinstance(command, AskWaits):
            waits = {id: self._waits(worker) for id, worker in self._workers.items()}
            self._events.put(Waiting(command.number, waits))
        elif isinstance(command, AskStacks):
            # Send the stacks in a thread, because a process may take seconds to answer.
            threading.Thread(target=self._send_stacks, args=(command,), daemon=True).start()
        elif isinstance(command, Close) and command.worker in self._workers:
            for port in self._workers[command.worker].ports.everything():
                port.close()
        elif isinstance(command, Release):
            self._release(command.worker)
        elif isinstance(command, RequestCancelled):
            self._cancelled.mark_cancelled(command.question)

    def _start(self, start: Start) -> None:
        if start.id not in self._workers:
            self._workers[start.id] = self._open(start)
        if start.elastic:
            self._next_memberships[start.id] = Channel(1, across="processes")
        ports = self._workers[start.id].ports
        try:
            first = start.membership and self._reached(start.membership)
            memberships = Memberships(first, self._next_memberships.get(start.id))
            pid = self._processes.start(
                start.info, start.stage, ports, start.suspicion, start.gpus, memberships
            )
        except (OSError, HostError) as error:
            self._events.put(Failure(start.id, Portable(error), None, os.getpid()))
        else:
            self._events.put(Started(start.id, pid, start.info.host))

    def _reached(self, membership: Any) -> Any:
        return membership.reached(self._orders.address, self._orders.secret, self._orders.tls)

    def _open(self, start: Start) -> _Worker:
        """Open a worker's rings and ports, and connect the opposite ends to the link."""
        outputs = _named("out", start.outputs)
        if start.errors is not None:
            outputs["errors"] = start.errors
        channels = {key: _open_ring(AHEAD, name, start) for key, name in _named("in", start.inputs).items()}
        channels |= {key: _open_ring(BEHIND, name, start) for key, name in outputs.items()}
        for key in outputs:
            channels[key]._leaves_host()  # its items leave the host, because the link takes all of them
        ports = _open_ports(start, channels)
        fill = [channels[f"in {port}"].writer() for port in start.inputs]
        drain = [port.channel.reader() for port in ports.writers()]
        self._link.open_stream(start.stream, fill, drain, lends=start.keeps_outputs)
        return _Worker(start, channels, ports, (fill, drain))

    def _recover(self, worker: _Worker, blame: bool) -> None:
        old, worker.ports = worker.ports, _open_ports(worker.start, worker.channels)
        take_up(old, worker.ports, blame=blame)
        self._processes.forget(worker.start.id)

    def _waits(self, worker: _Worker) -> WorkerWaits:
        """Report what a worker's threads wait for.

        Only this worker uses its ends of the channels. Every waiting thread therefore belongs to the worker.
        """
        counts: list[int] = []
        reading: dict[str, int] = {}
        writing: dict[str, int] = {}
        about = self._link.state()["streams"].get(worker.start.stream, {})
        # A worker counts as moving while one of its items is being fetched from another host.
        moves = self._processes.ended(worker.start.id) or about.get("staged", 0) > 0
        for key, channel in worker.channels.items():
            stats = channel.stats()
            counts += [stats.items_in, stats.items_out]
            moves = moves or stats.selecting > 0 or stats.woken > 0
            waiting = stats.waiting_readers if key.startswith("in ") else stats.waiting_writers
            if waiting:
                (reading if key.startswith("in ") else writing)[channel._name] = waiting
        return WorkerWaits(reading, writing, tuple(counts), moves)

    def _send_stacks(self, command: AskStacks) -> None:
        known = self._processes.known
        stacks = stacks_of_processes({id: one for id, one in list(known.items()) if id in command.workers})
        with contextlib.suppress(Closed, Broken):
            for id in command.workers:
                self._events.put(WrittenStack(command.number, id, stacks.get(id, "")))

    def _release(self, id: WorkerId) -> None:
        """Drop a worker's rings. A worker process that is still running ends together with the agent."""
        self._processes.give_back_gpus(id)
        self._next_memberships.pop(id, None)
        worker = self._workers.pop(id, None)
        if worker is not None:
            self._link.drop(worker.start.stream)
            for port in (*worker.ports.everything(), *worker.ends[0], *worker.ends[1]):
                port.close()

    def _report_process_end(self, event: ProcessEnded) -> None:
        """Report that a process has ended.

        Reports from the process itself are already in the channel of events.
        """
        worker = self._workers.get(event.worker)
        if worker is not None:
            with contextlib.suppress(Closed, Broken):
                self._events.put(PeerEnded(event.worker, self._processes.exit_of(event.worker, worker.ports)))

    # --- the link ---

    def _keep_link(self) -> None:
        """Watch the link, and dial again when the connection breaks.

        The new connection carries everything that did not arrive over the old one.
        """
        peer_timeout, backoff = self._orders.peer_timeout, Backoff()
        for event in link_events.watch(self._link, peer_timeout / 4):
            match event:
                case link_events.ItemRefused(stream, port):
                    self._refused(stream, port)
                case link_events.ItemTooLarge(stream, port, size):
                    self._too_large(stream, port, size)
                case link_events.OutputToFetch(location=location):
                    self._kept.fetch(location)
                case link_events.LinkBroken(why, stuck, in_vain):
                    if stuck > peer_timeout:
                        self._give_up(f"lost the driver: {link_events.STUCK.format(stuck, why)}")
                    backoff.wait_after_break(in_vain)
                    silent = self._link.state()["heard_ago"]
                    why = f"lost the connection to the driver ({why})"
                    self._link.attach(self._dial(why, silent, stuck).detach())
                case link_events.LinkIdle(silent=silent) if silent > peer_timeout:
                    self._give_up(f"received nothing from the driver for {silent:.1f} s")

    def _on_stream(self, number: int) -> Iterator[_Worker]:
        return (worker for worker in list(self._workers.values()) if worker.start.stream == number)

    def _refused(self, stream: int, port: int) -> None:
        for worker in self._on_stream(stream):
            channel = worker.ends[1][port].channel
            channel.abort(refusal(channel._name, f"from host {worker.start.info.host!r}"))

    def _too_large(self, stream: int, port: int, size: int) -> None:
        for worker in self._on_stream(stream):
            channel = worker.ends[0][port].channel
            assert channel.max_bytes is not None
            channel.abort(too_large(channel._name, worker.start.info.host, size, channel.max_bytes))

    def _dial(self, why: str, silent: float = 0.0, stuck: float = 0.0) -> socket.socket:
        """Connect to the driver, and authenticate both sides.

        If this fails for longer than the peer timeout, the agent ends. ``silent`` is the number of seconds
        that have already passed without a message from the driver. ``stuck`` is the number of seconds for
        which no connection has delivered an item; the hello reports it to the driver.
        """
        orders = self._orders
        about = {"number": orders.number, "epoch": orders.epoch, "stuck": stuck, "cores": local_cores()}
        hello = {**versions(), **about, "outputs": self._kept.address}
        within = max(0.0, orders.peer_timeout - silent)
        try:
            sock, answer, _ = reach(
                orders.address, orders.secret, hello, why=why, within=within, tls=orders.tls
            )
        except OSError as error:
            self._give_up(str(error))
        if answer.get("epochs", {}).get(str(orders.number), orders.epoch) != orders.epoch:
            self._give_up("another agent has replaced this one")
        return sock

    def _give_up(self, why: str) -> NoReturn:
        # If the driver is gone, standard error may have no reader.
        with contextlib.suppress(OSError):
            print(f"flowchan agent {self._orders.number + 1}: {why}; exiting", file=sys.stderr, flush=True)
        self._end(1)


def _named(word: str, ports: Mapping[str, str]) -> dict[str, str]:
    """Prefix the ports with their direction.

    A stage may use one channel as both input and output. The agent then needs two rings for the channel, and
    the prefixes distinguish them.
    """
    return {f"{word} {port}": name for port, name in ports.items()}


def _open_ring(places: int, name: str, start: Start) -> Channel[Any]:
    """Open a ring for the items of the driver's channel ``name``, under the same name."""
    most = min(start.most, most_bytes())
    channel: Channel[Any] = Channel(places, across="processes", max_bytes=most)
    channel._name, channel._share = name, start.share
    return channel


def _open_ports(start: Start, channels: Mapping[str, Channel[Any]]) -> Ports:
    """Open the ports that a worker's process reads and writes."""
    inputs = {port: f"in {port}" for port in start.inputs}
    outputs = {port: f"out {port}" for port in start.outputs}
    names = _PortNames(inputs, outputs, None if start.errors is None else "errors")
    return open_ports(names, channels, SharedWithRun(sampled=start.sampled))


def _or_end(work: Callable[[], None]) -> None:
    """Run ``work``. If ``work`` raises, end the process, because the agent cannot run without this thread."""
    try:
        work()
    except BaseException:
        with contextlib.suppress(OSError):
            traceback.print_exc()
        os._exit(1)


def main() -> None:
    """Run the agent with the parameters from the first line of standard input."""
    # Ignore Ctrl-C and a closed terminal, because the driver handles them and ends the agent.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # This process has loaded no user code, so forking it is safe.
    multiprocessing.set_start_method("fork")
    try:
        orders = Orders.read(sys.stdin.readline())
    except ValueError as error:
        sys.exit(str(error))
    sys.stdin.close()
    Agent(orders).run()


if __name__ == "__main__":
    from flowchan.hosts import agent

    agent.main()  # imported, because the driver cannot unpickle objects of __main__
