"""How the descriptors of channels, and of memory that is shared, reach another process.

By inheritance while a child is being started. In an item of a channel: they travel beside it, in the kernel's
keeping (ring_fd_bundles.cpp), so neither the sender nor anybody else need live until it is received. In what
somebody pickles by himself: out of the sender's table under ``/proc``, which works for processes of the same
user as long as the sender lives.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from multiprocessing import context, reduction
from typing import Any, NamedTuple

from flowchan import _core

CHANNELS_IN_AN_ITEM = 253 // 2
"""The kernel passes 253 descriptors at once (SCM_MAX_FD), and a channel has two."""

_REMEDIES = {
    errno.EMFILE: "this process has as many descriptors open as it may. Close some, or "
    "allow more (ulimit -n)",
    errno.ENFILE: "this machine has as many descriptors open as it may. Close some, or allow more "
    "(sysctl fs.file-max)",
    errno.ENOMEM: "this process may not map so much memory. Free some, or allow more (ulimit -v)",
}
SHORTAGES = {*_REMEDIES, errno.ENOBUFS}


def lacks(error: BaseException) -> bool:
    """Whether this process just lacks memory or descriptors: it may go well later."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in SHORTAGES)


def shortage(what: str, error: OSError) -> OSError | None:
    """What to raise in place of ``error`` when this process just lacks something to receive ``what``; else
    None. Who gets this from unpickling finds the item in its channel again: the core puts it back."""
    reason = _REMEDIES.get(error.errno or 0)
    return (
        OSError(error.errno, f"{what} can't be received now, and stays where it is: {reason}")
        if reason
        else None
    )


class Inherited(NamedTuple):
    """For a child that is being started."""

    memory: Any
    socket: Any


class Sent(NamedTuple):
    """In the parcel of the item that is being pickled: where its descriptors begin there, and how many they
    are."""

    first: int
    number: int
    inode: int


class Beside(NamedTuple):
    """Among what stands beside a packed value."""

    place: int
    inode: int


class Borrowed(NamedTuple):
    """In the table of the process that has it."""

    pid: int
    memory: int
    socket: int
    inode: int


Handle = Inherited | Sent | Beside | Borrowed


class Parcel:
    """The descriptors that one item takes along, while it is pickled."""

    shares = True
    """Whether memory that is shared travels as what it is; else it is copied."""
    keeps_far = False
    """Whether channels across hosts stand beside the pickle; else their addresses are in it."""
    on_device = True
    """Whether a tensor on a device stays there; else it goes through host memory."""

    def __init__(self) -> None:
        self.descriptors: list[int] = []
        self.kept: list[Any] = []  # so that they stay open until they are sent
        self.id = 0
        self.counted: list[Callable[[], None]] = []  # for each channel across hosts, what counts it no more

    def take_back(self) -> None:
        """Nothing comes of the item."""
        for call in self.counted:
            call()
        self.counted.clear()

    def add(self, memory: int, socket: int, owner: Any) -> Handle:
        self.id = self.id or int.from_bytes(os.urandom(8)) or 1
        self.kept.append(owner)
        mine = [fd for fd in (memory, socket) if fd >= 0]
        self.descriptors += mine
        return Sent(len(self.descriptors) - len(mine), len(mine), os.fstat(memory).st_ino)


class Leaving(Parcel):
    """The same of an item that goes to another host, where it is refused if it has any."""

    on_device = False


class Companions(Parcel):
    """The channels and shared memory in one value, while it is packed: they stand beside its pickle, and
    cross by themselves."""

    keeps_far = True
    on_device = False

    def add(self, memory: int, socket: int, owner: Any) -> Handle:
        self.kept.append(owner)
        return Beside(len(self.kept) - 1, os.fstat(memory).st_ino)


class DuplicatedDescriptors(Companions):
    """The same for a value that leaves the machine."""

    shares = keeps_far = False


class Unopened(Companions):
    """The same for a value that others pass on who do not look at it, so nothing in it may need their
    help."""

    keeps_far = False


class OpenedDescriptors:
    """The descriptors that came with one item, while it is unpickled. ``missing``: why there are not all of
    them."""

    def __init__(self, descriptors: list[int], missing: int) -> None:
        self.left = dict(enumerate(descriptors))
        self.missing = missing

    def take(self, sent: Sent) -> tuple[int, int]:
        last = sent.first + sent.number
        if not all(number in self.left for number in range(sent.first, last)):
            raise OSError(self.missing or errno.EBADF, os.strerror(self.missing or errno.EBADF))
        return self.left.pop(sent.first), self.left.pop(last - 1) if sent.number > 1 else -1

    def close(self) -> None:
        for fd in self.left.values():
            os.close(fd)
        self.left.clear()


class _Now(threading.local):
    packing: Parcel | None = None
    opened: OpenedDescriptors | None = None
    beside: list[Any] | None = None


now = _Now()
"""What this thread pickles into an item just now, or unpickles of one."""


def hand_over(memory: int, socket: int, owner: Any) -> Handle:
    """What to pickle in place of the descriptors that ``owner`` keeps open: of memory, and of a channel's
    socket or -1."""
    if context.get_spawning_popen() is not None:
        return Inherited(reduction.DupFd(memory), reduction.DupFd(socket) if socket >= 0 else None)
    if now.packing is not None:
        return now.packing.add(memory, socket, owner)
    return Borrowed(os.getpid(), memory, socket, os.fstat(memory).st_ino)


def take_over(handle: Inherited | Sent | Borrowed) -> tuple[int, int]:
    """Descriptors of this process for what :func:`hand_over` gave: of the memory, and of the socket, or -1.
    Raises ``OSError``."""
    if isinstance(handle, Inherited):
        return int(handle.memory.detach()), -1 if handle.socket is None else int(handle.socket.detach())
    if isinstance(handle, Sent):
        if now.opened is None:
            raise OSError(
                errno.EBADF, "it crosses within its item only, and not within bytes that an item carries"
            )
        return now.opened.take(handle)
    memory = os.open(f"/proc/{handle.pid}/fd/{handle.memory}", os.O_RDWR | os.O_CLOEXEC)
    if os.fstat(memory).st_ino != handle.inode:
        os.close(memory)
        raise OSError(f"descriptor {handle.memory} of process {handle.pid} is another file by now")
    return memory, _core._descriptor_of(handle.pid, handle.socket) if handle.socket >= 0 else -1
