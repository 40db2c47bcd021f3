"""Handle torch's CUDA tensors for ``transfer.py``.

Copies, streams and events use torch. Shared memory uses the driver directly, with functions that every driver
since CUDA 9 has. Memory from torch's allocator is not used, because some of it, such as expandable segments,
has no handle. Torch's own method of sharing storages is not used either, because torch keeps its reference
counts in files. Like torch, each call uses the device's primary context.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from flowchan.transport.device.arenas import ArenaFull

cuda: Any = torch.cuda  # torch.cuda is only partly typed

LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


class Driver:
    """Calls those functions of ``libcuda`` that torch lacks. A failed call raises ``OSError``."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        calls = self._calls = ctypes.CDLL(library)
        address, context = ctypes.c_uint64, ctypes.c_void_p
        for name, arguments in {
            "cuInit": [ctypes.c_uint],
            "cuDeviceGet": [ctypes.POINTER(ctypes.c_int), ctypes.c_int],
            "cuDevicePrimaryCtxRetain": [ctypes.POINTER(context), ctypes.c_int],
            "cuCtxPushCurrent_v2": [context],
            "cuCtxPopCurrent_v2": [ctypes.POINTER(context)],
            "cuMemAlloc_v2": [ctypes.POINTER(address), ctypes.c_size_t],
            "cuMemFree_v2": [address],
            "cuIpcGetMemHandle": [ctypes.POINTER(IpcHandle), address],
            "cuIpcOpenMemHandle_v2": [ctypes.POINTER(address), IpcHandle, ctypes.c_uint],
            "cuIpcCloseMemHandle": [address],
            "cuGetErrorName": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
        }.items():
            function = getattr(calls, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._do("cuInit", 0)

    def allocate(self, index: int, size: int) -> tuple[int, bytes]:
        """Allocate memory, and return its address and handle."""
        address, handle = ctypes.c_uint64(), IpcHandle()
        with self._device(index):
            self._do("cuMemAlloc_v2", ctypes.byref(address), size)
            try:
                self._do("cuIpcGetMemHandle", ctypes.byref(handle), address)
            except OSError:
                self._do("cuMemFree_v2", address)
                raise
        return address.value, bytes(handle.reserved)

    def open(self, index: int, handle: bytes) -> int:
        address = ctypes.c_uint64()
        with self._device(index):
            self._do(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(address),
                IpcHandle.from_buffer_copy(handle),
                LAZY_PEER_ACCESS,
            )
        return address.value

    def close(self, index: int, address: int) -> None:
        with self._device(index):
            self._do("cuIpcCloseMemHandle", address)

    def _do(self, name: str, *arguments: Any) -> None:
        code = getattr(self._calls, name)(*arguments)
        if code == 0:
            return
        text = ctypes.c_char_p()
        self._calls.cuGetErrorName(code, ctypes.byref(text))
        raise OSError(f"{name}: {(text.value or b'error').decode()} ({code})")

    @contextlib.contextmanager
    def _device(self, index: int) -> Iterator[None]:
        """Make the device's primary context current. The context is retained once and never released."""
        if index not in self._contexts:
            device, context = ctypes.c_int(), ctypes.c_void_p()
            self._do("cuDeviceGet", ctypes.byref(device), index)
            self._do("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._contexts[index] = context
        self._do("cuCtxPushCurrent_v2", self._contexts[index])
        try:
            yield
        finally:
            self._do("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


class DriverMemory:
    """Device memory in a form that torch can use."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3,
        }  # fmt: skip


def write(tensor: Any, memory: Any, offset: int, size: int) -> None:
    """Copy the elements of a dense tensor into bytes, in the order in which they are in memory."""
    with torch.no_grad():
        part = memory[offset : offset + size].view(tensor.dtype)
        part.as_strided(tensor.shape, tensor.stride()).copy_(tensor, non_blocking=True)


def read(memory: Any, offset: int, size: int, form: Any) -> Any:
    """Copy bytes into a new tensor of the given form."""
    dtype, shape, stride, requires_grad = form
    with torch.no_grad():
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device=memory.device)
        tensor.copy_(memory[offset : offset + size].view(dtype).as_strided(shape, stride), non_blocking=True)
    return tensor.requires_grad_(requires_grad)


class TorchDevice:
    """CUDA devices available to this process.

    A device is identified by its UUID, because its number depends on ``CUDA_VISIBLE_DEVICES``. Device memory
    is represented by a ``uint8`` tensor over all its bytes.
    """

    name = "cuda"

    @functools.cached_property
    def _uuids(self) -> list[str]:
        count = cuda.device_count() if cuda.is_available() else 0
        return [f"GPU-{cuda.get_device_properties(index).uuid}" for index in range(count)]

    @functools.cached_property
    def _driver(self) -> Driver:
        if torch.version.hip is not None:
            raise OSError("torch was built for ROCm")
        if importlib.util.find_spec("numpy") is None:
            raise OSError("torch needs NumPy to use the memory of other processes")
        return Driver()

    def visible(self) -> Sequence[str]:
        return self._uuids

    def identity(self, tensor: Any) -> str:
        index = int(tensor.device.index)
        with cuda.device(index):
            if cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "a CUDA graph is being captured on this stream; put the tensor before or after the "
                    "capture"
                )
        return self._uuids[index]

    def allocate(self, device: str, size: int) -> tuple[Any, bytes]:
        index = self._uuids.index(device)
        try:
            address, handle = self._driver.allocate(index, size)
        except OSError:
            try:
                cuda.empty_cache()  # frees cached memory; this waits for the device, but is rarely needed
                address, handle = self._driver.allocate(index, size)
            except OSError as error:
                raise ArenaFull(str(error)) from error
        return self._tensor(index, address, size), handle

    def open(self, device: str, handle: bytes, size: int) -> Any:
        index = self._uuids.index(device)
        cuda.init()
        return self._tensor(index, self._driver.open(index, handle), size)

    def close(self, device: str, memory: Any) -> None:
        self._driver.close(self._uuids.index(device), memory.data_ptr())

    def _tensor(self, index: int, address: int, size: int) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            return torch.as_tensor(DriverMemory(address, size), device=f"cuda:{index}")

    def copy_in(self, tensor: Any, memory: Any, offset: int, size: int) -> None:
        write(tensor, memory, offset, size)
        # Prevent torch from reusing the tensor's memory before the copy is done.
        tensor.record_stream(cuda.current_stream(tensor.device))

    def copy_out(self, device: str, memory: Any, offset: int, size: int, form: Any) -> Any:
        return read(memory, offset, size, form)

    def share_event(self, device: str) -> tuple[Any, bytes]:
        with cuda.device(self._uuids.index(device)):
            event = cuda.Event(interprocess=True)
            return event, event.ipc_handle()

    def open_event(self, device: str, handle: bytes) -> Any:
        return cuda.Event.from_ipc_handle(torch.device("cuda", self._uuids.index(device)), handle)

    def event(self, device: str) -> Any:
        return cuda.Event()

    def record(self, event: Any, device: str) -> None:
        event.record(self._stream(device))

    def wait(self, event: Any, device: str) -> None:
        event.wait(self._stream(device))

    def done(self, event: Any) -> bool:
        return bool(event.query())

    def finish(self, device: str) -> None:
        self._stream(device).synchronize()

    def _stream(self, device: str) -> Any:
        return cuda.current_stream(self._uuids.index(device))

    def to_host(self, tensor: Any) -> Any:
        host = tensor.to("cpu", non_blocking=True)  # non_blocking makes torch use pinned memory
        cuda.current_stream(tensor.device).synchronize()
        return host

    def from_host(self, host: Any, device: str, form: Any) -> Any:
        pinned = host.pin_memory()  # torch keeps this memory until the device has read it
        tensor = pinned.to(torch.device("cuda", self._uuids.index(device)), non_blocking=True)
        return tensor.requires_grad_(form[3])
