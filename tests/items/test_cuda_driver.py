"""Test parts of ``cuda`` that need no device: the layout of tensors in bytes, and calls to a fake driver."""

from __future__ import annotations

import contextlib
import subprocess
from types import SimpleNamespace
from typing import ClassVar

import pytest
from support.tensors import TENSORS

torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
from flowchan.transport.device import arenas, cuda, transfer  # noqa: E402
from flowchan.transport.device.arenas import ArenaFull  # noqa: E402
from flowchan.transport.device.cuda import Driver, TorchDevice, read, write  # noqa: E402

torch_device = torch.device

STUB = """
#include <stdint.h>
#include <string.h>
typedef struct { unsigned char reserved[64]; } IpcHandle;
static uint64_t current, depth, wrong;
int cuInit(unsigned flags) { return flags != 0; }
int cuDeviceGet(int* device, int ordinal) { *device = 100 + ordinal; return ordinal == 7 ? 101 : 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) {
    *context = (void*)(0x7f0000000000 + device);
    return 0;
}
int cuCtxPushCurrent_v2(void* context) { current = (uint64_t)context; depth += 1; return 0; }
int cuCtxPopCurrent_v2(void** context) { *context = (void*)current; depth -= 1; current = 0; return 0; }
int cuMemAlloc_v2(uint64_t* address, size_t size) {
    if (size > 1ull << 40) return 2;
    *address = 0x7f1234000000 + (current & 0xff) + (size == 5ull << 30);
    return current == 0;
}
int cuMemFree_v2(uint64_t address) { return 0; }
int cuIpcGetMemHandle(IpcHandle* handle, uint64_t address) {
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &address, 8);
    handle->reserved[63] = 77;
    return depth != 1;
}
int cuIpcOpenMemHandle_v2(uint64_t* address, IpcHandle handle, unsigned flags) {
    if (flags != 1 || handle.reserved[63] != 77) return 201;
    memcpy(address, &handle, 8);
    *address += 0x1000;
    return 0;
}
int cuIpcCloseMemHandle(uint64_t address) { return address == 0x7f1234001064 ? 0 : 1; }
int cuGetErrorName(int code, const char** name) {
    *name = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY"
          : code == 101 ? "CUDA_ERROR_INVALID_DEVICE" : "CUDA_ERROR_OTHER";
    return 0;
}
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    folder = tmp_path_factory.mktemp("driver")
    (folder / "stub.c").write_text(STUB)
    library = folder / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(folder / "stub.c")], check=True)
    return Driver(str(library))


def test_driver_calls_get_their_arguments(driver):
    """Addresses have 64 bits, handles are passed as 64 bytes by value, and each call is made in the device's
    context."""
    address, handle = driver.allocate(0, 5 << 30)
    assert (address, len(handle)) == (0x7F1234000065, 64)
    address, handle = driver.allocate(0, 64 << 20)
    assert address == 0x7F1234000064
    assert driver.open(0, handle) == address + 0x1000
    driver.close(0, address + 0x1000)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda driver: driver.allocate(0, 2 << 40), r"cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY \(2\)"),
        (lambda driver: driver.open(1, bytes(64)), r"cuIpcOpenMemHandle_v2: CUDA_ERROR_OTHER \(201\)"),
        (lambda driver: driver.allocate(7, 1), r"cuDeviceGet: CUDA_ERROR_INVALID_DEVICE \(101\)"),
    ],
)
def test_driver_errors_name_the_failed_call(driver, call, message):
    with pytest.raises(OSError, match=message):
        call(driver)
    assert driver.allocate(0, 1)[0] == 0x7F1234000064  # the context was restored


def test_missing_driver_raises_an_error():
    with pytest.raises(OSError, match="libnone"):
        Driver("libnone.so.1")


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is a CUDA device: run the test on a machine without one"
)
def test_torch_device_without_devices_lists_none():
    assert TorchDevice().visible() == []


DENSE = {
    name: tensor
    for name, tensor in TENSORS.items()
    if tensor.layout == torch.strided
    and tensor.device.type == "cpu"
    and name not in ("with gaps", "expanded", "conjugated")
}


@pytest.mark.parametrize("name", [name for name in DENSE if DENSE[name].numel()])
def test_tensor_contents_are_written_and_read_as_bytes(name):
    sent = DENSE[name]
    memory = torch.zeros(2 << 20, dtype=torch.uint8)
    size = sent.numel() * sent.element_size()
    write(sent.detach(), memory, 1024, size)
    assert not memory[:1024].any()
    assert not memory[1024 + size :].any()
    form = sent.dtype, tuple(sent.shape), sent.stride(), sent.requires_grad
    arrived = read(memory, 1024, size, form)
    memory.zero_()
    assert (arrived.dtype, arrived.shape, arrived.stride()) == (sent.dtype, sent.shape, sent.stride())
    assert (arrived.requires_grad, arrived.is_leaf) == (sent.requires_grad, True)
    assert torch.equal(arrived.detach(), sent.detach())


def test_contents_are_read_and_written_under_inference_mode():
    memory = torch.zeros(1024, dtype=torch.uint8)
    with torch.inference_mode():
        write(torch.ones(16), memory, 512, 64)
        assert read(memory, 512, 64, (torch.float32, (16,), (1,), False)).sum() == 16
    write(torch.ones(16), memory, 0, 64)


class Stream:
    """A stream that performs each operation immediately."""

    def __init__(self, index: int) -> None:
        self.index = index

    def synchronize(self) -> None: ...


class Event:
    """An event that other processes open by its handle."""

    made: ClassVar[list[Event]] = []

    def __init__(self, interprocess: bool = False) -> None:
        self.interprocess, self.recorded, self.waited = interprocess, 0, 0
        self.made.append(self)

    def ipc_handle(self) -> bytes:
        assert self.interprocess
        return self.made.index(self).to_bytes(64, "little")

    @classmethod
    def from_ipc_handle(cls, device: torch.device, handle: bytes) -> Event:
        assert device == torch.device("cuda", 0)
        return cls.made[int.from_bytes(handle, "little")]

    def record(self, stream: Stream) -> None:
        self.recorded += stream.index == 0

    def wait(self, stream: Stream) -> None:
        self.waited += stream.index == 0

    def query(self) -> bool:
        return True


@pytest.fixture
def host_as_device(driver, monkeypatch):
    """Replace the parts of torch that need a device, and use :class:`TorchDevice` with host memory."""
    where = {}

    def tensor(self: TorchDevice, index: int, address: int, size: int) -> torch.Tensor:
        return where.setdefault((index, address & 0xFFFFFF000FFF), torch.zeros(size, dtype=torch.uint8))

    functions = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        init=lambda: None,
        empty_cache=lambda: None,
        Event=Event,
        get_device_properties=lambda index: SimpleNamespace(uuid="1234"),
        device=lambda index: contextlib.nullcontext(),
        current_stream=lambda device: Stream(0),
        is_current_stream_capturing=lambda: False,
    )
    Event.made.clear()
    monkeypatch.setattr(cuda, "cuda", functions)
    monkeypatch.setattr(TorchDevice, "_driver", driver)
    monkeypatch.setattr(TorchDevice, "_tensor", tensor)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    monkeypatch.setattr(transfer, "_state", transfer.TransferState())
    return functions


@pytest.mark.parametrize("switch", ["1", "0"])
def test_torch_device_implements_the_transfer_protocol(host_as_device, monkeypatch, switch):
    monkeypatch.setenv(transfer.SWITCH, switch)
    monkeypatch.setattr(torch, "device", lambda *named: "cpu" if switch == "0" else torch_device(*named))
    sent = torch.arange(1000).reshape(10, -1).t()
    form = sent.dtype, tuple(sent.shape), sent.stride(), False
    monkeypatch.setattr(TorchDevice, "identity", lambda self, tensor: "GPU-1234")
    rebuild, (content, *more) = transfer.reduce(sent, form, 8000, "cuda")
    if switch == "1":
        ticket = memoryview(content).obj
        # received by the sender itself, and by another process
        for owner in (transfer._state.owner, b"another's"):
            monkeypatch.setattr(transfer._state, "owner", owner)
            (content,) = transfer.arrivals("keep", [bytes(ticket)])
            arrived = rebuild(content, *more)
            assert torch.equal(arrived, sent)
            assert arrived.stride() == sent.stride()
        shared, own = Event.made[: arenas.AT_ONCE], Event.made[arenas.AT_ONCE :]
        assert all(event.interprocess for event in shared)
        assert sorted((event.recorded, event.waited) for event in shared)[-2:] == [(0, 0), (1, 2)]
        assert [(event.interprocess, event.recorded) for event in own] == [(False, 1)] * 2
        for other in transfer._state.owners.values():
            other.close()
    else:
        assert torch.equal(rebuild(content, *more), sent)
        assert Event.made == []


def test_torch_device_without_room_uses_host_memory(host_as_device):
    with pytest.raises(ArenaFull, match="OUT_OF_MEMORY"):
        TorchDevice().allocate("GPU-1234", 2 << 40)


def test_put_during_a_graph_capture_raises(host_as_device):
    tensor = SimpleNamespace(device=SimpleNamespace(index=0))
    assert TorchDevice().identity(tensor) == "GPU-1234"
    host_as_device.is_current_stream_capturing = lambda: True
    with pytest.raises(RuntimeError, match="being captured"):
        transfer.reduce(tensor, None, 12, "cuda")
    assert transfer._state.pools == {}
