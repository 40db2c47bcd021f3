"""Start and end nodes."""

from __future__ import annotations

import atexit
import contextlib
import operator
import os
import threading
import uuid
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from flowchan import Broken, Channel, Closed, Full, Graph
from flowchan.declare.placements import PlacementOption, placement_argument
from flowchan.hosts import Pool
from flowchan.hosts.pool_channels import Reach, channel_maker, reach_of
from flowchan.items.arguments import pause, whole
from flowchan.pipelines.children import start as start_children
from flowchan.pipelines.remote_tensors import device_table, remote_device
from flowchan.pipelines.remote_tensors.command_progress import CommandProgress
from flowchan.pipelines.remote_tensors.failures_at_exit import report_at_exit
from flowchan.pipelines.remote_tensors.lease_watch import HandleRoutes
from flowchan.pipelines.remote_tensors.node_client import NodeClient
from flowchan.pipelines.remote_tensors.node_copies import NODE_DIED, NodePlace
from flowchan.pipelines.remote_tensors.node_worker import node_main
from flowchan.pipelines.remote_tensors.remote_errors import NodeDied, RemoteError
from flowchan.public import public
from flowchan.run.crew.at_exit import before_exit
from flowchan.transport.interrupts import interrupts_deferred

WAITING = 64
"""Maximum number of messages in a command channel. If the channel is full, the client blocks."""
GRACE_S = 2.0
"""Maximum seconds for the last commands after an exception has left the ``with`` block."""


@public
class NodeStats(NamedTuple):
    """Counters of one node, for one process.

    Attributes:
        node: Number of the node.
        commands: Number of commands that the node has run for this process.
        misses: Number of operations with metadata that the client had not seen before.
        waits: Number of answers that this process waited for.
        tensors: Number of tensors that the node stores, for all processes and for items in channels.
        uploaded: Bytes of tensors that this process has sent to the node.
        downloaded: Bytes of tensors that this process has fetched from the node.
        host: Name of the node's host; empty on the program's machine.
        pid: Process ID of the node on its host.

    Example:
        >>> import torch
        >>> from flowchan.pipelines import RemoteNodes
        >>> with RemoteNodes(1) as nodes:
        ...     x = torch.zeros(3, device=nodes[0])
        ...     nodes.stats()[0].commands > 0
        True
    """

    node: int
    commands: int
    misses: int
    waits: int
    tensors: int
    uploaded: int
    downloaded: int
    host: str
    pid: int


