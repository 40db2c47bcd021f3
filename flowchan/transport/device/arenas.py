"""Device memory that others can open: arenas, allocated and exported once, and the blocks that are lent out
of them.

A block comes back when the last reference to it goes, from whatever thread the collector runs in; so coming
back is one append, and the arithmetic waits for the next ``take``. A block is lent again only when what was
last written into it has been written: the device may be behind. Arenas are never given back while the process
lives. Freeing device memory waits for the whole device, and who has opened an arena may look at it at any
time.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

ARENA = 64 << 20
"""Bytes of an arena; one for a larger tensor is as large as that."""

EVENTS = 512
"""How many events a process shares. CUDA has room for some thousands on a machine; beyond, the writer waits
instead."""

AT_ONCE = 16  # events made together: drivers before 460 may deadlock when one is made while others are in use

# handles name whole pages of this size, so no arena shares one with memory that is not the pool's
PAGE = 2 << 20
UNIT = 512


class NoRoom(Exception):
    """There is no device memory that could be shared: the tensor goes through host memory instead."""


class Device(Protocol):
    """One kind of device memory. A device is named by its identity, which is the same in every process. What
    is enqueued goes to the calling thread's current stream of that device; nothing here waits for the device
    but ``finish``."""

    name: str

    def visible(self) -> Sequence[str]:
        """The identities of the devices that this process can use."""

    def identity(self, tensor: Any) -> str:
        """Of the device that the tensor lies on."""

    def allocate(self, device: str, size: int) -> tuple[Any, bytes]:
        """DriverMemory, and the handle by which another process opens it. Raises :class:`NoRoom`."""

    def open(self, device: str, handle: bytes, size: int) -> Any:
        """The memory behind another process's handle. Raises ``OSError`` when it can't be opened."""

    def close(self, device: str, memory: Any) -> None:
        """Ends an ``open``. May wait for the device."""

    def copy_in(self, tensor: Any, memory: Any, offset: int, size: int) -> None:
        """Enqueues the copy of a tensor to ``offset`` of the memory."""

    def copy_out(self, device: str, memory: Any, offset: int, size: int, form: Any) -> Any:
        """Enqueues the copy into a tensor of this process's own, of the given form."""

    def share_event(self, device: str) -> tuple[Any, bytes]:
        """An event that others can wait for, and its handle."""

    def open_event(self, device: str, handle: bytes) -> Any:
        """The event behind another process's handle."""

    def event(self, device: str) -> Any:
        """An event for this process alone."""

    def record(self, event: Any, device: str) -> None:
        """Enqueues the event."""

    def wait(self, event: Any, device: str) -> None:
        """What is enqueued from now on comes after the event's latest record."""

    def done(self, event: Any) -> bool:
        """Whether all its records have come to pass."""

    def finish(self, device: str) -> None:
        """Waits until all that this thread has enqueued is done."""

    def to_host(self, tensor: Any) -> Any:
        """A copy in host memory, that a channel can carry."""

    def from_host(self, host: Any, device: str, form: Any) -> Any:
        """The tensor again."""


class Arena:
    """One allocation, and what of it is free: (offset, size), in order, never two that touch."""

    def __init__(self, number: int, device: str, size: int, memory: Any, handle: bytes) -> None:
        self.number, self.device, self.size, self.memory, self.handle = number, device, size, memory, handle
        self.free = [(0, size)]

    def take(self, size: int) -> int | None:
        """The offset of ``size`` bytes, or None."""
        for index, (offset, room) in enumerate(self.free):
            if room >= size:
                self.free[index : index + 1] = [(offset + size, room - size)] if room > size else []
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
    """An event of this process that others wait for."""

    def __init__(self, event: Any, handle: bytes) -> None:
        self.event, self.handle = event, handle


class Block:
    """A part of an arena, lent until the last reference goes."""

    __slots__ = ("_back", "arena", "event", "offset", "size")

    def __init__(
        self, back: Callable[[Any], None], arena: Arena, offset: int, size: int, event: SharedEvent | None
    ) -> None:
        self._back, self.arena, self.offset, self.size, self.event = back, arena, offset, size, event

    def __del__(self) -> None:
        self._back((self.arena, self.offset, self.size, self.event))


class ArenaPool:
    """The arenas of one kind of device. Not safe to call from several threads at once; coming back is."""

    def __init__(self, device: Device, shortage: Callable[[], None]) -> None:
        self.arenas: list[Arena] = []
        self.events: dict[bytes, SharedEvent] = {}
        self._device = device
        self._shortage = shortage
        self._idle: dict[str, list[SharedEvent]] = {}
        self._back: deque[tuple[Arena, int, int, SharedEvent | None]] = deque()

    def take(self, device: str, size: int) -> Block:
        """A block, out of what has come back if that will do. Raises :class:`NoRoom`."""
        size = (size + UNIT - 1) // UNIT * UNIT
        found = self._find(device, size)
        if found is None:
            self._shortage()
            found = self._find(device, size)
        if found is None:
            room = (max(size, ARENA) + PAGE - 1) // PAGE * PAGE
            arena = Arena(len(self.arenas), device, room, *self._device.allocate(device, room))
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
        """Frees what has come back and is written."""
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
            except RuntimeError:  # others on this machine have used them up
                break
            self.events[event.handle] = event
            idle.append(event)
        return idle.pop() if idle else None
