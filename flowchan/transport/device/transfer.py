"""How tensors on a device cross to another process of the same host, without leaving the device.

*What a put does.* The contents are copied, on the device and on the current stream, into a block of memory
that is kept for this (``pool``). What crosses is the name of that place: a handle of the allocation, an
offset, and an event that says when the copy is made. Nobody waits: the receiver's stream waits for the event,
the receiver itself does not.
*What a get does.* It opens the allocation (once; then it is remembered, and closed only when its process has
ended) and copies the contents into memory of its own. So an item is a copy here as anywhere between
processes: who put a tensor may write to it at once, what arrives belongs to the receiver, who may write to it
and keep it, also when the sender has ended; and an item that is given back because a worker died is whole,
whatever that worker did with its own. The price is two copies at the speed of the device's memory, and as
much memory as is in flight.

*How long a block is kept.* Until its item exists no more and the receiver's copy is made. The item is PINNED
(frame.hpp): it carries an id, the channel knows which ids there are, and a receiver holds the item by a view
(``keep``) until its copy is made. That holds for receivers that are killed as well, because the channel
itself knows who has died. A process that ends waits at its exit until nothing of it is kept any more, or
nobody is left who could read it. It gives up, and says so, when nothing has been read for
``FLOWCHAN_CUDA_EXIT_WAIT`` seconds (60). One that is killed, or that leaves by ``os._exit``, takes its items'
contents with it: their get raises ``ChannelError``.

*Through host memory instead* go tensors to another host, where they arrive on the device of the same number;
all tensors while ``FLOWCHAN_CUDA_IPC=0`` is set where they are put; and any tensor when there is no device
memory to be shared. Expandable segments need no detour, because the blocks are
allocations of our own, whatever torch's allocator does.

The kind of device is a :class:`Device`. For torch's CUDA tensors that is ``cuda``; tests bring one of
their own.
"""

from __future__ import annotations

import _thread
import contextlib
import itertools
import os
import pickle
import select
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from multiprocessing import util
from typing import Any, NamedTuple

from flowchan.errors import ChannelError
from flowchan.transport import descriptors
from flowchan.transport.device.arenas import ArenaPool, Block, Device, NoRoom
from flowchan.transport.pidfd import open_pidfd

SWITCH = "FLOWCHAN_CUDA_IPC"
EXIT_WAIT = "FLOWCHAN_CUDA_EXIT_WAIT"
MAGIC = b"flowchan device memory\0"
EVERY_FEW = 16  # items a channel keeps before it is first asked which of them exist
POLL_INTERVAL_S, IDLE_POLLS = (
    0.02,
    25,
)  # seconds between two looks at copies under way; looks in vain before looking ends


class DeviceKind(NamedTuple):
    """Where an item's contents lie, and who owns that memory."""

    kind: str
    device: str
    owner: bytes
    pid: int
    arena: int
    arena_size: int
    handle: bytes
    offset: int
    size: int
    event: bytes | None


class Ticket(bytes):
    """A buffer that holds a pickled :class:`DeviceKind`, and at the sender the block that it names."""

    block: Block


class Arrived(bytes):
    """The same at the receiver, with what keeps the item in existence."""

    keep: Any


# --- putting ---


class DeviceParcel:
    """The blocks of one item; called with the channel when the item is inside."""

    def __init__(self, id: int, blocks: list[Block]) -> None:
        self.id, self.blocks = id, blocks

    def __call__(self, channel: Any) -> None:
        _state.keep(channel, self)


