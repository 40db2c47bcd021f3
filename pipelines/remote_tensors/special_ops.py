"""Implement operations that take more than one command, such as copies between devices."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from flowchan.pipelines.remote_tensors.device_table import client_at
from flowchan.pipelines.remote_tensors.introductions import introduce
from flowchan.pipelines.remote_tensors.node_client import NodeClient
from flowchan.pipelines.remote_tensors.node_copies import can_copy
from flowchan.pipelines.remote_tensors.remote_tensor import (
    RemoteTensor,
    call,
    new_tensor,
    on_one_node,
    ordinary,
    run_and_ask,
    upload,
)
from flowchan.pipelines.remote_tensors.templates import OpPlan, handlers, meta_of

aten = torch.ops.aten


def _scalar(plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Fetch the value of a tensor with one element."""
    (tensor,) = args
    client = tensor._m.client
    client.before_wait("item()")
    return client.ask("item", tensor._h.id)


def _equal(plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Fetch the result of comparing two tensors."""
    left, right = args
    if tuple(left.shape) != tuple(right.shape):
        return False
    return bool(_scalar(plan, (aten.all.default(aten.eq.Tensor(left, right)),), {}))


def download(tensor: Any) -> torch.Tensor:
    """Fetch the values of a remote tensor into a tensor of this process."""
    values: torch.Tensor = tensor._m.client.ask("fetch", tensor._h.id)
    return values


def _refuse_dtensor() -> None:
    """Raise an error if a ``DTensor`` would silently copy a remote tensor into this process.

    Raises:
        TypeError: Functions that create a ``DTensor`` are among the callers.
    """
    module = sys.modules.get("torch.distributed.tensor._api")
    frame = sys._getframe(1) if module is not None else None
    while frame is not None:
        if frame.f_code.co_filename == module.__file__:  # type: ignore[union-attr]
            raise TypeError("DTensor: remote tensors cannot be distributed; copy them with .cpu() first")
        frame = frame.f_back


def _changes(source: torch.Tensor, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a copy that change the tensor. ``.to(device)`` passes all options."""
    same = {
        "dtype": source.dtype,
        "layout": torch.strided,
        "pin_memory": False,
        "memory_format": torch.preserve_format,
    }
    return {
        name: value
        for name, value in options.items()
        if name != "non_blocking" and (name not in same or value != same[name])
    }


def _to_copy(plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Copy a tensor to another device, dtype or memory format."""
    (source,) = args
    options = {name: value for name, value in kwargs.items() if value is not None}
    device = options.pop("device", None)
    if device is not None and device != source.device:
        options = _changes(source, options)
    if type(source) is not RemoteTensor:
        client = client_at(device)
        # Upload a plain tensor directly. Copy any other tensor here first, because the copy has dense strides
        # and, for a zero tensor, real memory.
        plain = not options and source.is_contiguous() and not source._is_zerotensor()
        return upload(client, source if plain else aten._to_copy.default(source, **options))
    if device is None or device == source.device or (device.type == "remote" and device.index is None):
        return ordinary(plan, args, options)
    if device.type == "remote":
        client = client_at(device)
        moved = send_to(client, source)
        return call(aten._to_copy.default, moved, **options) if options else moved
    _refuse_dtensor()
    values = download(source)
    return (
        aten._to_copy.default(values, device=device, **options) if options or device.type != "cpu" else values
    )


def _copy(plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Copy a tensor into another one, also between devices."""
    target, source = args[0], args[1]
    if type(target) is not RemoteTensor:
        target.copy_(download(source))
        return target
    client = target._m.client
    if type(source) is not RemoteTensor:
        if not _replaced(client, target, source):
            call(aten.copy_.default, target, upload(client, source))
    elif source._m.client is client:
        return ordinary(plan, args[:2], {})
    else:
        call(aten.copy_.default, target, send_to(client, source))
    return target


def _replaced(client: NodeClient, target: Any, source: torch.Tensor) -> bool:
    """Upload values in place of an empty tensor, if no other command has used the tensor."""
    id, meta = target._h.id, target._m
    if (
        client.buffer[-2:] != [id, id]
        or source.is_shared()  # type: ignore[no-untyped-call]
        or meta.dtype != source.dtype
        or meta.shape != tuple(source.shape)
        or meta.stride != source.stride()
        or meta.offset != 0
        # The latest command created the target and had no inputs, so the target has no alias.
        or next(client.numbers) != id + 1
    ):
        return False
    client.send("upload", id, source.detach().resolve_conj().resolve_neg())
    return True


def send_to(client: NodeClient, source: Any) -> Any:
    """Copy a tensor directly from its node to another node."""
    sender = source._m.client
    if not (can_copy(sender.place) and can_copy(client.place)):
        return upload(client, download(source))
    out, number = next(sender.numbers), next(client.numbers)
    for one, issued in ((sender, out), (client, number)):
        one.sites.note(issued, sys._getframe(1))
    key = f"{client.id}:{number}"
    # The node copies the values in the layout that clone() would produce.
    meta = source._m.empty().clone()
    introduce(sender, client)
    sender.send("send", out, source._h.id, client.place.id, key)
    client.send("receive", number, key, sender.place.id)
    return new_tensor(meta_of(client, meta), number)


def _pack_padded_sequence(plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compose the operation from others. As with CUDA, the lengths and batch sizes are on the CPU."""
    return plan.op._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


def _checked(plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Wait for a check of values, and raise its error in this call, as other devices do."""
    client, args, kwargs = on_one_node(plan, args, kwargs)
    return run_and_ask(client, plan, args, kwargs)


def _refused(plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Raise an error for an operator that creates tensors without strides."""
    raise RuntimeError(f"{plan.name}: remote tensors must be strided; call .cpu() before this operation")


REFUSED = (
    "to_sparse",
    "_to_sparse",
    "_to_sparse_csr",
    "_to_sparse_csc",
    "_to_sparse_bsr",
    "_to_sparse_bsc",
    "to_mkldnn",
    "quantize_per_tensor",
    "quantize_per_channel",
    "quantize_per_tensor_dynamic",
)
"""Operators whose results are sparse, quantized or in an MKL-DNN layout."""
handlers.update({f"aten::{name}": _refused for name in REFUSED})

handlers.update(
    {
        "aten::_pack_padded_sequence": _pack_padded_sequence,
        "aten::_linalg_check_errors": _checked,
        "aten::_local_scalar_dense": _scalar,
        "aten::equal": _equal,
        "aten::_to_copy": _to_copy,
        "aten::copy_": _copy,
    }
)

BY_NAME = ("_to_copy", "copy_", "_local_scalar_dense", "empty.memory_format", "empty_strided")
"""Operators that torch calls with the Python key excluded, so that the device's fallback does not see
them."""

_libraries: list[Any] = []


def register() -> None:
    """Register the kernels of the device type with torch."""

    def fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
        return RemoteTensor.__torch_dispatch__(op, (), args, kwargs)

    make: Any = torch.library.Library
    everything = make("_", "IMPL")
    everything.fallback(fallback, "PrivateUse1")
    library = make("aten", "IMPL")
    for name in BY_NAME:
        base, _, overload = name.partition(".")
        op = getattr(getattr(aten, base), overload or "default")

        def kernel(*args: Any, _op: Any = op, **kwargs: Any) -> Any:
            return RemoteTensor.__torch_dispatch__(_op, (), args, kwargs)

        library.impl(name, kernel, "PrivateUse1")
    _libraries.extend((everything, library))  # torch drops the kernels of a library that is garbage-collected