@public
class RemoteNodes(Sequence[torch.device]):
    """Nodes that run torch operations, as devices ``remote:0``, ``remote:1`` and so on.

    An operation on a tensor of a node returns at once. The node runs the operations later, in order. These
    calls wait for the node: ``.cpu()``, ``item()``, ``bool()``, ``tolist()``, printing, operations whose
    shapes depend on values, and :meth:`sync`. A failed operation raises :class:`RemoteError` at the first
    such call that depends on it.

    Args:
        n: Number of nodes.
        on: Where the nodes run: ``"process"`` (default) or a pool of hosts.
        device: Device on which the nodes run their kernels (default: ``"cpu"``); a list has one device per
            node.

    Raises:
        RuntimeError: This torch version has no backends in Python.
        ValueError: ``n`` is not positive, or ``device`` is a list whose length is not ``n``.

    Example:
        >>> import torch
        >>> from flowchan.pipelines import RemoteError, RemoteNodes
        >>> with RemoteNodes(2) as nodes:
        ...     a = torch.ones(2, 2, device=nodes[0])
        ...     b = (a + 1).to(nodes[1])
        ...     (b @ b).sum().item()
        32.0

        ``sync()`` waits, and raises the failures that the program has not seen:

        >>> with RemoteNodes(2) as nodes:
        ...     nodes.manual_seed(7)
        ...     nodes.strict("warn")  # name the lines that wait
        ...     table, places = torch.ones(4, device=nodes[0]), torch.tensor([7], device=nodes[0])
        ...     rows = table[places]
        ...     try:
        ...         nodes.sync(timeout=60)
        ...     except RemoteError as error:
        ...         print(error.operation, error.node)
        ...     "children" in nodes.report(), nodes.stats()[1].commands
        ...     nodes.close()
        aten::index.Tensor 0
        (True, 0)
    """

    def __init__(
        self, n: int, *, on: PlacementOption = "process", device: str | torch.device | Sequence[Any] = "cpu"
    ) -> None:
        whole("RemoteNodes", "n", n, 1)
        single = isinstance(device, (str, torch.device))
        devices: list[Any] = [device] * n if single else list(device)  # type: ignore[arg-type]
        if len(devices) != n:
            raise ValueError(f"RemoteNodes: device must be one device or a list of {n}, got {len(devices)}")
        devices = [torch.device(one) for one in devices]  # raises errors before any node starts
        remote_device.register()
        placement = placement_argument("RemoteNodes", on)
        make = channel_maker(placement)
        reach: Reach | None = None
        if isinstance(placement, Pool):
            reach = reach_of(placement)
        self._first = device_table.free_index(n)
        self._n, self._closed, self._pid = n, False, os.getpid()
        threads = max(1, torch.get_num_threads() // n)
        commands = [make(WAITING) for _ in range(n)]
        try:
            self._kids = start_children(n, on=on)
        except BaseException:
            for number in range(n):
                device_table.set_client(self._first + number, None)
            raise
        self._clients: list[NodeClient] = []
        self._watchers: list[threading.Thread] = []
        for number in range(n):
            kid = self._kids[number + 1]
            progress = None if reach else CommandProgress()
            place = NodePlace(uuid.uuid4().hex, None if reach else make(WAITING), reach)
            kid.run(node_main, number, commands[number], place.inbox, str(devices[number]), threads, progress)
            index = torch.device("remote", self._first + number)
            client = NodeClient(index, number, commands[number], make(WAITING), place)
            client.kernels = devices[number].type
            client.progress = progress
            self._clients.append(client)
            device_table.set_client(self._first + number, client)
            watcher = threading.Thread(
                target=_watch,
                args=(kid, client, commands[number], self._clients),
                daemon=True,
                name="flowchan node watch",
            )
            watcher.start()
            self._watchers.append(watcher)
        self._routes = HandleRoutes(uuid.uuid4().hex, self._clients, commands, make(WAITING))
        _started.add(self)
        if reach is not None:  # register again, to run before functions of the provider
            atexit.unregister(_kill_at_exit)
            atexit.register(_kill_at_exit)
        before_exit(_kill_at_exit, 102)  # runs before pools and runs are closed
        report_at_exit()

    def __getitem__(self, number: Any) -> Any:
        """Return the device of a node."""
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(self._n))]
        number = operator.index(number)
        if not -self._n <= number < self._n:
            raise IndexError(f"RemoteNodes: node must be below {self._n}, got {number}")
        return torch.device("remote", self._first + number % self._n)

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[torch.device]:
        return (self[number] for number in range(self._n))

    @property
    def graph(self) -> Graph:
        """Graph in which the nodes form a stage."""
        return self._kids.graph

    def report(self) -> str:
        """Return the report of the nodes' run."""
        return self._kids.report()

    def stats(self) -> list[NodeStats]:
        """Wait for all commands to finish, then return each node's counters for this process.

        Returns:
            One :class:`NodeStats` for each node, in the order of the nodes.
        """
        found = []
        for client in self._clients:
            kid = self._kids[client.number + 1]
            commands, tensors, uploaded, downloaded = client.ask("stats")
            counters = commands, client.misses, client.waits, tensors, uploaded, downloaded
            found.append(NodeStats(client.number, *counters, kid.host, kid.pid))
        return found

    def strict(self, mode: str) -> None:
        """Choose the effect of hidden waits, such as ``item()``, ``bool()`` and printing.

        Args:
            mode: ``"off"`` (the wait is silent), ``"warn"`` or ``"error"``.

        Raises:
            ValueError: The mode is unknown.
        """
        if mode not in ("off", "warn", "error"):
            raise ValueError(f"strict: mode must be 'off', 'warn' or 'error', got {mode!r}")
        for client in self._clients:
            client.strict = mode

    def manual_seed(self, seed: int) -> None:
        """Seed the random number generators of all nodes with the same seed, as ``torch.manual_seed`` does.

        Args:
            seed: The seed.
        """
        for client in self._clients:
            client.send("seed", next(client.numbers), seed)

    def sync(self, timeout: float | None = None) -> None:
        """Wait until all nodes have run all commands.

        Args:
            timeout: Seconds to wait for each node (default: no limit).

        Raises:
            RemoteError: An operation has failed, and its failure has not been raised yet.
            NodeDied: A node has died.
            TimeoutError: A node did not answer in time.
        """
        pause("sync", "timeout", timeout)
        _raise_first(self._failures(timeout))

    def _failures(self, timeout: float | None = None) -> list[RemoteError]:
        """Wait for all commands to finish, then return the deaths and failures not raised yet."""
        found: list[Any] = []
        for client in self._clients:
            with contextlib.suppress(NodeDied):  # the loop below also finds this death
                client.try_flush()
        for client in self._clients:
            try:
                found.extend((client, failure) for failure in client.failures(timeout))
            except NodeDied as death:
                found.append((client, death))
        # Create the errors only now, so that failures of other nodes are not lost in a timeout.
        return [one if isinstance(one, NodeDied) else client.error_of(one) for client, one in found]

    def close(self) -> None:
        """End the nodes after their last commands. Further calls have no effect.

        Raises:
            RemoteError: An operation has failed, and its failure has not been raised yet.
        """
        self._close()

    def _close(self, timeout: float | None = None) -> None:
        if self._closed or self._pid != os.getpid():  # a forked process must not end the nodes of its parent
            return
        self._closed = True
        known = [client.number for client in self._clients if client.death_raised]
        finished = False
        try:
            failures = self._failures(timeout)
            finished = True
        finally:
            with interrupts_deferred():
                self._end(kill=not finished)
        _raise_first([one for one in failures if not (isinstance(one, NodeDied) and one.node in known)])

    def _end(self, kill: bool) -> None:
        """End the nodes. If ``kill`` is true, do not wait for the running commands."""
        if kill:
            for client in self._clients:
                client.closed = True  # keeps the watching thread from recording a death
            self._kids._started.kill()
        self._routes.close()
        for number, client in enumerate(self._clients):
            client.close()
            device_table.set_client(self._first + number, None)
        self._kids.close()
        for watcher in self._watchers:
            watcher.join()

    def __enter__(self) -> RemoteNodes:
        return self

    def __exit__(self, kind: Any, error: Any, where: Any) -> None:
        if error is None:
            self.close()
            return
        try:
            self._close(GRACE_S)
        except RemoteError as failure:
            error.add_note(f"also failed: {failure}")
        except TimeoutError:
            pass  # the exception from the block takes precedence over unfinished commands

    def __repr__(self) -> str:
        return f"<RemoteNodes {self[0]} to {self[-1]}>" if self._n > 1 else f"<RemoteNodes {self[0]}>"


