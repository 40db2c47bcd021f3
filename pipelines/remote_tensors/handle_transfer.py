"""Transfer remote tensors in channel items: the receiver gets a handle instead of the values.

Algorithm. The sender tells the node to keep the tensor under a name, the *export*. The item contains the
metadata, the command channel of the node, and a *lease*, which is a channel that stays empty. The receiver
tells the node to copy the entry from the export into the receiver's table. The receiver then sends its
operations directly to the node. The program that started the nodes watches the lease (``lease_watch.py``).
When no process and no item refers to the lease any more, the program tells the node to drop the export. An
item can therefore be unpickled any number of times, for example after the death of a worker. An item that is
never read does not leak.

Invariants. The sender registers the lease before it exports, and exports before the item can arrive. The
receiver imports before it releases the lease. All of these messages go through one command channel, and
therefore arrive in this order. Each receiving process also has a lease. When the process exits, the node
drops the table of this process.
"""

from __future__ import annotations

import atexit
import contextlib
import copyreg
import functools
import itertools
import os
import threading
import uuid
import weakref
from typing import Any

import torch

from flowchan import Channel, ChannelError, _core
from flowchan.pipelines.children.child_state import released
from flowchan.pipelines.remote_tensors import device_table, remote_device
from flowchan.pipelines.remote_tensors.command_format import TensorForm
from flowchan.pipelines.remote_tensors.node_client import NodeClient
from flowchan.pipelines.remote_tensors.node_copies import NodePlace
from flowchan.pipelines.remote_tensors.remote_errors import RemoteError
from flowchan.pipelines.remote_tensors.remote_tensor import RemoteTensor, new_tensor
from flowchan.pipelines.remote_tensors.templates import interned
from flowchan.run.crew.at_exit import before_exit
from flowchan.transport import descriptors

REPLIES = 64
"""Capacity of the channel that carries a node's answers to one client."""


class Route:
    """Addresses of one node, for other processes.

    Args:
        nodes: Identifier of the ``RemoteNodes`` object.
        number: Number of the node.
        commands: Command channel of the node.
        leases: Channel to the program that watches the leases.
        place: How other nodes reach the node.
        entrance: Route for processes on other hosts, or None if this process cannot provide one.
    """

    def __init__(
        self,
        nodes: str,
        number: int,
        commands: Channel[Any],
        leases: Channel[Any],
        place: NodePlace,
        entrance: Any = None,
    ) -> None:
        self.nodes, self.number = nodes, number
        self.commands, self.leases, self.place = commands, leases, place
        self._entrance = entrance

    def for_this_item(self, device: torch.device) -> Route:
        """Return the route for the item that this thread is pickling.

        Raises:
            TypeError: The item goes to another host, which cannot reach the node.
        """
        if not descriptors.is_for_another_host() or self.commands.transport.reached_by:
            return self
        if self._entrance is None:
            raise TypeError(
                f"a tensor on {device} cannot be sent to another host from this process; send it from "
                "the program of the nodes, or use RemoteNodes(on=pool)"
            )
        found: Route = self._entrance(self.number)
        return found

    def lease(self, name: str) -> Channel[Any]:
        """Return a new lease. When the lease ends, the node drops the table of the same name."""
        lease = self.commands._another(1)
        self.leases.put((self.number, name, lease))
        self.leases.flush()
        return lease

    def close(self) -> None:
        """Release the channels. Tensors that still exist keep this object alive, but not the descriptors."""
        self.commands = self.leases = released()
        self._entrance, self.place = None, self.place._replace(inbox=None)

    def __reduce__(self) -> tuple[Any, ...]:
        return received_client, (self.nodes, self.number, self.commands, self.leases, self.place)


class Export:
    """Tensors of one node that one item contains."""

    def __init__(self, route: Route) -> None:
        self.route, self.name = route, uuid.uuid4().hex
        self.lease = route.lease(self.name)
        self.tokens = itertools.count()


_exports: weakref.WeakKeyDictionary[descriptors.Parcel, dict[NodeClient, Export]]
_exports = weakref.WeakKeyDictionary()


