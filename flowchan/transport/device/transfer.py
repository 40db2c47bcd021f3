"""Transfer tensors between processes on one host without leaving the device.

*Put.* The sender copies the contents, on the device and in the current stream, into a block from a pool of
shared memory. The item contains a handle of the allocation, an offset, and an event that marks the end of the
copy. Neither the sender nor the receiver waits: only the receiver's stream waits for the event. *Get.* The
receiver opens the allocation once, and closes it only when its owner has ended. The receiver copies the
contents into new memory. An item is therefore a copy, as always between processes, and the sender may write
to its tensor immediately. The receiver may write to the received tensor, and keep it after the sender has
ended. If a worker dies, its item returns to the channel unchanged, even if the worker wrote to its copy. The
cost is two copies at the speed of device memory, and memory for the contents of all items in flight.

*Lifetime of a block.* A block is kept until its item has ended and the receiver's copy is complete. The item
is PINNED (frame.hpp): it has an ID, and the channel knows which IDs exist. A receiver keeps the item alive
through a view (``keep``) until its copy is complete. If a receiver is killed, the channel detects the death
and releases the item. A process does not exit before all its blocks are released or no process can read them
any more. If nothing is read for ``FLOWCHAN_CUDA_EXIT_WAIT`` seconds (60), the process prints a message and
gives up. If a process is killed or calls ``os._exit``, the contents of its items are lost, and getting them
raises ``ChannelError``.

*Host memory instead.* These tensors are copied through host memory:

- Tensors for another host, where they arrive on the device with the same number.
- All tensors that a process puts with ``FLOWCHAN_CUDA_IPC=0`` in its environment.
- Tensors for which no shared device memory is free.

Tensors in expandable segments can be shared like others, because blocks do not come from torch's allocator.

A :class:`Device` represents each type of device. The device is ``cuda`` for CUDA tensors; tests use a fake
device.
"""

from __future__ import annotations

import _thread
import itertools
import os
import pickle
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
from flowchan.transport.device.arenas import ArenaFull, ArenaPool, Block, Device
from flowchan.transport.device.memory_owner import Owner

SWITCH = "FLOWCHAN_CUDA_IPC"
EXIT_WAIT = "FLOWCHAN_CUDA_EXIT_WAIT"
MAGIC = b"flowchan device memory\0"
EVERY_FEW = 16  # after this many items, release the blocks that no item needs
# Seconds between checks for finished copies, and number of checks without a running copy after which the
# checks end.
POLL_INTERVAL_S, IDLE_POLLS = 0.02, 25


class DeviceKind(NamedTuple):
    """Location of an item's contents: the device, its type, the memory, and the process that owns it."""

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
    """Buffer with a pickled :class:`DeviceKind`. At the sender, it also refers to the block."""

    block: Block


class Arrived(bytes):
    """Buffer with a pickled :class:`DeviceKind`, at the receiver. A view of it keeps the item alive."""

    keep: Any


# --- Put ---


class DeviceParcel:
    """Blocks of one item. When the item is in a channel, the core calls this object with the channel."""

    def __init__(self, id: int, blocks: list[Block]) -> None:
        self.id, self.blocks = id, blocks

    def __call__(self, channel: Any) -> None:
        _state.keep(channel, self)


class KeptExport:
    """Blocks kept for the items of one channel, by ID."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.blocks: dict[int, list[Block]] = {}
        self.limit = EVERY_FEW

    def sweep(self) -> None:
        """Release the blocks that no item needs."""
        exist = set(self.channel._pinned())
        for id in self.blocks.keys() - exist:
            del self.blocks[id]
        self.limit = max(EVERY_FEW, 2 * len(self.blocks))


class TransferState:
    """State of device transfers in one process. A forked child begins with a new one."""

    def __init__(self) -> None:
        # Reentrant, because a finaliser may put a tensor. The garbage collector may run the finaliser in a
        # thread that holds the lock.
        self.lock = threading.RLock()
        self.devices: dict[str, Device] = {}
        self.owner = os.urandom(16)
        self.ids = itertools.count(int.from_bytes(os.urandom(8), "little"))
        self.pools: dict[str, ArenaPool] = {}
        self.kept: dict[int, KeptExport] = {}
        # Channels that processes read only through ports.
        self.ported: weakref.WeakSet[Any] = weakref.WeakSet()
        self.owners: dict[bytes, Owner] = {}
        self.copies: deque[Copy] = deque()
        self.settling = False

    def device(self, kind: str) -> Device:
        if kind not in self.devices and kind == "cuda":
            from flowchan.transport.device.cuda import TorchDevice  # imports torch

            use(TorchDevice())
        return self.devices[kind]

    def pool(self, device: Device) -> ArenaPool:
        if device.name not in self.pools:
            # At exit, multiprocessing joins the children, which may be the receivers. The negative priority
            # delays the wait until the children have been joined.
            if not self.pools:
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
        """Release blocks that no item needs, and all blocks for a channel from which no process can read."""
        with self.lock:
            for key, kept in list(self.kept.items()):
                kept.sweep()
                # Two references always exist: the reference in ``kept``, and the argument of getrefcount.
                is_used = sys.getrefcount(kept.channel) > 2
                if not kept.blocks or not (is_used or _is_open_in_other_process(kept.channel)):
                    del self.kept[key]


def use(device: Device) -> None:
    """Use ``device`` to transfer tensors on devices of the type ``device.name``."""
    _state.devices[device.name] = device


def reduce(tensor: Any, form: Any, size: int, kind: str) -> tuple[Any, ...]:
    """Pickle a dense tensor of ``size`` bytes on a device of the type ``kind``.

    ``form`` contains everything else that a receiver needs to rebuild the tensor.
    """
    device = _state.device(kind)
    identity = device.identity(tensor)
    packing = descriptors.now.packing
    if packing is not None and not packing.on_device:
        number = device.visible().index(identity)
        return _rebuild_from_host_memory, (kind, identity, number, device.to_host(tensor), form)
    if size and os.environ.get(SWITCH, "1").lower() not in ("0", "off", "no", "false"):
        try:
            return _rebuild, (pickle.PickleBuffer(_ticket(tensor, size, device, identity)), form)
        except ArenaFull:
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
    """Return the blocks that an item's buffers refer to; None if there are none."""
    if not _state.pools:
        return None
    tickets = [buffer for buffer in map(_exporter, buffers) if type(buffer) is Ticket]
    if not tickets:
        return None
    return DeviceParcel(next(_state.ids) & (2**64 - 1), [ticket.block for ticket in tickets])


