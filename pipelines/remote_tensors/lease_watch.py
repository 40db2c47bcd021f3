"""Watch the leases of remote tensors in the program that started the nodes.

All users of a lease share one open file description of its memory. While an item contains the lease, the
kernel also refers to this description. A lock on the file shows whether the description is still open
(``flowchan/remote/orphans.py``). If the nodes run on other hosts, this program owns the lease, and its server
keeps the lease for remote users.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from flowchan import Channel, ChannelError, Empty
from flowchan.pipelines.children.child_state import released
from flowchan.pipelines.remote_tensors.handle_transfer import Route, add_client, remove_client
from flowchan.pipelines.remote_tensors.node_client import NodeClient
from flowchan.pipelines.remote_tensors.node_copies import NodePlace
from flowchan.remote.orphans import OrphanMemory, Orphans

CHECK_INTERVAL_S = 0.05
"""Seconds between checks for leases that have ended."""
WAITING = 64
"""Maximum number of messages in a channel. If the channel is full, the sender blocks."""


class LeaseWatch:
    """Thread that tells nodes to drop each table whose lease has ended.

    Args:
        leases: Channel that carries the node's number, the table's name and the lease.
        drop: Function ``(number, name)`` that tells a node to drop a table.
    """

    def __init__(self, leases: Channel[Any], drop: Callable[[int, str], None]) -> None:
        self.leases = leases
        self._drop = drop
        self._held: list[tuple[int, str, Orphans]] = []
        self._thread = threading.Thread(target=self._run, name="flowchan remote leases", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            try:
                self._hold(*self.leases.get(timeout=CHECK_INTERVAL_S if self._held else None))
            except Empty:
                pass
            except ChannelError:
                return
            if time.monotonic() >= due:
                self._check()
                due = time.monotonic() + CHECK_INTERVAL_S

    def _hold(self, number: int, name: str, lease: Channel[Any]) -> None:
        held = OrphanMemory(lease).dropped(0)
        if held is not None:
            self._held.append((number, name, held))

    def _check(self) -> None:
        ended = [one for one in self._held if one[2].is_unused()]
        if ended:
            self._held = [one for one in self._held if one not in ended]
        for number, name, _ in ended:
            with contextlib.suppress(ChannelError):  # the node has ended
                self._drop(number, name)

    def close(self) -> None:
        """End the thread."""
        self.leases.close()
        self._thread.join()
        self._held.clear()
        self.leases = released()


class HostsEntrance:
    """Entrance through which processes on other hosts reach the nodes on this machine.

    Messages to the nodes pass through this program. The channels are created on first use.

    Args:
        nodes: Identifier of the ``RemoteNodes`` object.
        commands: Command channel of each node.
    """

    def __init__(self, nodes: str, commands: Sequence[Channel[Any]]) -> None:
        self._nodes, self._commands = nodes, commands
        self._lock = threading.Lock()
        self._routes: list[Route] = []
        self._watch: LeaseWatch | None = None
        self._threads: list[threading.Thread] = []

    def route(self, number: int) -> Route:
        """Return the route to a node for processes on other hosts."""
        with self._lock:
            if self._watch is None:
                self._watch = LeaseWatch(Channel(WAITING, across="hosts"), self._drop)
                for one, target in enumerate(self._commands):
                    front: Channel[Any] = Channel(WAITING, across="hosts")
                    self._routes.append(
                        Route(self._nodes, one, front, self._watch.leases, NodePlace("", None, None))
                    )
                    thread = threading.Thread(
                        target=_forward, args=(front, target), name="flowchan remote entrance", daemon=True
                    )
                    thread.start()
                    self._threads.append(thread)
            return self._routes[number]

    def _drop(self, number: int, name: str) -> None:
        # The same channel carries the imports, so the node receives this message after all of them.
        self._routes[number].commands.put((name, "drop"))

    def close(self) -> None:
        """Close the entrance, and end its threads."""
        if self._watch is not None:
            self._watch.close()
        for route in self._routes:
            route.commands.close()
        for thread in self._threads:
            thread.join()
        for route in self._routes:
            route.close()


def _forward(front: Channel[Any], commands: Channel[Any]) -> None:
    with contextlib.suppress(ChannelError):
        for message in front:
            commands.put(message)
    front.close()  # the node has ended


class HandleRoutes:
    """Routes to the nodes of one ``RemoteNodes`` object, and the watch over their leases.

    Args:
        nodes: Identifier of the ``RemoteNodes`` object.
        clients: Client of each node.
        commands: Command channel of each node.
        leases: Channel for leases.
    """

    def __init__(
        self,
        nodes: str,
        clients: Sequence[NodeClient],
        commands: Sequence[Channel[Any]],
        leases: Channel[Any],
    ) -> None:
        self._commands = list(commands)
        self._watch = LeaseWatch(leases, self._drop)
        self._entrance = HostsEntrance(nodes, self._commands)
        self._routes = [
            Route(nodes, number, channel, leases, client.place, self._entrance.route)
            for number, (client, channel) in enumerate(zip(clients, commands, strict=True))
        ]
        for client, route in zip(clients, self._routes, strict=True):
            add_client(client, route)

    def _drop(self, number: int, name: str) -> None:
        self._commands[number].put((name, "drop"))

    def close(self) -> None:
        """End the threads, and release the channels."""
        self._entrance.close()
        self._watch.close()
        self._commands.clear()
        for route in self._routes:
            remove_client(route)
