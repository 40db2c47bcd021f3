"""Transfer descriptors of channels and shared memory to other processes.

A child inherits descriptors when it starts. If a channel's item contains descriptors, the kernel carries them
next to the item (ring_fd_bundles.cpp). The sender may therefore end before the item is received. If the user
pickles an object, the pickle refers to the sender's descriptors under ``/proc``. Only processes of the same
user can open these descriptors, and only while the sender is alive.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator
from multiprocessing import context, reduction
from typing import Any, NamedTuple

from flowchan import _core

CHANNELS_IN_AN_ITEM = 253 // 2
"""The kernel passes at most 253 descriptors at once (SCM_MAX_FD), and a channel has two."""

_REMEDIES = {
    errno.EMFILE: (
        "this process has reached its limit on open descriptors; close some, or raise the limit (ulimit -n)"
    ),
    errno.ENFILE: (
        "this machine has reached its limit on open descriptors; close some, or raise the limit "
        "(sysctl fs.file-max)"
    ),
    errno.ENOMEM: (
        "this process has reached its memory limit; free some memory, or raise the limit (ulimit -v)"
    ),
}
SHORTAGES = {*_REMEDIES, errno.ENOBUFS}


def lacks(error: BaseException) -> bool:
    """Return whether the error means that this process lacks memory or descriptors at the moment."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in SHORTAGES)


def shortage(what: str, error: OSError) -> OSError | None:
    """Return the error to raise if memory or descriptors for ``what`` are lacking, or None otherwise.

    The core returns an item to its channel if unpickling raises this error.
    """
    reason = _REMEDIES.get(error.errno or 0)
    return (
        OSError(error.errno, f"{what} can't be received now and stays in its channel: {reason}")
        if reason
        else None
    )


class Inherited(NamedTuple):
    """Descriptors that a child inherits when it starts."""

    memory: Any
    socket: Any


class Sent(NamedTuple):
    """Descriptors in the bundle that is sent with an item.

    The values are the index of the first descriptor, the number of descriptors, and the memory's inode.
    """

    first: int
    number: int
    inode: int


class Beside(NamedTuple):
    """Object that is sent next to a packed value. The value refers to the object by index."""

    place: int
    inode: int


class Borrowed(NamedTuple):
    """Descriptors that another process has open, by their numbers in that process."""

    pid: int
    memory: int
    socket: int
    inode: int


Handle = Inherited | Sent | Beside | Borrowed


class Parcel:
    """Collects the descriptors of one item while it is pickled."""

    shares = True
    """True if shared memory stays shared; otherwise, it is copied."""
    keeps_far = False
    """True if channels across hosts are sent next to the pickle; otherwise, the pickle contains their
    addresses.
    """
    on_device = True
    """True if a tensor stays on its device; otherwise, it is copied through host memory."""
    leaves = False
    """True if the item goes to another host."""

    def __init__(self) -> None:
        self.descriptors: list[int] = []
        self.kept: list[Any] = []  # keeps the descriptors open until they are sent
        self.id = 0
        # Functions that release the references counted for the item's remote channels.
        self.counted: list[Callable[[], None]] = []

    def take_back(self) -> None:
        """Undo all counts that were made for the item, because the item will not be sent."""
        for call in self.counted:
            call()
        self.counted.clear()

    def add(self, memory: int, socket: int, owner: Any) -> Handle:
        self.id = self.id or int.from_bytes(os.urandom(8)) or 1
        self.kept.append(owner)
        own_fds = [fd for fd in (memory, socket) if fd >= 0]
        self.descriptors += own_fds
        return Sent(len(self.descriptors) - len(own_fds), len(own_fds), os.fstat(memory).st_ino)


class Leaving(Parcel):
    """Collects the descriptors of an item for another host. An item with any descriptors is rejected."""

    on_device = False
    leaves = True


