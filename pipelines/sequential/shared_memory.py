"""Put parameters and buffers into memory that the program shares with the processes of its parts.

The program owns the parameters. The optimizer, ``load_state_dict``, ``tensor.data`` and wrappers that reduce
gradients all change the program's tensors, and the processes must compute with the current values. Therefore,
this module moves the memory of the tensors once, in place, into a memfd that each part's process maps. The
tensors stay the same objects. Other tensors that share this memory move as well. A change is immediately
visible on both sides without copying. When a layer in a process writes to its buffers, the program also sees
the change.

Another process opens the memory through ``/proc`` while this process is alive. The kernel frees the memory
when the last process that maps it has ended, even if that process was killed.
"""

from __future__ import annotations

import io
import itertools
import mmap
import os
import pickle
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

ALIGNED = 64
"""Alignment of tensors in bytes, the same as torch's."""

_blocks: dict[int, tuple[int, int, str]] = {}
"""This process's memory blocks by first address: size in bytes, descriptor, and a unique name."""
_mapped: weakref.WeakValueDictionary[str, mmap.mmap] = weakref.WeakValueDictionary()
"""Mappings of another process's blocks, by name."""
_numbers = itertools.count()


def state_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield all parameters and buffers; a tensor that occurs twice is yielded twice."""
    for layer in module.modules():
        for tensor in (*layer._parameters.values(), *layer._buffers.values()):
            if tensor is not None:
                yield tensor


def share(modules: Iterable[nn.Module]) -> None:
    """Move parameters and buffers into shared memory.

    A tensor is not moved if it is already shared, is on a device, or is not a plain tensor.
    """
    found: dict[int, list[Tensor]] = {}
    for module in modules:
        for tensor in state_tensors(module):
            if not is_shared(tensor) and _is_plain(tensor):
                found.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    if not found:
        return
    storages = [tensors[0].untyped_storage() for tensors in found.values()]
    begins = [0, *itertools.accumulate(-(-storage.nbytes() // ALIGNED) * ALIGNED for storage in storages)]
    memory = _new_block(begins[-1])
    with torch.no_grad():
        for storage, tensors, begin in zip(storages, found.values(), begins, strict=False):
            place = torch.frombuffer(memory, dtype=torch.uint8, count=storage.nbytes(), offset=begin)
            _move(storage, tensors, place.untyped_storage())


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.numel() > 0
        and not tensor.is_inference()
        # Leave out memory that torch itself may share with other processes.
        and not tensor.untyped_storage().is_shared()
    )


def _move(storage: Any, tensors: list[Tensor], place: Any) -> None:
    place.copy_(storage)
    if hasattr(storage, "_swap_data_ptr_"):  # also moves all other tensors that share the memory
        storage._swap_data_ptr_(place)
        return
    for tensor in tensors:
        moved = torch.empty(0, dtype=tensor.dtype)
        tensor.data = moved.set_(place, tensor.storage_offset(), tensor.size(), tensor.stride())


class _Block(mmap.mmap):
    """Memory block of this process. The address identifies the block until the block is unmapped.

    A weak reference's callback would run after the memory is unmapped. Before the callback, another thread
    could map a new block at the same address. The callback would then close the descriptor of the new block.
    """

    descriptor = start = -1

    def __del__(self, blocks: dict[int, Any] = _blocks, close: Callable[[int], None] = os.close) -> None:
        """Forget the address. Python calls this before the memory is unmapped."""
        if self.start != -1:
            del blocks[self.start]
        if self.descriptor != -1:
            close(self.descriptor)


def _new_block(size: int) -> mmap.mmap:
    descriptor = os.memfd_create("flowchan parameters", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        memory = _Block(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    memory.descriptor = descriptor
    start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    _blocks[start] = size, descriptor, f"{os.getpid()} {next(_numbers)}"
    memory.start = start
    return memory


def is_shared(tensor: Tensor) -> bool:
    """Return True if the processes of the parts see the tensor's memory."""
    return place_of(tensor) is not None


def place_of(tensor: Tensor) -> tuple[str, int] | None:
    """Return the name of a shared tensor's memory block, and the tensor's offset in the block.

    An address may be reused, but a name is unique.
    """
    start = _block_of(tensor)
    return None if start is None else (_blocks[start][2], tensor.data_ptr() - start)


def _block_of(tensor: Tensor) -> int | None:
    """Return the first address of the block that contains a tensor."""
    if tensor.is_cpu and tensor.layout is torch.strided:
        address = tensor.data_ptr()
        for start, (size, _, _) in tuple(_blocks.items()):
            if start <= address < start + size:
                return start
    return None


@dataclass(frozen=True, slots=True)
class SharedModule:
    """Wrapper that pickles a module for another process.

    The process maps the module's tensors. If ``remote`` is true, the process is on another host and copies
    them.
    """

    module: nn.Module
    remote: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the module so that unpickling returns the module instead of the wrapper."""
        if self.remote:
            return _with_settings, (self.module, settings())
        out = io.BytesIO()
        _Pickler(out, protocol=5).dump(self.module)
        return _unpickled_module, (out.getvalue(), settings())


def settings() -> tuple[Any, ...]:
    """Return torch's process-wide settings that affect the results of layers."""
    return (
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
    )


def _unpickled_module(data: bytes, chosen: tuple[Any, ...]) -> nn.Module:
    _apply_settings(chosen)
    module: nn.Module = pickle.loads(data)
    return module


def _with_settings(module: nn.Module, chosen: tuple[Any, ...]) -> nn.Module:
    _apply_settings(chosen)
    return module


def _apply_settings(chosen: tuple[Any, ...]) -> None:
    """Apply the program's torch settings to this process."""
    default, precision, (deterministic, warn), anomaly = chosen
    torch.set_default_dtype(default)
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(deterministic, warn_only=warn)
    if anomaly != (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()):
        torch.autograd.set_detect_anomaly(*anomaly)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Pickler that writes the location of a shared tensor instead of its values."""

    def reducer_override(self, obj: Any) -> Any:
        start = _block_of(obj) if isinstance(obj, Tensor) else None
        if start is None:
            return super().reducer_override(obj)
        storage = obj.untyped_storage()
        begin = storage.data_ptr() - start
        size, descriptor, name = _blocks[start]
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        shape = obj.dtype, obj.storage_offset(), tuple(obj.size()), obj.stride()
        parameter = obj.requires_grad if isinstance(obj, nn.Parameter) else None
        return _rebuilt, (path, name, size, begin, storage.nbytes(), shape, parameter)


def _rebuilt(
    path: str, name: str, size: int, begin: int, nbytes: int, shape: tuple[Any, ...], parameter: bool | None
) -> Tensor:
    memory = _mapped.get(name)
    if memory is None:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            memory = _mapped[name] = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
    storage = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=begin).untyped_storage()
    kind, *where = shape
    tensor = torch.empty(0, dtype=kind).set_(storage, *where)
    return tensor if parameter is None else nn.Parameter(tensor, parameter)
