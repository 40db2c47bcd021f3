"""Manage the memory through which a trainer publishes its weights to readers on the same machine.

Algorithm. Each version is in a slot, which is an in-memory file of the trainer. One file descriptor of the
trainer, the front, always refers to the slot of the latest version. Readers open the front by its path in
``/proc``. A reader holds a shared lock (``flock``) on a slot while it copies the version. To publish, the
trainer takes the exclusive lock on a slot that is neither the latest nor locked. The trainer writes the
version into this slot, releases the lock, and atomically moves the front to the slot (``dup2``). If no such
slot exists, the trainer creates one. The trainer frees any other unused slots.

Invariants. A slot does not change while a reader holds the slot's lock. Each reader therefore copies one
complete version. The trainer never waits for a lock. A reader does not wait either: if the trainer has locked
the slot, the front has already moved to another slot. If a reader is killed, the kernel releases its lock.
All memory belongs to the trainer, and the kernel frees this memory when the trainer exits.

``LatestValue`` publishes broadcast values similarly, but its readers keep the memory mapped. Each version of
a broadcast value therefore needs a new file. Weights reuse slots, because allocating memory takes as long as
copying the weights.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import struct
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from flowchan import Broken
from flowchan.transport.interrupts import interrupts_deferred

_HEADER = struct.Struct("=16sQq?")  # token of the memory, version, step, whether the version has a step
_PAYLOAD = mmap.PAGESIZE
"""Offset of the weights in a slot."""
_UNFINISHED = 2**64 - 1
"""Version number of a slot while the trainer writes into it."""
_GONE = {errno.ENOENT, errno.ENXIO, errno.ESRCH}
"""Error codes for opening the front after the trainer has exited or has closed it."""


@dataclass(frozen=True, slots=True)
class WeightsAddress:
    """Address of the latest version for processes on the trainer's machine.

    Args:
        name: Name of the weights, for error messages.
        pid: Process ID of the trainer.
        path: Path of the front.
        token: Random bytes at the start of each slot that identify the memory.
        size: Size of the weights in bytes.
    """

    name: str
    pid: int
    path: str
    token: bytes
    size: int

    def latest(self) -> int:
        """Return the number of the latest version, or 0 if none has been published.

        Raises ``Broken`` if the trainer has exited or has closed the weights.
        """
        while True:
            fd = self._open()
            try:
                version = self._header(fd)[0]
            finally:
                os.close(fd)
            if version != _UNFINISHED:
                return version

    def pin(self) -> PinnedVersion:
        """Pin and return the latest version.

        The trainer does not overwrite a pinned version before the caller closes it.

        Raises ``Broken`` if the trainer has exited or has closed the weights.
        """
        while True:
            fd = self._open()
            try:
                # Check the file before locking it, because the path may now refer to another file.
                self._header(fd)
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                version, step = self._header(fd)
                if version != _UNFINISHED:
                    return PinnedVersion(fd, self.size, version, step)
            except BlockingIOError:
                pass  # the trainer writes into this slot, so another slot has the latest version
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def _open(self) -> int:
        try:
            return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in _GONE:
                raise self.gone() from error
            raise

    def _header(self, fd: int) -> tuple[int, int | None]:
        """Read the version and the step from the header of a slot."""
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise self.gone()
        header = os.pread(fd, _HEADER.size, 0)
        if len(header) != _HEADER.size:
            raise self.gone()
        token, version, step, has_step = _HEADER.unpack(header)
        if token != self.token:
            raise self.gone()
        return version, step if has_step else None

    def gone(self) -> Broken:
        """Return the error that readers raise after the trainer has exited or closed the weights."""
        return Broken(f"weights {self.name!r}: the trainer (process {self.pid}) has exited or closed them")


class PinnedVersion:
    """Version that the trainer does not overwrite before :meth:`close`.

    Args:
        fd: Descriptor of the slot, with a shared lock. This object closes the descriptor.
        size: Size of the weights in bytes.
        version: Number of the version.
        step: Training step that the trainer passed to ``publish``.
    """

    def __init__(self, fd: int, size: int, version: int, step: int | None) -> None:
        self._fd, self._size = fd, size
        self.version, self.step = version, step
        self.inode = os.fstat(fd).st_ino

    def read(self, into: memoryview, offset: int) -> None:
        """Fill ``into`` with the bytes of the weights from ``offset`` onwards."""
        offset += _PAYLOAD
        while into:
            count = os.preadv(self._fd, [into], offset)
            if not count:
                raise EOFError(f"weights: the file must be longer than {offset} bytes, but it was truncated")
            into, offset = into[count:], offset + count

    def close(self) -> None:
        """Allow the trainer to reuse the slot."""
        # Unlock explicitly: if a forked child shares the descriptor, closing it does not release the lock.
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        os.close(self._fd)

    def __enter__(self) -> PinnedVersion:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Slot:
    """In-memory file for one version."""

    def __init__(self, token: bytes, size: int) -> None:
        self._token = token
        self.fd = os.memfd_create("flowchan weights")
        try:
            # Allocate the memory now. Otherwise, a later write would kill the trainer if the machine is out
            # of memory.
            os.posix_fallocate(self.fd, 0, _PAYLOAD + size)
            self._map = mmap.mmap(self.fd, _PAYLOAD + size)
        except BaseException:
            os.close(self.fd)
            raise
        self.inode = os.fstat(self.fd).st_ino
        self.payload = memoryview(self._map)[_PAYLOAD:]

    def lock(self) -> bool:
        """Try to take the exclusive lock, and return False if a reader holds a lock on the slot."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    def label(self, version: int, step: int | None = None) -> None:
        """Write the header of the slot."""
        _HEADER.pack_into(self._map, 0, self._token, version, step or 0, step is not None)