def _exporter(buffer: pickle.PickleBuffer) -> object:
    with memoryview(buffer) as view:
        return view.obj


# --- Get ---


class Copy(NamedTuple):
    """Copy in progress on a receiver's device, and the view that keeps the item alive until the copy ends."""

    device: Device
    event: Any
    keep: Any
    owner: bytes


def arrivals(keep: Any, buffers: list[Any]) -> list[Any]:
    """Return the buffers of a PINNED item, with ``keep`` attached so that ``_rebuild`` can use it."""
    for index, buffer in enumerate(buffers):
        if isinstance(buffer, bytes) and buffer.startswith(MAGIC):
            buffers[index] = Arrived(buffer)
            buffers[index].keep = keep
    return buffers


def _rebuild(buffer: Any, form: Any) -> Any:
    if not isinstance(buffer, Arrived):
        raise TypeError(
            "a tensor on a device can only be sent through a channel; to pickle it yourself, use tensor.cpu()"
        )
    settle()
    place = DeviceKind(*pickle.loads(buffer[len(MAGIC) :]))
    device = _visible(place.kind, place.device, place.pid)
    memory, event = _open(device, place)
    if event is not None:
        device.wait(event, place.device)
    tensor = device.copy_out(place.device, memory, place.offset, place.size, form)
    if buffer.keep is None:  # finish the copy, because the item ends when this call returns
        device.finish(place.device)
        return tensor
    made = device.event(place.device)
    device.record(made, place.device)
    if not device.done(made):
        _state.copies.append(Copy(device, made, buffer.keep, place.owner))
        _settle_in_background()
    return tensor


def _rebuild_from_host(kind: str, identity: str, pid: int, host: Any, form: Any) -> Any:
    return _visible(kind, identity, pid).from_host(host, identity, form)


def _rebuild_from_host_memory(kind: str, identity: str, number: int, host: Any, form: Any) -> Any:
    """Make the tensor on the sender's device if it is visible, or else on the device with the same number."""
    device = _state.device(kind)
    seen = device.visible()
    if identity in seen:
        return device.from_host(host, identity, form)
    if number < len(seen):
        return device.from_host(host, seen[number], form)
    raise ChannelError(
        f"the item contains a tensor on {kind}:{number} of another host, but process {os.getpid()} "
        f"on this host has {len(seen)} {kind} devices; use gpus=1, or put tensor.cpu()"
    )


def _visible(kind: str, identity: str, pid: int) -> Device:
    device = _state.device(kind)
    if identity in (seen := device.visible()):
        return device
    raise ChannelError(
        f"the item contains a tensor on {kind} device {identity} of process {pid}, but process "
        f"{os.getpid()} can use only: {', '.join(seen) or 'none'}; set the same CUDA_VISIBLE_DEVICES "
        "for both, or put tensor.cpu()"
    )