class Companions(Parcel):
    """Collects the channels and shared memory of one value while it is packed.

    The channels and memory are sent next to the value's pickle, as separate objects.
    """

    keeps_far = True
    on_device = False

    def add(self, memory: int, socket: int, owner: Any) -> Handle:
        self.kept.append(owner)
        return Beside(len(self.kept) - 1, os.fstat(memory).st_ino)


class DuplicatedDescriptors(Companions):
    """Collects a value's channels for another host, and copies its shared memory."""

    shares = keeps_far = False
    leaves = True


class Unopened(Companions):
    """Collects the channels in a value that other processes will forward without unpacking it.

    The value must not contain anything that these processes would have to handle.
    """

    keeps_far = False


class OpenedDescriptors:
    """Descriptors that arrived with the item that is being unpickled.

    ``missing`` is the errno that explains why some descriptors are missing, or 0.
    """

    def __init__(self, descriptors: list[int], missing: int) -> None:
        self.remaining = dict(enumerate(descriptors))
        self.missing = missing

    def take(self, sent: Sent) -> tuple[int, int]:
        last = sent.first + sent.number
        if not all(number in self.remaining for number in range(sent.first, last)):
            raise OSError(self.missing or errno.EBADF, os.strerror(self.missing or errno.EBADF))
        return self.remaining.pop(sent.first), self.remaining.pop(last - 1) if sent.number > 1 else -1

    def close(self) -> None:
        for fd in self.remaining.values():
            os.close(fd)
        self.remaining.clear()


class _Now(threading.local):
    packing: Parcel | None = None
    opened: OpenedDescriptors | None = None
    for_several: bool = False
    """True if several processes will get the values that this thread pickles."""
    beside: list[Any] | None = None
    for_host: bool = False
    """True if this thread pickles a stage that will run on another host."""


now = _Now()
"""State of this thread while it pickles or unpickles."""


@contextlib.contextmanager
def for_several_processes(several: bool) -> Iterator[None]:
    """In the ``with`` block, pickle values for several processes."""
    now.for_several = several
    try:
        yield
    finally:
        now.for_several = False


@contextlib.contextmanager
def for_another_host() -> Iterator[None]:
    """In the ``with`` block, pickle this thread's values for another host."""
    outer, now.for_host = now.for_host, True
    try:
        yield
    finally:
        now.for_host = outer


def is_for_another_host() -> bool:
    """Return whether this thread is pickling for another host."""
    return now.for_host or (now.packing is not None and now.packing.leaves)


def hand_over(memory: int, socket: int, owner: Any) -> Handle:
    """Return the object to pickle instead of descriptors that ``owner`` keeps open.

    ``socket`` is the socket of a channel, or -1.
    """
    if context.get_spawning_popen() is not None:
        return Inherited(reduction.DupFd(memory), reduction.DupFd(socket) if socket >= 0 else None)
    if now.packing is not None:
        return now.packing.add(memory, socket, owner)
    return Borrowed(os.getpid(), memory, socket, os.fstat(memory).st_ino)


def take_over(handle: Inherited | Sent | Borrowed) -> tuple[int, int]:
    """Return a handle's memory and socket (or -1) as descriptors of this process.

    Raise ``OSError`` on failure.
    """
    if isinstance(handle, Inherited):
        return int(handle.memory.detach()), -1 if handle.socket is None else int(handle.socket.detach())
    if isinstance(handle, Sent):
        if now.opened is None:
            message = "an item with descriptors must be sent directly, not pickled inside another item"
            raise OSError(errno.EBADF, message)
        return now.opened.take(handle)
    memory = os.open(f"/proc/{handle.pid}/fd/{handle.memory}", os.O_RDWR | os.O_CLOEXEC)
    if os.fstat(memory).st_ino != handle.inode:
        os.close(memory)
        raise OSError(f"descriptor {handle.memory} of process {handle.pid} was closed")
    return memory, _core._descriptor_of(handle.pid, handle.socket) if handle.socket >= 0 else -1
