"""The table of this process from device index to the client of a node."""

from __future__ import annotations

import os
import threading
from typing import Any

import torch

from flowchan.pipelines.remote_tensors.node_client import NodeClient


class CurrentDevice(threading.local):
    """The index that ``device="remote"`` means in a thread, without the C++ part."""

    index = 0

    def current_device(self) -> int:
        """Return the index."""
        return self.index

    def set_device(self, index: int) -> None:
        """Set the index."""
        self.index = index

    def set_device_count(self, count: int) -> None:
        """Do nothing: torch's guard for devices in Python has one device."""


guard: Any = CurrentDevice()
"""What knows the current device: the C++ part if there is one, so that torch's own device guards set it."""
_clients: list[NodeClient | None] = []
_changing = threading.Lock()


def free_index(count: int) -> int:
    """Return the first of ``count`` consecutive device indices that are free."""
    with _changing:
        first = next(index for index in range(len(_clients) + 1) if not any(_clients[index : index + count]))
        if first + count > 127:
            raise ValueError(f"RemoteNodes: torch allows 127 devices, and {first + count} are needed")
        _clients.extend([None] * (first + count - len(_clients)))
        guard.set_device_count(len(_clients))
        return first


def set_client(index: int, client: NodeClient | None) -> None:
    """Set or remove the client of a device index."""
    _clients[index] = client


def client_at(device: torch.device) -> NodeClient:
    """Return the client of a device.

    Raises:
        RuntimeError: No node has this device.
    """
    index = guard.current_device() if device.index is None else device.index
    client = _clients[index] if index < len(_clients) else None
    if client is None:
        known = ", ".join(str(one.device) for one in _clients if one) or "none"
        raise RuntimeError(f"{device}: no node has this device (devices: {known}); start RemoteNodes first")
    return client


def clients() -> list[NodeClient]:
    """Return the clients of all devices of this process. A fork has none."""
    return [one for one in _clients if one is not None and one.pid == os.getpid()]


def device_count() -> int:
    """Return the number of device indices in use or free."""
    return len(_clients)