def _open(device: Device, place: DeviceKind) -> tuple[Any, Any]:
    """Return the memory with an item's contents, and the event that marks them complete, if any."""
    with _state.lock:
        if place.owner == _state.owner:  # a process cannot open its own handles
            pool = _state.pools[place.kind]
            event = pool.events[place.event].event if place.event is not None else None
            return pool.arenas[place.arena].memory, event
        owner = _state.owners.get(place.owner) or _open_owner(place)
        if owner.has_ended():
            _close_ended()
            raise _contents_lost(place, "that process has ended")
        key = place.kind, place.arena
        try:
            if key not in owner.arenas:
                memory = device.open(place.device, place.handle, place.arena_size)
                owner.arenas[key] = device, place.device, memory
            if place.event is not None and place.event not in owner.events:
                owner.events[place.event] = device.open_event(place.device, place.event)
        except (OSError, RuntimeError) as error:
            raise _contents_lost(
                place, f"that process has ended, or can't be reached from here ({error})"
            ) from error
        return owner.arenas[key][2], owner.events.get(place.event) if place.event is not None else None


def _open_owner(place: DeviceKind) -> Owner:
    _close_ended()
    owner = _state.owners[place.owner] = Owner(place.pid)
    return owner


def _close_ended() -> None:
    """Close the memory of processes that have ended.

    This function is rarely called, because it may wait for the device.
    """
    busy = {copy.owner for copy in _state.copies}
    for token, owner in _state.owners.items():
        if token not in busy and owner.has_ended():
            owner.close()


def _contents_lost(place: DeviceKind, why: str) -> ChannelError:
    return ChannelError(
        f"the contents of a tensor that process {place.pid} put, on {place.kind} device "
        f"{place.device}, can't be reached, because {why}; keep that process alive, or set "
        f"{SWITCH}=0 in its environment to send through host memory"
    )


def settle() -> None:
    """Release the items whose copies are complete."""
    copies = _state.copies
    for _ in range(len(copies)):
        try:
            copy = copies.popleft()
        except IndexError:  # another thread took the last item
            return
        try:
            if not copy.device.done(copy.event):
                copies.append(copy)
        # Drop the copy: a failed device does not finish its copies, and its next use raises an error.
        except RuntimeError:
            continue


def _settle_in_background() -> None:
    """Release items in the background for a while, because this process may receive no further item."""
    with _state.lock:
        if not _state.settling:
            _state.settling = True
            _thread.start_new_thread(_settle_loop, ())


def _settle_loop() -> None:
    idle = 0
    while idle < IDLE_POLLS:
        time.sleep(POLL_INTERVAL_S)
        settle()
        idle = 0 if _state.copies else idle + 1
    with _state.lock:
        _state.settling = False
        again = bool(_state.copies)
    if again:
        _settle_in_background()


# --- Exit and fork ---


def _wait_at_exit() -> None:
    """Wait until other processes have read this process's memory, or until none can read it any more.

    During a run, this wait has no time limit, because the supervisor ends this process when the run is over.
    """
    limit, pause, next_check = float(os.environ.get(EXIT_WAIT, "60")), 0.0005, 0.02
    began = since = time.monotonic()
    count = -1
    while True:
        _state.sweep()
        if not _state.kept:
            return
        now = time.monotonic()
        unreturned = sum(len(kept.blocks) for kept in _state.kept.values())
        if unreturned != count:
            count, since = unreturned, now
        if now - began >= next_check:
            next_check = now - began + 0.5
            if not any(_may_be_read(kept.channel) for kept in _state.kept.values()):
                return
        if now - since >= limit and not any(_has_ports(kept.channel) for kept in _state.kept.values()):
            break
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    for kept in _state.kept.values():
        print(
            f"flowchan: process {os.getpid()} ends with {len(kept.blocks)} items in "
            f"{kept.channel!r} whose device tensors no process has read for {limit:g} s "
            f"({EXIT_WAIT}); their contents are lost. Set {SWITCH}=0 to send them through host "
            "memory.",
            file=sys.stderr,
        )


def only_ports_read(channels: Iterable[Any]) -> None:
    """Declare that these channels are read only through ports.

    If such a channel has no reading port left when this process exits, the process drops the items instead of
    waiting.
    """
    _state.ported.update(channels)


def _may_be_read(channel: Any) -> bool:
    """Return whether any process can still read the channel."""
    return _has_ports(channel) if channel in _state.ported else _is_open_in_other_process(channel)


def _has_ports(channel: Any) -> bool:
    return channel in _state.ported and channel.stats().readers > 0


def _is_open_in_other_process(channel: Any) -> bool:
    """Return whether another process has the channel's memory open."""
    memory = os.fstat(channel._fd)
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if pid == str(os.getpid()):
            continue
        try:
            for number in os.listdir(f"/proc/{pid}/fd"):
                found = os.stat(f"/proc/{pid}/fd/{number}")
                if (found.st_dev, found.st_ino) == (memory.st_dev, memory.st_ino):
                    return True
        except OSError:  # the process may have ended, or runs as another user
            continue
    return False


def _reset_after_fork() -> None:
    global _state
    _inherited.append(_state)
    for owner in _state.owners.values():
        owner.forget()
    devices = _state.devices
    _state = TransferState()
    _state.devices = devices


_state = TransferState()
# A parent's state is never released here, because its handles are invalid in this process.
_inherited: list[TransferState] = []
os.register_at_fork(after_in_child=_reset_after_fork)
