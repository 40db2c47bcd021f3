"""Parameters and buffers in memory that the program and the processes of the parts have together.

Who owns a parameter? The program: its optimizer, ``load_state_dict``, ``tensor.data``, a wrapper that reduces
gradients, all change the program's tensors, and a process must compute with what they are now. So the memory
of the tensors is moved, once and in place, into a memfd that each part's process maps. The tensors stay the
same objects, with all that share their memory; a change is seen at once and costs nothing, and each number is
there once. What a layer writes into its buffers in a process is the program's just so.

Another process finds the memory by ``/proc``, as long as this one lives; the kernel takes it back with the
last that maps it, however they end.
"""

from __future__ import annotations

import io
import itertools
import mmap
import os
import pickle
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

ALIGNED = 64
"""Tensors begin at multiples of so many bytes, as where torch allocates them."""

_blocks: dict[int, tuple[int, int, str]] = {}
"""What was moved here: from the first address, how many bytes, the descriptor, and a name that is not used
again."""
_mapped: weakref.WeakValueDictionary[str, mmap.mmap] = weakref.WeakValueDictionary()
"""What is mapped here of another process's memory."""
_numbers = itertools.count()


def state_tensors(module: nn.Module) -> Iterator[Tensor]:
    """All parameters and buffers, those that are there twice as often."""
    for layer in module.modules():
        for tensor in (*layer._parameters.values(), *layer._buffers.values()):
            if tensor is not None:
                yield tensor


def share(modules: Iterable[nn.Module]) -> None:
    """Moves parameters and buffers into shared memory, but for those that are there, on a device, or no plain
    tensors."""
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
        and not tensor.untyped_storage().is_shared()  # with others already, in torch's own way
    )


def _move(storage: Any, tensors: list[Tensor], place: Any) -> None:
    place.copy_(storage)
    if hasattr(storage, "_swap_data_ptr_"):  # then whatever shares the memory goes with it
        storage._swap_data_ptr_(place)
        return
    for tensor in tensors:
        there = torch.empty(0, dtype=tensor.dtype)
        tensor.data = there.set_(place, tensor.storage_offset(), tensor.size(), tensor.stride())


def _new_block(size: int) -> mmap.mmap:
    descriptor = os.memfd_create("flowchan parameters", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        memory = mmap.mmap(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    _blocks[start] = size, descriptor, f"{os.getpid()} {next(_numbers)}"
    weakref.finalize(memory, _forget, start)
    return memory


def _forget(start: int) -> None:
    os.close(_blocks.pop(start)[1])


def is_shared(tensor: Tensor) -> bool:
    """Whether the processes of parts see the tensor's memory."""
    return place_of(tensor) is not None


def place_of(tensor: Tensor) -> tuple[str, int] | None:
    """The name of the memory in which a shared tensor lies, and where in it. An address may come again; a
    name does not."""
    start = _block_of(tensor)
    return None if start is None else (_blocks[start][2], tensor.data_ptr() - start)


def _block_of(tensor: Tensor) -> int | None:
    """The first address of the block in which a tensor lies."""
    if tensor.is_cpu and tensor.layout is torch.strided:
        address = tensor.data_ptr()
        for start, (size, _, _) in tuple(_blocks.items()):
            if start <= address < start + size:
                return start
    return None


@dataclass(frozen=True, slots=True)
class Lent:
    """A module on its way to another process of the program, where its tensors are mapped. ``away``: on
    another host, where they are copied."""

    module: nn.Module
    away: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        """The module itself arrives."""
        if self.away:
            return _told, (self.module, settings())
        out = io.BytesIO()
        _Pickler(out, protocol=5).dump(self.module)
        return _arrived, (out.getvalue(), settings())


def settings() -> tuple[Any, ...]:
    """What the program has told torch for its whole process, as far as it changes what layers compute."""
    return (
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
    )


def _arrived(data: bytes, told: tuple[Any, ...]) -> nn.Module:
    _tell(told)
    module: nn.Module = pickle.loads(data)
    return module


def _told(module: nn.Module, told: tuple[Any, ...]) -> nn.Module:
    _tell(told)
    return module


def _tell(told: tuple[Any, ...]) -> None:
    """Torch of this process."""
    default, precision, (deterministic, warn), anomaly = told
    torch.set_default_dtype(default)
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(deterministic, warn_only=warn)
    if anomaly != (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()):
        torch.autograd.set_detect_anomaly(*anomaly)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Pickles where a shared tensor is in place of its numbers."""

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
