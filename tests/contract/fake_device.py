"""A fake device made of shared files, for tests of the protocol for device tensors without a GPU.

Its memory is a memfd. Other processes map the memfd through the owner's ``/proc/<pid>/fd``, which works only
while the owner is alive. Each process has one stream per device. Enqueued work runs at once, unless the test
holds the stream or the stream waits for an event. Held work continues at the next call that checks it. All
relevant calls are counted.
"""

from __future__ import annotations

import copyreg
import mmap
import os
import pickle
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from support.waiting import wait_until

from flowchan.transport.device import transfer
from flowchan.transport.device.arenas import ArenaFull

MOST_EVENTS = 4096


class Memory:
    """A mapped file."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.mapping = mmap.mmap(fd, size)
        self.bytes = np.frombuffer(self.mapping, np.uint8)

    @classmethod
    def new(cls, size: int) -> Memory:
        fd = os.memfd_create("fake device")
        os.ftruncate(fd, size)
        return cls(fd, size)

    @classmethod
    def behind(cls, handle: bytes, size: int) -> Memory:
        pid, number, inode = pickle.loads(handle)
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        assert os.fstat(fd).st_ino == inode, "the handle is stale"
        return cls(fd, size)

    def handle(self) -> bytes:
        return pickle.dumps((os.getpid(), self.fd, os.fstat(self.fd).st_ino))

    def __del__(self) -> None:
        os.close(self.fd)


class Event:
    """An event as two shared numbers: how often it was recorded, and the last completed record."""

    def __init__(self, numbers: Any, memory: Memory | None = None) -> None:
        self.numbers, self.memory = numbers, memory


class Stream:
    """A queue of work, which runs in order."""

    def __init__(self) -> None:
        self.work: deque[Callable[[], bool | None]] = deque()
        self.held = False
        self.lock = threading.RLock()

    def add(self, step: Callable[[], bool | None]) -> None:
        with self.lock:
            self.work.append(step)
            self.go_on()

    def go_on(self) -> None:
        with self.lock:
            while self.work and not self.held and self.work[0]() is not False:
                self.work.popleft()


class FakeTensor:
    """An array on a fake device."""

    def __init__(self, array: Any, device: str = "fake-A") -> None:
        self.array, self.device = np.array(array), device

    def fill(self, value: Any) -> None:
        FAKE.stream(self.device).add(lambda: self.array.fill(value))

    def numpy(self) -> Any:
        """Wait for the device, as a read by the host would, and return the array."""
        FAKE.wait_for(self.device)
        return self.array


class FakeDevice:
    name = "fake"

    def __init__(self) -> None:
        self.begin_anew()
        self.seen = ["fake-A", "fake-B"]
        self.full = False

    def begin_anew(self) -> None:
        """Reset the state, for a new test or in a forked child."""
        self.counts: Counter[str] = Counter()
        self.streams: dict[str, Stream] = {}
        self.event_memory: Memory | None = None

    def stream(self, device: str) -> Stream:
        return self.streams.setdefault(device, Stream())

    @contextmanager
    def held(self, device: str = "fake-A") -> Iterator[None]:
        """Hold back the work that is enqueued in the block, until the block ends."""
        self.stream(device).held = True
        yield
        self.stream(device).held = False
        self.stream(device).go_on()

    def wait_for(self, device: str) -> None:
        def idle() -> bool:
            self.stream(device).go_on()
            return not self.stream(device).work

        wait_until(idle)

    # --- Device ---

    def visible(self) -> list[str]:
        return self.seen

    def identity(self, tensor: FakeTensor) -> str:
        return tensor.device

    def allocate(self, device: str, size: int) -> tuple[Memory, bytes]:
        if self.full:
            raise ArenaFull("the fake device is full")
        self.counts["allocate"] += 1
        memory = Memory.new(size)
        return memory, memory.handle()

    def open(self, device: str, handle: bytes, size: int) -> Memory:
        self.counts["open"] += 1
        return Memory.behind(handle, size)

    def close(self, device: str, memory: Memory) -> None:
        self.counts["close"] += 1

    def copy_in(self, tensor: FakeTensor, memory: Memory, offset: int, size: int) -> None:
        self.counts["copy in"] += 1

        def copy() -> None:
            memory.bytes[offset : offset + size] = np.frombuffer(tensor.array.tobytes(), np.uint8)

        self.stream(tensor.device).add(copy)

    def copy_out(self, device: str, memory: Memory, offset: int, size: int, form: Any) -> FakeTensor:
        self.counts["copy out"] += 1
        dtype, shape = form
        tensor = FakeTensor(np.empty(shape, dtype), device)

        def copy() -> None:
            tensor.array[...] = memory.bytes[offset : offset + size].view(dtype).reshape(shape)

        self.stream(device).add(copy)
        return tensor

    def share_event(self, device: str) -> tuple[Event, bytes]:
        if self.event_memory is None:
            self.event_memory = Memory.new(16 * MOST_EVENTS)
        index = self.counts["share event"]
        self.counts["share event"] += 1
        handle = pickle.dumps((self.event_memory.handle(), index))
        return Event(self.event_memory.bytes[16 * index : 16 * (index + 1)].view("u8")), handle

    def open_event(self, device: str, handle: bytes) -> Event:
        self.counts["open event"] += 1
        inner, index = pickle.loads(handle)
        memory = Memory.behind(inner, 16 * MOST_EVENTS)
        return Event(memory.bytes[16 * index : 16 * (index + 1)].view("u8"), memory)

    def event(self, device: str) -> Event:
        return Event(np.zeros(2, "u8"))

    def record(self, event: Event, device: str) -> None:
        self.counts["record"] += 1
        event.numbers[0] += 1
        number = int(event.numbers[0])

        def come_to_pass() -> None:
            event.numbers[1] = number

        self.stream(device).add(come_to_pass)

    def wait(self, event: Event, device: str) -> None:
        self.counts["wait"] += 1
        number = int(event.numbers[0])
        self.stream(device).add(lambda: bool(event.numbers[1] >= number))

    def done(self, event: Event) -> bool:
        for stream in self.streams.values():
            stream.go_on()
        return bool(event.numbers[1] >= event.numbers[0])

    def finish(self, device: str) -> None:
        self.counts["finish"] += 1
        self.wait_for(device)

    def to_host(self, tensor: FakeTensor) -> Any:
        self.counts["to host"] += 1
        return tensor.numpy().copy()

    def from_host(self, host: Any, device: str, form: Any) -> FakeTensor:
        self.counts["from host"] += 1
        return FakeTensor(host, device)


def kept() -> int:
    """Return how many items keep blocks in this process."""
    transfer._state.sweep()
    return sum(len(channel.blocks) for channel in transfer._state.kept.values())


FAKE = FakeDevice()
os.register_at_fork(after_in_child=FAKE.begin_anew)


def _reduce(tensor: FakeTensor) -> Any:
    return transfer.reduce(tensor, (tensor.array.dtype, tensor.array.shape), tensor.array.nbytes, FAKE.name)


copyreg.pickle(FakeTensor, _reduce)