class KeptExport:
    """What is kept for the items of one channel, by id."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.blocks: dict[int, list[Block]] = {}
        self.limit = EVERY_FEW

    def sweep(self) -> None:
        """Lets go of what no item needs."""
        exist = set(self.channel._pinned())
        for id in self.blocks.keys() - exist:
            del self.blocks[id]
        self.limit = max(EVERY_FEW, 2 * len(self.blocks))


class TransferState:
    """All that a process remembers about device memory. A forked child begins anew: its parent's is not its
    own."""

    def __init__(self) -> None:
        # Entered again by the same thread when a collection within it runs a finaliser that puts a tensor.
        self.lock = threading.RLock()
        self.devices: dict[str, Device] = {}
        self.owner = os.urandom(16)
        self.ids = itertools.count(int.from_bytes(os.urandom(8), "little"))
        self.pools: dict[str, ArenaPool] = {}
        self.kept: dict[int, KeptExport] = {}
        self.ported: weakref.WeakSet[Any] = weakref.WeakSet()  # channels that are read through ports only
        self.owners: dict[bytes, Owner] = {}
        self.copies: deque[Copy] = deque()
        self.looking = False

    def device(self, kind: str) -> Device:
        if kind not in self.devices and kind == "cuda":
            from flowchan.transport.device.cuda import TorchDevice  # imports torch

            use(TorchDevice())
        return self.devices[kind]

    def pool(self, device: Device) -> ArenaPool:
        if device.name not in self.pools:
            if not self.pools:  # below zero: after the children, who may be the receivers, have been joined
                util.Finalize(None, _wait_at_exit, exitpriority=-100)
            self.pools[device.name] = ArenaPool(device, self.sweep)
        return self.pools[device.name]

    def keep(self, channel: Any, parcel: DeviceParcel) -> None:
        with self.lock:
            kept = self.kept.get(id(channel)) or self.kept.setdefault(id(channel), KeptExport(channel))
            kept.blocks[parcel.id] = parcel.blocks
            if len(kept.blocks) > kept.limit:
                kept.sweep()

    def sweep(self) -> None:
        """Lets go of what no item of any channel needs; of all of a channel that nobody can read any more."""
        with self.lock:
            for key, kept in list(self.kept.items()):
                kept.sweep()
                here = sys.getrefcount(kept.channel) > 2  # besides ours, and the argument
                if not kept.blocks or not (here or _is_open_elsewhere(kept.channel)):
                    del self.kept[key]


def use(device: Device) -> None:
    """Tensors of the kind ``device.name`` cross by means of ``device`` from now on."""
    _state.devices[device.name] = device


def reduce(tensor: Any, form: Any, size: int, kind: str) -> tuple[Any, ...]:
    """What a pickler makes of a dense tensor of ``size`` bytes that lies on a device of that kind. ``form``:
    what is needed besides to make the tensor again."""
    device = _state.device(kind)
    identity = device.identity(tensor)
    packing = descriptors.now.packing
    if packing is not None and not packing.on_device:
        number = device.visible().index(identity)
        return _rebuild_elsewhere, (kind, identity, number, device.to_host(tensor), form)
    if size and os.environ.get(SWITCH, "1").lower() not in ("0", "off", "no", "false"):
        try:
            return _rebuild, (pickle.PickleBuffer(_ticket(tensor, size, device, identity)), form)
        except NoRoom:
            pass
    return _rebuild_from_host, (kind, identity, os.getpid(), device.to_host(tensor), form)


def _ticket(tensor: Any, size: int, device: Device, identity: str) -> Ticket:
    with _state.lock:
        block = _state.pool(device).take(identity, size)
    device.copy_in(tensor, block.arena.memory, block.offset, size)
    if block.event is not None:
        device.record(block.event.event, identity)
    else:
        device.finish(identity)
    arena = block.arena
    place = DeviceKind(
        device.name,
        identity,
        _state.owner,
        os.getpid(),
        arena.number,
        arena.size,
        arena.handle,
        block.offset,
        size,
        block.event.handle if block.event is not None else None,
    )
    ticket = Ticket(MAGIC + pickle.dumps(tuple(place), protocol=5))
    ticket.block = block
    return ticket


def parcel(buffers: list[pickle.PickleBuffer]) -> DeviceParcel | None:
    """The blocks that an item's buffers name, if any."""
    if not _state.pools:
        return None
    tickets = [buffer for buffer in map(_exporter, buffers) if type(buffer) is Ticket]
    if not tickets:
        return None
    return DeviceParcel(next(_state.ids) & (2**64 - 1), [ticket.block for ticket in tickets])


def _exporter(buffer: pickle.PickleBuffer) -> object:
    with memoryview(buffer) as view:
        return view.obj


# --- getting ---


class Copy(NamedTuple):
    """A receiver's copy that is under way, and what keeps the item until it is made."""

    device: Device
    event: Any
    keep: Any
    owner: bytes


