"""Copy tensors between nodes.

Each node reads one inbox. Other nodes put pairs of a key and a tensor into it. A put that does not wait
stores the current values. Later changes to the source therefore have no effect. If the inbox is full, the
sender clones the tensor, and a thread puts the clone. A node therefore never waits for another node to take a
tensor. A node waits only for tensors that earlier commands have sent. Nodes therefore cannot deadlock.

Nodes on the program's machine have an inbox in shared memory. A node on another host owns its inbox. Tensors
therefore go directly from host to host. If the sender cannot connect to this inbox, it uses a channel of the
program.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flowchan import Broken, Channel, Closed, Full, select
from flowchan.hosts import open_channel
from flowchan.hosts.pool_channels import Reach
from flowchan.pipelines.remote_tensors.remote_failures import RemoteFailure

WAITING = 64
"""Maximum number of tensors in an inbox. A put into a full inbox blocks."""
NODE_DIED = ""
"""Key of a message that reports a dead node. The value is the node's place and failure."""
log = logging.getLogger("flowchan.remote_tensors")


class NodePlace(NamedTuple):
    """Description of how other nodes reach a node.

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

    A process on another host cannot introduce nodes on the program's machine. Such a process copies the
    tensors through its own memory.
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
            self._own = reach.channel(WAITING)
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


class Outbox:
    """Writer of a channel whose ``put`` never waits.

    While the channel is full, a thread puts the items in order.

    Args:
        channel: The channel.
    """

    def __init__(self, channel: Channel[Any]) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._waiting: collections.deque[Any] = collections.deque()
        self._thread: threading.Thread | None = None

    def put(self, item: Any, copied: Callable[[Any], Any] = lambda item: item) -> None:
        """Put an item. If the channel is full, put the result of ``copied(item)`` later.

        If the receiver has exited, the call has no effect, because the client notices the exit.
        """
        with self._lock:
            if not self._waiting:
                try:
                    self._channel.put_nowait(item)
                    return
                except Full:
                    pass
                except (Closed, Broken):
                    return
            self._waiting.append(copied(item))
            if len(self._waiting) == 1:
                self._thread = threading.Thread(target=self._put_all, name="flowchan outbox", daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Wait until all items are in the channel. The receiver must be reading."""
        if self._thread is not None:
            self._thread.join()

    def _put_all(self) -> None:
        while self._waiting:
            with contextlib.suppress(Closed, Broken):
                self._channel.put(self._waiting[0])
            with self._lock:
                self._waiting.popleft()
                if not self._waiting:
                    return


class Senders:
    """Inboxes of other nodes, to which this node can send tensors."""

    def __init__(self) -> None:
        self._peers: dict[str, Outbox] = {}

    def add(self, peer: str, channel: Channel[Any]) -> None:
        """Store the inbox of another node."""
        self._peers[peer] = Outbox(channel)

    def connect(self, peer: str, address: str, secret: bytes, tls: bool) -> None:
        """Connect to the inbox that a node owns.

        Raises:
            ChannelError: This node cannot connect to the inbox.
        """
        self.add(peer, open_channel(address, secret, tls=tls))

    def send(self, peer: str, key: str, value: Any) -> None:
        """Send a tensor or a failure to a node. Later changes to the tensor have no effect."""
        self._peers[peer].put((key, value), _cloned)


def _cloned(item: tuple[str, Any]) -> tuple[str, Any]:
    key, value = item
    return key, value.clone() if isinstance(value, torch.Tensor) else value