def reduced(tensor: Any) -> Any:
    """Return the ``__reduce__`` value of a remote tensor.

    A channel item contains a handle. Any other pickle contains the values.
    """
    parcel = descriptors.now.packing
    if parcel is None:
        return tensor.__reduce_ex__(5)
    if tensor.requires_grad and not tensor.is_leaf:
        raise TypeError(
            f"a tensor of shape {tuple(tensor.shape)} is part of an autograd graph "
            f"(grad_fn={type(tensor.grad_fn).__name__}); send tensor.detach()"
        )
    meta, client = tensor._m, tensor._m.client
    client._check()
    exports = _exports.setdefault(parcel, {})
    if client not in exports:
        exports[client] = Export(client.route.for_this_item(tensor.device))
    export = exports[client]
    token = next(export.tokens)
    client.send("export", tensor._h.id, export.name, token)
    client.route.commands.flush()
    is_parameter = getattr(tensor, "_is_param", False)
    marks = tensor.requires_grad, is_parameter
    return arrive, (export.route, export.lease, export.name, token, tuple(meta.form), marks)


def arrive(
    client: NodeClient, lease: Channel[Any], name: str, token: int, form: Any, marks: tuple[bool, bool]
) -> Any:
    """Return the remote tensor for a received handle.

    The caller must keep the lease until this function returns.
    """
    id = next(client.numbers)
    with _node_errors(client.number):
        client.send("import", id, name, token)
        client.route.commands.flush()
    # Flush when the item is finished, so that no operations on the tensor are lost if the worker then exits.
    _core._when_finished(functools.partial(_sent, client))
    tensor: Any = new_tensor(interned(client, TensorForm(*form)), id)
    requires_grad, is_parameter = marks
    if is_parameter:
        tensor._is_param = True
    return tensor.requires_grad_(requires_grad)


@contextlib.contextmanager
def _node_errors(number: int) -> Any:
    """Replace errors of the command channel with errors of the node.

    Otherwise, the code that reads an item would attribute them to the channel that it reads.
    """
    try:
        yield
    except ChannelError as error:
        raise RemoteError(
            f"a tensor of node {number} can't be received: the node has ended", node=number
        ) from error


_clients: dict[tuple[str, int], NodeClient] = {}
_leases: dict[tuple[str, int], Channel[Any]] = {}
"""Leases of the clients that were created for received handles. They end when this process exits."""
_changing = threading.Lock()


def add_client(client: NodeClient, route: Route) -> None:
    """Record the client that this process uses for a node."""
    client.route = route
    _clients[route.nodes, route.number] = client


def remove_client(route: Route) -> None:
    """Forget a client whose nodes were closed."""
    _clients.pop((route.nodes, route.number), None)
    route.close()


def received_client(
    nodes: str, number: int, commands: Channel[Any], leases: Channel[Any], place: NodePlace
) -> NodeClient:
    """Return this process's client for a node. An unknown node becomes a new device."""
    with _changing:
        known = _clients.get((nodes, number))
        if known is not None:
            return known
        remote_device.register()
        _remove_ended()
        index = device_table.free_index(1)
        route = Route(nodes, number, commands, leases, place)
        with _node_errors(number):
            client = NodeClient(
                torch.device("remote", index), number, commands, commands._another(REPLIES), place
            )
            _leases[nodes, number] = route.lease(client.id)
        device_table.set_client(index, client)
        add_client(client, route)
        before_exit(flush_all, 0)
        return client


def _remove_ended() -> None:
    """Free the device indices of received nodes that have exited."""
    for key in list(_leases):
        client = _clients[key]
        if client.route.commands.closed:
            client.close()
            device_table.set_client(client.device.index, None)
            remove_client(client.route)
            del _leases[key]


def _sent(client: NodeClient) -> None:
    with contextlib.suppress(Exception):  # the next operation raises the error
        client.flush()
        client.route.commands.flush()


def flush_all() -> None:
    """Send the commands of all received nodes."""
    for key in list(_leases):
        _sent(_clients[key])


def _after_fork() -> None:
    """Make a forked child create its own clients, because a lease must not outlive its process."""
    global _changing
    _changing = threading.Lock()
    _clients.clear()
    _leases.clear()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(flush_all)
copyreg.pickle(RemoteTensor, reduced)