class Owner:
    """Another process, and what of it is open here."""

    def __init__(self, pid: int) -> None:
        self.arenas: dict[tuple[str, int], tuple[Device, str, Any]] = {}
        self.events: dict[bytes, Any] = {}
        self._poll = select.poll()
        self._fd: int | None = None
        self._ended = False
        try:
            self._fd = open_pidfd(pid)
            if self._fd is not None:
                self._poll.register(self._fd, select.POLLIN)
        except OSError:  # it has ended, or its number means nothing here: opening its memory will tell
            pass

    def has_ended(self) -> bool:
        """Whether that is certain."""
        if self._fd is not None and self._poll.poll(0):
            self._ended = True
        return self._ended

    def close(self) -> None:
        """Closes what is open. May wait for the devices."""
        self.events.clear()
        for device, identity, memory in self.arenas.values():
            with contextlib.suppress(OSError):  # the driver may have taken it back with its process
                device.close(identity, memory)
        self.arenas.clear()
        self.forget()

    def forget(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def arrivals(keep: Any, buffers: list[Any]) -> list[Any]:
    """The buffers of a PINNED item, such that ``_rebuild`` finds ``keep``."""
    for index, buffer in enumerate(buffers):
        if isinstance(buffer, bytes) and buffer.startswith(MAGIC):
            buffers[index] = Arrived(buffer)
            buffers[index].keep = keep
    return buffers


def _rebuild(buffer: Any, form: Any) -> Any:
    if not isinstance(buffer, Arrived):
        raise TypeError("a tensor on a device crosses through a channel only; elsewhere pickle tensor.cpu()")
    settle()
    place = DeviceKind(*pickle.loads(buffer[len(MAGIC) :]))
    device = _visible(place.kind, place.device, place.pid)
    memory, event = _open(device, place)
    if event is not None:
        device.wait(event, place.device)
    tensor = device.copy_out(place.device, memory, place.offset, place.size, form)
    if buffer.keep is None:  # the item ends with this call
        device.finish(place.device)
        return tensor
    made = device.event(place.device)
    device.record(made, place.device)
    if not device.done(made):
        _state.copies.append(Copy(device, made, buffer.keep, place.owner))
        _look_later()
    return tensor


def _rebuild_from_host(kind: str, identity: str, pid: int, host: Any, form: Any) -> Any:
    return _visible(kind, identity, pid).from_host(host, identity, form)


def _rebuild_elsewhere(kind: str, identity: str, number: int, host: Any, form: Any) -> Any:
    """On the same device, where it can be seen, else on that of the same number."""
    device = _state.device(kind)
    seen = device.visible()
    if identity in seen:
        return device.from_host(host, identity, form)
    if number < len(seen):
        return device.from_host(host, seen[number], form)
    raise ChannelError(
        f"the item holds a tensor that was on {kind}:{number} of another host; this process ({os.getpid()}) "
        f"has {len(seen)} {kind} devices. Give the stage one (gpus=1), or put tensor.cpu()"
    )


def _visible(kind: str, identity: str, pid: int) -> Device:
    device = _state.device(kind)
    if identity in (seen := device.visible()):
        return device
    raise ChannelError(
        f"the item holds a tensor on {kind} device {identity} of process {pid}; this process "
        f"({os.getpid()}) can use "
        f"{', '.join(seen) or 'none'} only. Let both see the same devices "
        "(CUDA_VISIBLE_DEVICES), or put tensor.cpu()"
    )


def _open(device: Device, place: DeviceKind) -> tuple[Any, Any]:
    """The memory that holds the item's contents, and the event after which it does (None: it does
    already)."""
    with _state.lock:
        if place.owner == _state.owner:  # a handle can't be opened by the process that made it
            pool = _state.pools[place.kind]
            event = pool.events[place.event].event if place.event is not None else None
            return pool.arenas[place.arena].memory, event
        owner = _state.owners.get(place.owner) or _meet(place)
        if owner.has_ended():
            _close_ended()
            raise _gone(place, "that process has ended")
        key = place.kind, place.arena
        try:
            if key not in owner.arenas:
                memory = device.open(place.device, place.handle, place.arena_size)
                owner.arenas[key] = device, place.device, memory
            if place.event is not None and place.event not in owner.events:
                owner.events[place.event] = device.open_event(place.device, place.event)
        except (OSError, RuntimeError) as error:
            raise _gone(place, f"that process has ended, or can't be reached from here ({error})") from error
        return owner.arenas[key][2], owner.events.get(place.event) if place.event is not None else None


def _meet(place: DeviceKind) -> Owner:
    _close_ended()
    owner = _state.owners[place.owner] = Owner(place.pid)
    return owner


def _close_ended() -> None:
    """Closes what was open of processes that have ended. Seldom, since closing may wait for the device."""
    busy = {copy.owner for copy in _state.copies}
    for token, owner in _state.owners.items():
        if token not in busy and owner.has_ended():
            owner.close()


def _gone(place: DeviceKind, why: str) -> ChannelError:
    return ChannelError(
        f"the contents of a tensor that process {place.pid} put, on {place.kind} device "
        f"{place.device}, can't be reached: "
        f"{why}. Contents on a device end with the process that put them; with {SWITCH}=0 in "
        "its environment they go "
        "through host memory, and outlive it"
    )


def settle() -> None:
    """Lets go of the items of which copies have been made."""
    copies = _state.copies
    for _ in range(len(copies)):
        try:
            copy = copies.popleft()
        except IndexError:  # another thread does the same
            return
        try:
            if not copy.device.done(copy.event):
                copies.append(copy)
        except RuntimeError:  # a device that has failed copies nothing any more; the next use of it will tell
            continue


def _look_later() -> None:
    """Settles in the background for a while, since this process may not get anything again."""
    with _state.lock:
        if not _state.looking:
            _state.looking = True
            _thread.start_new_thread(_look, ())


def _look() -> None:
    vain = 0
    while vain < IDLE_POLLS:
        time.sleep(POLL_INTERVAL_S)
        settle()
        vain = 0 if _state.copies else vain + 1
    with _state.lock:
        _state.looking = False
        again = bool(_state.copies)
    if again:
        _look_later()


# --- the end, and forks ---


def _wait_at_exit() -> None:
    """Until what others still have to read of this process's memory is read, or nobody is left who could. In
    the midst of a run without a limit: the supervisor ends this process when the run is over."""
    limit, pause, next_look = float(os.environ.get(EXIT_WAIT, "60")), 0.0005, 0.02
    began = since = time.monotonic()
    count = -1
    while True:
        _state.sweep()
        if not _state.kept:
            return
        now = time.monotonic()
        left = sum(len(kept.blocks) for kept in _state.kept.values())
        if left != count:
            count, since = left, now
        if now - began >= next_look:
            next_look = now - began + 0.5
            if not any(_may_be_read(kept.channel) for kept in _state.kept.values()):
                return
        if now - since >= limit and not any(_has_ports(kept.channel) for kept in _state.kept.values()):
            break
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    for kept in _state.kept.values():
        print(
            f"flowchan: process {os.getpid()} ends, and with it the contents of {len(kept.blocks)} items in "
            f"{kept.channel!r}, tensors on a device that nobody has read for {limit:g} s "
            f"({EXIT_WAIT}). With {SWITCH}=0 "
            "they go through host memory, and outlive it",
            file=sys.stderr,
        )


def only_ports_read(channels: Iterable[Any]) -> None:
    """These channels are read through ports only: at this process's exit nothing is kept for one that has
    none left."""
    _state.ported.update(channels)


def _may_be_read(channel: Any) -> bool:
    """Whether anybody is left who could."""
    return _has_ports(channel) if channel in _state.ported else _is_open_elsewhere(channel)


def _has_ports(channel: Any) -> bool:
    return channel in _state.ported and channel.stats().readers > 0


def _is_open_elsewhere(channel: Any) -> bool:
    """Whether another process has the channel's memory."""
    memory = os.fstat(channel._fd)
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if pid == str(os.getpid()):
            continue
        try:
            for number in os.listdir(f"/proc/{pid}/fd"):
                found = os.stat(f"/proc/{pid}/fd/{number}")
                if (found.st_dev, found.st_ino) == (memory.st_dev, memory.st_ino):
                    return True
        except OSError:  # it has just ended, or belongs to another user
            continue
    return False


def _begin_anew() -> None:
    global _state
    _inherited.append(_state)
    for owner in _state.owners.values():
        owner.forget()
    devices = _state.devices
    _state = TransferState()
    _state.devices = devices


_state = TransferState()
# what belongs to a parent is never let go of: here that would mean nothing, or harm
_inherited: list[TransferState] = []
os.register_at_fork(after_in_child=_begin_anew)
