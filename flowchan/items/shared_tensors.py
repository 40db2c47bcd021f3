"""Transfer tensors in shared memory between processes.

If ``share_memory_()`` has moved a tensor into shared memory, the tensor is sent as a descriptor of that
memory. Every process therefore sees what the others write.

Tensors that a child process has put in shared memory are an exception. The workers of a data loader put every
batch there, but only to transfer it. Such tensors are sent as copies, like ordinary tensors, so that no
channel keeps their descriptors open.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

from flowchan.errors import Broken
from flowchan.transport.descriptors import Beside, Handle, hand_over, now, shortage, take_over

_ancestors: dict[int, frozenset[int]] = {}  # by process id, because a forked child inherits the dictionary
_arrived: set[int] = set()
"""Inodes of shared memory that this process has received from others."""


def is_shared(tensor: Any) -> bool:
    """Return whether the tensor is in memory that several processes of the program share."""
    return _descriptor(tensor.untyped_storage()) is not None and not (tensor.is_conj() or tensor.is_neg())


def is_tensor(value: Any) -> bool:
    """Return whether the value is a plain tensor on the CPU."""
    torch = sys.modules.get("torch")
    return (
        torch is not None and type(value) is torch.Tensor and value.is_cpu and value.layout is torch.strided
    )


def is_storage(value: Any) -> bool:
    """Return whether the value is a torch storage."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.UntypedStorage)


def _descriptor(storage: Any) -> int | None:
    """Return the descriptor of memory that this process, an ancestor or a sender has shared, or None.

    The storage keeps the descriptor open.
    """
    if now.packing is not None and not now.packing.shares:
        return None
    if storage.device.type != "cpu" or not storage.is_shared():
        return None
    import torch.multiprocessing

    if torch.multiprocessing.get_sharing_strategy() != "file_descriptor":  # type: ignore[no-untyped-call]
        return None  # torch would move the tensor to other memory to get a descriptor
    fd = int(storage._share_fd_cpu_()[0])
    if fd < 0:  # the storage is a file that is mapped into memory
        return None
    maker = re.match(r"/dev/shm/torch_(\d+)_", os.readlink(f"/proc/self/fd/{fd}"))
    ours = maker is not None and int(maker[1]) in _pids_of_ancestry()
    return fd if ours or os.fstat(fd).st_ino in _arrived else None


def _pids_of_ancestry() -> frozenset[int]:
    """Return the process IDs of this process and of all its ancestors."""
    pid = os.getpid()
    if pid not in _ancestors:
        found = [pid]
        while found[-1] > 1:
            with open(f"/proc/{found[-1]}/stat") as stat:
                found.append(int(stat.read().rpartition(")")[2].split()[1]))
        _ancestors[pid] = frozenset(found)
    return _ancestors[pid]


def reduce_tensor(tensor: Any) -> Any:
    """Pickle a tensor that :func:`is_shared` accepts."""
    where = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    return _rebuild_tensor, (tensor.untyped_storage(), tensor.dtype, where, tensor.requires_grad)


def _rebuild_tensor(storage: Any, dtype: Any, where: tuple[Any, ...], requires_grad: bool) -> Any:
    import torch

    return torch.empty(0, dtype=dtype).set_(storage, *where).requires_grad_(requires_grad)


def reduce_storage(storage: Any) -> Any:
    """Pickle a storage by its descriptor if it is in shared memory, and by its contents otherwise."""
    fd = _descriptor(storage)
    if fd is None:
        return storage.__reduce_ex__(5)
    return _arrive, (hand_over(fd, -1, storage), storage.nbytes())


def _arrive(handle: Handle, size: int) -> Any:
    import torch

    what = "the memory of a shared tensor"
    if isinstance(handle, Beside):
        if now.beside is None:
            raise Broken(f"pickle can't restore {what} from these bytes; use flowchan.unpack")
        return now.beside[handle.place]
    try:
        fd, _ = take_over(handle)
    except OSError as error:
        if (short := shortage(what, error)) is not None:
            raise short from error
        raise Broken(f"{what} can't be received: its sender has ended") from error
    try:
        _arrived.add(os.fstat(fd).st_ino)
        return torch.UntypedStorage._new_shared_fd_cpu(fd, size)  # type: ignore[attr-defined]
    finally:
        os.close(fd)
