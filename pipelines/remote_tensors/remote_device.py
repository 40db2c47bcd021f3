"""Register the device type ``remote`` with torch, and provide the module ``torch.remote``."""

from __future__ import annotations

import threading
from typing import Any

import torch

import flowchan_torch.native
from flowchan.pipelines.remote_tensors import (
    backward_thread,
    device_table,
    local_forms,
    remote_composites,
    remote_tensor,
    special_ops,
)
from flowchan.pipelines.remote_tensors.device_table import client_at, clients, device_count
from flowchan.pipelines.remote_tensors.remote_streams import (
    DeviceContext,
    RemoteEvent,
    RemoteStream,
    StreamContext,
    client_of,
    current_stream,
)


class RemoteModule:
    """Implementation of the module ``torch.remote``."""

    Stream, Event, device, stream = RemoteStream, RemoteEvent, DeviceContext, StreamContext
    current_stream = default_stream = staticmethod(current_stream)

    _initialized = True  # makes torch.utils.checkpoint preserve the state of the random number generators

    def is_available(self) -> bool:
        """Return whether this process has nodes."""
        return bool(clients())

    def is_initialized(self) -> bool:
        """Return True, because the device type needs no initialization."""
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        """Return the number of device indices."""
        return device_count()

    def current_device(self) -> int:
        """Return the device index that ``device="remote"`` stands for in this thread."""
        return int(device_table.guard.current_device())

    def set_device(self, device: Any) -> None:
        """Set the device index that ``device="remote"`` stands for in this thread."""
        index = device if isinstance(device, int) else torch.device(device).index or 0
        device_table.guard.set_device(index)

    def synchronize(self, device: Any = None) -> None:
        """Wait for all commands of a node (default: the current node)."""
        client_of(device).ask("ping")

    def manual_seed(self, seed: int) -> None:
        """Seed the random number generator of the current node."""
        client = client_at(torch.device("remote"))
        client.send("seed", next(client.numbers), seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed the random number generators of all nodes. ``torch.manual_seed`` calls this function."""
        for client in clients():
            client.send("seed", next(client.numbers), seed)

    def get_rng_state(self, device: Any = "remote") -> torch.Tensor:
        """Return the state of a node's random number generator, or an empty tensor if the node is closed.

        ``torch.random.fork_rng()`` saves the states of all device indices.
        """
        if device_table.is_free(_device(device)):
            return torch.empty(0, dtype=torch.uint8)
        state: torch.Tensor = client_at(_device(device)).ask("rng_state")
        return state

    def set_rng_state(self, state: torch.Tensor, device: Any = "remote") -> None:
        """Set the state of a node's random number generator. An empty state changes nothing."""
        if not state.numel():
            return
        client = client_at(_device(device))
        client.send("set_rng_state", next(client.numbers), state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the dtypes for ``torch.autocast``. Operations inside ``torch.autocast`` raise an error."""
        return [torch.bfloat16, torch.float16]


def _device(device: Any) -> torch.device:
    return torch.device("remote", device) if isinstance(device, int) else torch.device(device)


torch_module = RemoteModule()


_registering = threading.Lock()
_registered = False


def register() -> None:
    """Register the device type with torch. Later calls have no effect.

    Raises:
        RuntimeError: This torch version has no Python backends, or another package has registered a device
            type.
    """
    global _registered
    with _registering:
        if _registered:
            return
        from torch.utils import backend_registration

        setup = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
        if setup is None:
            raise RuntimeError(
                f"RemoteNodes: torch must be 2.10 or newer, got {torch.__version__}; install a newer torch"
            )
        guard = flowchan_torch.native.load()
        if guard is None:
            backward_thread.stay_in_calling_thread()
        else:
            # Start the C++ guard, so that torch does not use its own guard for Python devices.
            guard.start(torch_module.synchronize)
            device_table.guard = guard
        setup("remote", torch_module)
        special_ops.register()
        remote_tensor.use_native(flowchan_torch.native.load(flowchan_torch.native.COMMANDS))
        local_forms.register_loading()
        remote_composites.register()
        _registered = True
