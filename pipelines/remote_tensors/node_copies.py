"""Copies between nodes.

Each node reads one inbox. Other nodes put pairs of a key and a tensor into it. A put without waiting stores
the current values, so later changes of the source have no effect. If the inbox is full, the sender clones the
tensor, and a thread puts the clone. A node therefore never waits until another node takes a tensor. It waits
only for tensors that earlier commands have sent, so nodes cannot deadlock.

Nodes on the program's machine have an inbox in shared memory. A node on another host owns its inbox, so
tensors go directly from host to host. If the sender cannot connect to this inbox, it uses a channel of the
program.
"""

from __future__ import annotations

import logging
import queue
import threading
from typing import Any, NamedTuple

import torch

from flowchan import Broken, Channel, Closed, Full, select
from flowchan.hosts import open_channel
from flowchan.pipelines.remote_tensors.remote_failures import RemoteFailure
from flowchan.remote.channel_server import ChannelServer
from flowchan.transport.tcp import joined, route_to

WAITING = 64
"""Maximum number of tensors in an inbox; then a put blocks."""
NODE_DIED = ""
"""Key of a message that reports a dead node. The value is the node's place and failure."""
log = logging.getLogger("flowchan.remote_tensors")


class Reach(NamedTuple):
    """Describe how hosts reach the program, based on the options of their pool.

    Attributes:
        at: Address of the program.
        tls: True if connections are encrypted.
        peer_timeout: Seconds without a sign of life after which a peer counts as lost.
    """

    at: str
    tls: bool
    peer_timeout: float

    def channel(self) -> Channel[Any]:
        """Make a channel of this process that other hosts can reach.

        The channel listens on this process's address on the route to the program.
        """
        address = joined((route_to(self.at), 0))
        return ChannelServer(address, tls=self.tls, peer_timeout=self.peer_timeout).make(WAITING)


class NodePlace(NamedTuple):
    """Describe how other nodes reach a node.

    Attributes:
        id: Identity of the node.
        inbox: Inbox of a node on the program's machine; None for a node on a host.
        reach: How hosts reach the program; None for a node on the program's machine.
    """

    id: str
    inbox: Channel[Any] | None
    reach: Reach | None


# --- in the client ---


def can_copy(place: NodePlace) -> bool:
    """Return whether this process can introduce a node to others.

    A process on another host cannot introduce nodes on the program's machine, so it copies the tensors
    through its own memory.
    """
    return place.inbox is not None or place.reach is not None


# --- in the nodes ---


class Inbox:
    """Tensors that other nodes have sent to this node.

    Args:
        channel: Inbox in shared memory; None on a host.
    """

    def __init__(self, channel: Channel[Any] | None) -> None:
        self._channels = [] if channel is None else [channel]
        self._own: Channel[Any] | None = None
        self._arrived: dict[str, Any] = {}
        self._died: dict[str, RemoteFailure] = {}

    def address(self, reach: Reach) -> tuple[str, bytes, bool]:
        """Return the address, secret and TLS flag of the inbox that this node owns."""
        if self._own is None:
            self._own = reach.channel()
            self._channels.append(self._own)
        return self._own.address, self._own.secret, reach.tls

    def add(self, channel: Channel[Any]) -> None:
        """Also read from a channel of the program."""
        self._channels.append(channel)

    def take(self, key: str, sender: str) -> Any:
        """Wait for the tensor with this key, or for the death of its sender.

        The report of a death arrives after all tensors that the dead node has sent.
        """
        while key not in self._arrived:
            if sender in self._died:
                return self._died[sender]
            name, value = select(self._channels).item
            if name == NODE_DIED:
                self._died[value[0]] = RemoteFailure(*value[1])
            else:
                self._arrived[name] = value
        return self._arrived.pop(key)


class Senders:
    """Inboxes of other nodes, and one thread for each inbox that has been full."""

    def __init__(self) -> None:
        self._peers: dict[str, Channel[Any]] = {}
        self._backlogs: dict[str, queue.Queue[Any]] = {}

    def add(self, peer: str, channel: Channel[Any]) -> None:
        """Set the inbox of a node."""
        self._peers[peer] = channel

    def connect(self, peer: str, address: str, secret: bytes, tls: bool) -> None:
        """Connect to the inbox that a node owns.

        Raises:
            ChannelError: This node cannot connect to the inbox.
        """
        self._peers[peer] = open_channel(address, secret, tls=tls)

    def send(self, peer: str, key: str, value: Any) -> None:
        """Send a tensor or a failure to a node."""
        backlog = self._backlogs.get(peer)
        if backlog is None or not backlog.unfinished_tasks:
            try:
                self._peers[peer].put_nowait((key, value))
                return
            except Full:
                pass
            except (Closed, Broken):  # the client finds out that the node has exited
                return
        if backlog is None:
            backlog = self._backlogs[peer] = queue.Queue()
            threading.Thread(
                target=_put_all, args=(backlog, self._peers[peer]), name="flowchan copies", daemon=True
            ).start()
        backlog.put((key, value.clone() if isinstance(value, torch.Tensor) else value))


def _put_all(backlog: queue.Queue[Any], inbox: Channel[Any]) -> None:
    """Put all tensors of a backlog into an inbox."""
    while True:
        item = backlog.get()
        try:
            inbox.put(item)
        except (Closed, Broken):
            pass
        backlog.task_done()