class WeightsMemory:
    """Trainer's side of the memory.

    Args:
        name: Name of the weights, for error messages.
        size: Size of the weights in bytes.
    """

    def __init__(self, name: str, size: int) -> None:
        self._lock = threading.Lock()
        self._token, self._size = os.urandom(16), size
        self._front = os.memfd_create("flowchan weights")
        os.write(self._front, _HEADER.pack(self._token, 0, 0, False))
        self._slots: list[_Slot] = []
        self._latest: _Slot | None = None
        pid = os.getpid()
        self.address = WeightsAddress(name, pid, f"/proc/{pid}/fd/{self._front}", self._token, size)
        _live.add(self)

    def publish(self, version: int, step: int | None, fill: Callable[[memoryview], None]) -> None:
        """Publish a version. If ``fill`` raises an exception, the previous version remains the latest.

        Args:
            version: Number of the version.
            step: Training step of the version.
            fill: Function that writes the weights into the given memory.

        Raises:
            OSError: There is not enough memory.
        """
        with self._lock:
            slot = self._free_slot()
            try:
                slot.label(_UNFINISHED)
                fill(slot.payload)
            except BaseException:
                slot.unlock()
                raise
            with interrupts_deferred():
                slot.label(version, step)
                # Unlock before moving the front. If this process is stopped in between, readers can still
                # read the previous version.
                slot.unlock()
                os.dup2(slot.fd, self._front, inheritable=False)
                self._latest = slot

    def _free_slot(self) -> _Slot:
        """Return an exclusively locked slot, and free all other unused slots."""
        free = [slot for slot in self._slots if slot is not self._latest and slot.lock()]
        for extra in free[1:]:
            self._slots.remove(extra)
            os.close(extra.fd)
        if free:
            return free[0]
        slot = _Slot(self._token, self._size)
        slot.lock()
        self._slots.append(slot)
        return slot

    def payload(self, pinned: PinnedVersion) -> memoryview:
        """Return the memory of a version that this process has pinned."""
        return next(slot.payload for slot in list(self._slots) if slot.inode == pinned.inode).toreadonly()

    def count(self) -> int:
        """Return the number of slots."""
        return len(self._slots)

    def close(self) -> None:
        """Close all files. Later reads raise ``Broken``."""
        with self._lock:
            if self._front >= 0:
                os.close(self._front)
            for slot in self._slots:
                os.close(slot.fd)
            self._front, self._slots, self._latest = -1, [], None


_live: weakref.WeakSet[WeightsMemory] = weakref.WeakSet()


def _after_fork() -> None:
    """Close the files in a forked child, so that the memory does not outlive the trainer."""
    for memory in list(_live):
        memory._lock = threading.Lock()
        memory.close()


os.register_at_fork(after_in_child=_after_fork)
