"""Provide streams and events of nodes, with the interface of ``torch.cuda``.

A node runs all its commands in order, and therefore has exactly one stream. An event marks a position in this
stream. The node reports an event when it reaches the position. All commands with smaller numbers have then
finished.
"""

from __future__ import annotations

from typing import Any

import torch

from flowchan.pipelines.remote_tensors import device_table
from flowchan.pipelines.remote_tensors.device_table import client_at
from flowchan.pipelines.remote_tensors.node_client import NodeClient
from flowchan.pipelines.remote_tensors.special_ops import send_to


class RemoteStream:
    """Command queue of a node. A node has one stream, and all objects for it are equal.

    Args:
        device: Device of the node (default: the current one).

    Attributes:
        device: Device of the node.

    Example:
        >>> import torch
        >>> from flowchan.pipelines import RemoteNodes
        >>> with RemoteNodes(2) as nodes:
        ...     first, second = map(torch.remote.Stream, nodes)
        ...     second.wait_stream(first)  # later operations on node 1 start after those issued to node 0
        ...     second.synchronize()
        ...     second.query()
        True
    """

    def __init__(self, device: Any = None) -> None:
        self._client = client_of(device)
        self.device = self._client.device

    def query(self) -> bool:
        """Return whether the node has run all commands, without waiting."""
        client = self._client
        number, (probe, event) = next(client.numbers), client.probe
        if number == client.finished + 1:  # no command has been issued since the node was found idle
            client.finished = number
            return True
        if number != probe + 1:  # commands have been issued since the latest probe
            event = number
            client.send("event", number)
        client.probe = number, event
        client.note_replies()
        if client.finished < event:
            return False
        client.finished = number
        return True

    def synchronize(self) -> None:
        """Wait until the node has run all commands."""
        self._client.ask("ping")

    def record_event(self, event: RemoteEvent | None = None) -> RemoteEvent:
        """Record an event on this stream, and return it (default: a new event)."""
        event = event or RemoteEvent()
        event.record(self)
        return event

    def wait_event(self, event: RemoteEvent) -> None:
        """Make later commands of this node wait for all commands that were issued before the event.

        The program does not wait. If the event is on another node, this node waits for all commands issued to
        that node so far.
        """
        event.wait(self)

    def wait_stream(self, stream: RemoteStream) -> None:
        """Make later commands of this node wait for all commands issued to another node so far."""
        self.wait_event(stream.record_event())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteStream) and other._client is self._client

    def __hash__(self) -> int:
        return hash(self.device)

    def __repr__(self) -> str:
        return f"<Stream of {self.device}>"


class RemoteEvent:
    """Position in the command queue of a node.

    Args:
        enable_timing: True to let :meth:`elapsed_time` use the event (default: False).

    Example:
        >>> import torch
        >>> from flowchan.pipelines import RemoteNodes
        >>> with RemoteNodes(1) as nodes:
        ...     event = torch.remote.current_stream().record_event()
        ...     event.synchronize()
        ...     event.query()
        True
    """

    def __init__(self, enable_timing: bool = False) -> None:
        self._timed = enable_timing
        self._client: NodeClient | None = None
        self._number = 0
        self._time = 0.0

    def record(self, stream: RemoteStream | None = None) -> None:
        """Set this event to the position after the latest command of a stream (default: the current stream).

        A second call moves the event to the new position.
        """
        self._client = client = (stream or current_stream())._client
        self._number = number = next(client.numbers)
        if self._timed:
            client.timed[number] = self
        client.send("event", number)

    def query(self) -> bool:
        """Return whether the node has reached the event, without waiting; True before the first record."""
        if self._client is None:
            return True
        if self._client.finished < self._number:
            self._client.note_replies()
        return self._client.finished >= self._number

    def synchronize(self) -> None:
        """Wait until the node has reached the event."""
        if self._client is not None:
            self._client.wait_finished(self._number)

    def wait(self, stream: RemoteStream | None = None) -> None:
        """Make a stream (default: the current one) wait, like :meth:`RemoteStream.wait_event`."""
        target = (stream or current_stream())._client
        if self._client is not None and self._client is not target and not self.query():
            # Copy an empty tensor to synchronize the streams: the receiver of a copy waits for the sender.
            send_to(target, torch.empty(0, device=self._client.device))

    def elapsed_time(self, end: RemoteEvent) -> float:
        """Wait for both events, and return the milliseconds from this event to ``end`` on their node.

        Raises:
            ValueError: An event has no time or was not recorded, or the events are on different nodes.
        """
        for event in (self, end):
            if not event._timed:
                raise ValueError("elapsed_time: both events must be timed; use Event(enable_timing=True)")
            if event._client is None:
                raise ValueError("elapsed_time: both events must be recorded; call record() first")
        if self._client is not end._client:
            assert self._client is not None
            assert end._client is not None
            raise ValueError(
                f"elapsed_time: both events must be on one node, got {self._client.device} and "
                f"{end._client.device}; their clocks may differ"
            )
        self.synchronize()
        end.synchronize()
        return 1000 * (end._time - self._time)

    def arrived(self, number: int, time: float) -> None:
        """Record when the node reached the event, unless the event was recorded again."""
        if number == self._number:
            self._time = time

    def __repr__(self) -> str:
        return "<Event>" if self._client is None else f"<Event of {self._client.device}>"


def client_of(device: Any) -> NodeClient:
    """Return the client of a device or an index (default: the current device)."""
    if device is None:
        device = device_table.guard.current_device()
    return client_at(torch.device("remote", device) if isinstance(device, int) else torch.device(device))


def current_stream(device: Any = None) -> RemoteStream:
    """Return the stream of a node (default: the current node)."""
    return RemoteStream(device)


class DeviceContext:
    """Context manager that sets the node for ``device="remote"``; used as ``torch.remote.device``.

    Args:
        device: Device of the node; None has no effect.
    """

    def __init__(self, device: Any) -> None:
        self._index = None if device is None else client_of(device).device.index

    def __enter__(self) -> None:
        self._before = device_table.guard.current_device()
        if self._index is not None:
            device_table.guard.set_device(self._index)

    def __exit__(self, *_: object) -> None:
        device_table.guard.set_device(self._before)


class StreamContext(DeviceContext):
    """Context manager that sets the current stream; used as ``torch.remote.stream``.

    Args:
        stream: Stream of a node; None has no effect.
    """

    def __init__(self, stream: RemoteStream | None) -> None:
        super().__init__(None if stream is None else stream.device)
