"""Map device indices to this process's clients of nodes."""

from __future__ import annotations

import os
import threading
from typing import Any

import torch

from flowchan.pipelines.remote_tensors.node_client import NodeClient


class CurrentDevice(threading.local):
    """Current device index of each thread, for ``device="remote"`` without a number.

    Used if the C++ part is missing.
    """

    index = 0

    def current_device(self) -> int:
        """Return the current device index."""
        return self.index

    def set_device(self, index: int) -> None:
        """Set the current device index."""
        self.index = index

    def set_device_count(self, count: int) -> None:
        """Do nothing, because torch's guard for Python devices knows only one device."""


guard: Any = CurrentDevice()
"""Stores the current device. The C++ part replaces this object, so that torch's device guards also set the
device."""
_clients: list[NodeClient | None] = []
_reserved: set[int] = set()
_changing = threading.Lock()


def free_index(count: int) -> int:
    """Reserve ``count`` consecutive device indices until ``set_client``, and return the first of them."""
    with _changing:
        taken = _reserved | {index for index, client in enumerate(_clients) if client is not None}
        first = next(index for index in range(128) if taken.isdisjoint(range(index, index + count)))
        if first + count > 127:
            raise ValueError(f"RemoteNodes: torch allows 127 devices, but {first + count} are needed")
        _clients.extend([None] * (first + count - len(_clients)))
        guard.set_device_count(len(_clients))
        _reserved.update(range(first, first + count))
        return first


def set_client(index: int, client: NodeClient | None) -> None:
    """Set or remove the client of a device index."""
    with _changing:
        _clients[index] = client
        _reserved.discard(index)


def client_at(device: torch.device) -> NodeClient:
    """Return the client of a device.

    Raises:
        RuntimeError: No node has this device.
    """
    index = guard.current_device() if device.index is None else device.index
    client = _clients[index] if 0 <= index < len(_clients) else None
    if client is None:
        known = ", ".join(str(one.device) for one in _clients if one) or "none"
        raise RuntimeError(f"{device}: no node has this device (devices: {known}); start RemoteNodes first")
    return client


def is_free(device: torch.device) -> bool:
    """Return whether a device index is free because its nodes are closed."""
    return device.index is not None and device.index < len(_clients) and _clients[device.index] is None


def clients() -> list[NodeClient]:
    """Return the clients of all devices of this process. A forked child has none."""
    return [one for one in _clients if one is not None and one.pid == os.getpid()]


def device_count() -> int:
    """Return the number of device indices, including free ones."""
    return len(_clients)
