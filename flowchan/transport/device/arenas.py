"""Manage device memory that other processes can open.

An arena is exported once, and blocks of it are lent. A block returns when its last reference is dropped,
possibly by the garbage collector in any thread. The return is therefore a single append, and the next
``take`` does the bookkeeping. A block is lent again only after the device has finished the last write to it.
Arenas live as long as the process: freeing device memory waits for the whole device, and another process may
be reading the arena.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

ARENA = 64 << 20
"""Size of an arena in bytes. A larger tensor gets an arena of its size."""

EVENTS = 512
"""Maximum number of events that a process shares, because CUDA allows only a few thousand per machine.

Without an event, the writer waits for the device.
"""

# Create this many events at once: CUDA drivers before version 460 may deadlock if a process creates an event
# while others are in use.
AT_ONCE = 16

# A handle exports whole pages of this size, so an arena must not share a page with other memory.
PAGE = 2 << 20
UNIT = 512


class ArenaFull(Exception):
    """Raised if no device memory can be shared. The tensor is then copied through host memory."""


class Device(Protocol):
    """Type of device, such as CUDA.

    Each device is identified by a string that is the same in every process. Copies and events are enqueued on
    the calling thread's current stream of that device. Only ``finish`` waits for the device.
    """

    name: str

    def visible(self) -> Sequence[str]:
        """Return the identities of the devices that this process can use."""

    def identity(self, tensor: Any) -> str:
        """Return the identity of a tensor's device."""

    def allocate(self, device: str, size: int) -> tuple[Any, bytes]:
        """Allocate memory, and return it with its handle for other processes.

        Raise :class:`ArenaFull` on failure.
        """

    def open(self, device: str, handle: bytes, size: int) -> Any:
        """Open memory by a handle that another process exported. Raise ``OSError`` on failure."""

    def close(self, device: str, memory: Any) -> None:
        """Close memory from ``open``. The call may wait for the device."""

    def copy_in(self, tensor: Any, memory: Any, offset: int, size: int) -> None:
        """Enqueue a copy of a tensor to ``offset`` in the memory."""

    def copy_out(self, device: str, memory: Any, offset: int, size: int, form: Any) -> Any:
        """Enqueue a copy from the memory into a new tensor of the given form, and return the tensor."""

    def share_event(self, device: str) -> tuple[Any, bytes]:
        """Create an event that other processes can wait for, and return it with its handle."""

    def open_event(self, device: str, handle: bytes) -> Any:
        """Open an event of another process by its handle, so that this process can wait for the event."""

    def event(self, device: str) -> Any:
        """Make an event for this process alone."""

    def record(self, event: Any, device: str) -> None:
        """Enqueue the event on the current stream."""

    def wait(self, event: Any, device: str) -> None:
        """Make later work on the stream wait for the event's latest record."""

    def done(self, event: Any) -> bool:
        """Return whether the device has reached all records of the event."""

    def finish(self, device: str) -> None:
        """Wait until the device has done all work that this thread enqueued."""

    def to_host(self, tensor: Any) -> Any:
        """Copy a tensor to host memory that a channel can carry."""

    def from_host(self, host: Any, device: str, form: Any) -> Any:
        """Copy a tensor from host memory to a device."""


class Arena:
    """One allocation, with its free ranges (offset, size) in order. Adjacent ranges are merged."""

    def __init__(self, number: int, device: str, size: int, memory: Any, handle: bytes) -> None:
        self.number, self.device, self.size, self.memory, self.handle = number, device, size, memory, handle
        self.free = [(0, size)]

    def take(self, size: int) -> int | None:
        """Take ``size`` bytes, and return their offset; None if no range is large enough."""
        for index, (offset, free_size) in enumerate(self.free):
            if free_size >= size:
                self.free[index : index + 1] = [(offset + size, free_size - size)] if free_size > size else []
                return offset
        return None

    def give(self, offset: int, size: int) -> None:
        at = bisect.bisect(self.free, (offset, size))
        if at < len(self.free) and offset + size == self.free[at][0]:
            size += self.free.pop(at)[1]
        if at and sum(self.free[at - 1]) == offset:
            at -= 1
            before, more = self.free.pop(at)
            offset, size = before, size + more
        self.free.insert(at, (offset, size))


class SharedEvent:
    """Event of this process that other processes can wait for."""

    def __init__(self, event: Any, handle: bytes) -> None:
        self.event, self.handle = event, handle


class Block:
    """Part of an arena, reserved until the last reference to the block is dropped."""

    __slots__ = ("_back", "arena", "event", "offset", "size")

    def __init__(
        self, back: Callable[[Any], None], arena: Arena, offset: int, size: int, event: SharedEvent | None
    ) -> None:
        self._back, self.arena, self.offset, self.size, self.event = back, arena, offset, size, event

    def __del__(self) -> None:
        self._back((self.arena, self.offset, self.size, self.event))


class ArenaPool:
    """Arenas of all devices of one type.

    Calls from several threads must not overlap, but blocks may return in any thread at any time.
    """

    def __init__(self, device: Device, shortage: Callable[[], None]) -> None:
        self.arenas: list[Arena] = []
        self.events: dict[bytes, SharedEvent] = {}
        self._device = device
        self._shortage = shortage
        self._idle: dict[str, list[SharedEvent]] = {}
        self._back: deque[tuple[Arena, int, int, SharedEvent | None]] = deque()

    def take(self, device: str, size: int) -> Block:
        """Take a block from free memory or a new arena. Raise :class:`ArenaFull` on failure."""
        size = (size + UNIT - 1) // UNIT * UNIT
        found = self._find(device, size)
        if found is None:
            self._shortage()
            found = self._find(device, size)
        if found is None:
            free_size = (max(size, ARENA) + PAGE - 1) // PAGE * PAGE
            arena = Arena(len(self.arenas), device, free_size, *self._device.allocate(device, free_size))
            self.arenas.append(arena)
            found = arena, arena.take(size) or 0
        return Block(self._back.append, *found, size, self._event(device))

    def _find(self, device: str, size: int) -> tuple[Arena, int] | None:
        self._collect()
        for arena in self.arenas:
            if arena.device == device and (offset := arena.take(size)) is not None:
                return arena, offset
        return None

    def _collect(self) -> None:
        """Free the returned blocks to which the device has finished writing."""
        for _ in range(len(self._back)):
            arena, offset, size, event = entry = self._back.popleft()
            if event is not None and not self._device.done(event.event):
                self._back.append(entry)
                continue
            arena.give(offset, size)
            if event is not None:
                self._idle[arena.device].append(event)

    def _event(self, device: str) -> SharedEvent | None:
        idle = self._idle.setdefault(device, [])
        for _ in range(0 if idle else min(AT_ONCE, EVENTS - len(self.events))):
            try:
                event = SharedEvent(*self._device.share_event(device))
            except RuntimeError:  # other processes on this machine use all available events
                break
            self.events[event.handle] = event
            idle.append(event)
        return idle.pop() if idle else None