_started: weakref.WeakSet[RemoteNodes] = weakref.WeakSet()
"""Nodes that this process has started."""


@atexit.register
def _kill_at_exit() -> None:
    """Kill the nodes that the program did not close, because nothing can use their results any more.

    Functions that the program has registered with ``atexit`` run earlier, and can therefore still use the
    nodes.
    """
    for nodes in list(_started):
        if not nodes._closed and nodes._pid == os.getpid():
            nodes._closed = True
            nodes._end(kill=True)


def _raise_first(failures: list[RemoteError]) -> None:
    """Raise the first failure, with the other failures as notes."""
    if not failures:
        return
    first, *others = failures
    for other in others:
        first.add_note(f"also failed: {str(other).splitlines()[0]}")
    raise first


def _watch(kid: Any, client: NodeClient, commands: Channel[Any], peers: Sequence[NodeClient]) -> None:
    """Wait until a node ends. Then close its channels, so that neither calls nor other nodes wait for it."""
    try:
        kid.wait()
    except Exception as error:
        if not client.closed:
            # Drop the traceback, because its frames would keep the channels alive.
            client.died(error.with_traceback(None))
    commands.close()
    client.close_inbox()
    if client.death is None:
        return
    message = NODE_DIED, (client.place.id, tuple(client.death_failure()))
    # Another process may have introduced this node to any node on this machine.
    inboxes = [peer.place.inbox for peer in peers if peer is not client and peer.place.inbox is not None]
    waiting = [*client.introduced.values()]
    waiting += [inbox for inbox in inboxes if inbox not in waiting]
    for timeout in (0, None):  # a busy node must not delay the message to others
        for inbox in list(waiting):
            with contextlib.suppress(Full):
                with contextlib.suppress(Closed, Broken):
                    inbox.put(message, timeout)
                waiting.remove(inbox)
