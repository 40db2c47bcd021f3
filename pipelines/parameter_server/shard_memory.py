"""Manage the memory of one shard: two blocks of tensors, and a record of the current block.

Algorithm. The memory is an in-memory file of the server's program. The shard's worker and all clients on the
machine map this file. The worker applies a push in the block that is not current (the *shadow*). Then the
worker writes a record with the version, the push, the outcome and the counts. Finally, the worker increments
the *epoch*, a word of eight bytes. The epoch selects one of two records, and the version selects one of two
blocks. A single store, which increments the epoch, therefore makes the block, the record and the counts
current at once.

Exactly-once application. If the worker is killed before this store, the push has had no effect. If the worker
is killed after the store, the record names the push. The channel sends a killed worker's item to the
replacement. The replacement skips a push that the record names. A worker takes one push at a time, so only
the last push can arrive twice.

Consistent reads. Each block has a version word, which is zero while a worker writes to the block. A reader
copies the current block and compares the word before and after the copy. If the two values differ, the reader
tries again. After ``OPTIMISTIC_READS`` failures, the reader locks the block. The worker waits at most
``MOST_LOCKED_S`` for this lock. The kernel releases the locks of a dead process.

Slots. A client claims a slot by locking one byte. Only the client writes the words of its slot, and only the
worker writes the outcomes of the client's pushes. The memory holds the outcomes of the last ``PENDING``
pushes. If another client claims the slot later, the push numbers continue. A slot and a number therefore
identify a push.

Invariants. The algorithm requires atomic stores of words in program order, as on processors with total store
order. Only the shard's worker writes blocks, records and outcomes.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import pickle
import secrets
import struct
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from flowchan import Broken
from flowchan.items.program_file import ProgramFile
from flowchan.pipelines.parameter_server.tensor_layout import Layout
from flowchan.pipelines.parameter_server.wakeup import Wakeup

SLOTS = 1024
"""Maximum number of simultaneous clients of one server."""
PENDING = 64
"""Maximum number of one client's pushes without an outcome."""
MOST_LOCKED_S = 1.0
"""Maximum time that a reader can delay a push, in seconds."""
OPTIMISTIC_READS = 3
"""Number of reads that may fail before the reader locks the block."""

APPLIED, DROPPED, FAILED = 1, 2, 3
"""Outcomes of a push."""

_WORD = 8
_EPOCH, _VERSION_OF_BLOCK, _WAKEUP, _ATTEMPT, _PULLS_WAKE, _RECORDS, _SLOT_WORDS = 2, 3, 5, 6, 9, 16, 64
_RECORD_WORDS = 16
_WORDS_PER_SLOT = 8
_NEXT_PUSH, _PULLS, _BYTES_OUT, _PULLED = range(4)
_OUTCOMES = _SLOT_WORDS + SLOTS * _WORDS_PER_SLOT
_OUTCOME_WORDS = 3  # push number plus one, outcome, value
_BLOCKS_AT = -(-(_OUTCOMES + SLOTS * PENDING * _OUTCOME_WORDS) * _WORD // mmap.PAGESIZE) * mmap.PAGESIZE

_ERROR_ROOM = 1 << 16
_ERRORS = 64
_ERROR = struct.Struct("QQ")  # error number and size in bytes
_LOCK = struct.Struct("hhqqi0q")  # C struct flock
_BLOCK_LOCK = 1 << 40  # file offset of the block locks; the slot locks begin at offset 0


class Record(NamedTuple):
    """State of a shard after its last push.

    Attributes:
        version: Current version.
        slot: Slot of the client that sent the last push, plus one.
        push: Number of the last push in its slot.
        outcome: Outcome of the last push.
        value: Version after the last push, or the error number if the push failed.
        pushes: Number of applied pushes.
        dropped: Number of pushes that were too old.
        failed: Number of pushes that raised an error.
        staleness: Total staleness of all pushes, in versions.
        stalest: Largest staleness of a push, in versions.
        measured: Number of pushes with known staleness.
        bytes_in: Bytes of all applied pushes.
        object_size: Size of the pickled object in bytes.
    """

    version: int = 0
    slot: int = 0
    push: int = 0
    outcome: int = 0
    value: int = 0
    pushes: int = 0
    dropped: int = 0
    failed: int = 0
    staleness: int = 0
    stalest: int = 0
    measured: int = 0
    bytes_in: int = 0
    object_size: int = 0


class Outcome(NamedTuple):
    """Outcome of one push (``APPLIED``, ``DROPPED`` or ``FAILED``), with a version or an error number."""

    outcome: int
    value: int


class ShardMemory:
    """Memory of one shard. An unpickled copy maps the same memory.

    Args:
        layout: Layout of a block.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._file = ProgramFile("flowchan parameters")
        self._errors = ProgramFile("flowchan errors")
        self._objects = (ProgramFile("flowchan object"), ProgramFile("flowchan object"))
        self._token = secrets.token_bytes(2 * _WORD)
        os.ftruncate(self._file.fd, _BLOCKS_AT + 2 * self._block_size)
        os.pwrite(self._file.fd, self._token, 0)

    @property
    def _block_size(self) -> int:
        return -(-self.layout.size // mmap.PAGESIZE) * mmap.PAGESIZE

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self.layout, self._file, self._errors, self._objects, self._token)

    def opened(self) -> OpenShard:
        """Map the memory in this process.

        Raises:
            Broken: The server's program has exited.
        """
        # Open the file again for the locks, because locks on the same open file description never conflict.
        # Moreover, the kernel keeps a lock until all descriptors of its open file description are closed, and
        # the mapping's descriptor stays open.
        try:
            fd = os.open(self._file._path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise Broken("the parameter server's program has exited") from error
        try:
            if os.pread(fd, len(self._token), 0) != self._token:
                raise Broken("the parameter server's program has exited")
            return OpenShard(self, fd, mmap.mmap(self._file.fd, os.fstat(fd).st_size))
        except BaseException:
            os.close(fd)
            raise

    @property
    def gone(self) -> bool:
        """Return whether the program that owns the memory has exited."""
        return not os.path.exists(self._file._path)


def _arrived(
    layout: Layout, file: ProgramFile, errors: ProgramFile, objects: Any, token: bytes
) -> ShardMemory:
    memory = object.__new__(ShardMemory)
    memory.layout, memory._file, memory._errors = layout, file, errors
    memory._objects, memory._token = objects, token
    return memory


class OpenShard:
    """Mapped memory of one shard.

    Args:
        memory: Memory of the shard.
        fd: Descriptor with its own open file description.
        mapped: Memory map of the shard's file.
    """

    def __init__(self, memory: ShardMemory, fd: int, mapped: mmap.mmap) -> None:
        self.memory, self._fd = memory, fd
        self._words = memoryview(mapped).cast("Q")
        self.wakeup = Wakeup(mapped, _WAKEUP * _WORD)
        self.blocks: tuple[dict[str, Any], ...] = tuple(
            {
                entry.name: entry.view(mapped, _BLOCKS_AT + block * memory._block_size)
                for entry in memory.layout.entries
            }
            for block in (0, 1)
        )
        self.close = weakref.finalize(self, os.close, fd)
        self.close.atexit = False  # at exit, threads may still use the memory

    # --- both sides ---

    def record(self) -> Record:
        """Return the current record."""
        while True:
            epoch = self._words[_EPOCH]
            start = _RECORDS + epoch % 2 * _RECORD_WORDS
            found = Record(*self._words[start : start + len(Record._fields)])
            if self._words[_EPOCH] == epoch:
                return found

    @property
    def version(self) -> int:
        """Return the current version."""
        return self.record().version

    def is_version(self, version: int) -> bool:
        """Return whether the block of this version is complete and unchanged."""
        return self._words[_VERSION_OF_BLOCK + version % 2] == version + 1

    def read_object(self, record: Record) -> bytes:
        """Return the pickled object of the version in a record."""
        return os.pread(self.memory._objects[record.version % 2].fd, record.object_size, 0)

    # --- the worker ---

    def fill(self, tensors: Mapping[str, Any], contents: bytes = b"", version: int = 0) -> None:
        """Store the first version, before any worker or client uses the memory."""
        for name, value in tensors.items():
            self.blocks[version % 2][name][...] = value
        os.pwrite(self.memory._objects[version % 2].fd, contents, 0)
        self._words[_VERSION_OF_BLOCK + version % 2] = version + 1
        self._write(Record(version=version, object_size=len(contents)))

    def begin(self, slot: int, push: int) -> int:
        """Count an attempt to apply a push, and return the number of attempts so far."""
        before = self._words[_ATTEMPT : _ATTEMPT + 3].tolist()
        attempts = before[2] + 1 if before[:2] == [slot, push] else 1
        if attempts == 1:
            self._words[_ATTEMPT + 2] = 0
            self._words[_ATTEMPT], self._words[_ATTEMPT + 1] = slot, push
        self._words[_ATTEMPT + 2] = attempts
        return attempts

    def open_shadow(self, version: int) -> dict[str, Any]:
        """Wait for readers to leave the block of a new version, and return the block."""
        block = version % 2
        late = time.monotonic() + MOST_LOCKED_S
        while not self._lock(_BLOCK_LOCK + block, fcntl.F_WRLCK) and time.monotonic() < late:
            time.sleep(0.0001)
        # Clear the version only after the wait: a reader that holds the lock must find its copy valid.
        self._words[_VERSION_OF_BLOCK + block] = 0
        self._lock(_BLOCK_LOCK + block, fcntl.F_UNLCK)
        return self.blocks[block]

    def write_object(self, version: int, contents: bytes) -> None:
        """Store the pickled object of a new version."""
        fd = self.memory._objects[version % 2].fd
        os.ftruncate(fd, len(contents))
        left, at = memoryview(contents), 0
        while left:
            written = os.pwrite(fd, left, at)
            left, at = left[written:], at + written

    def store_error(self, number: int, error: BaseException) -> None:
        """Store the error of a push."""
        try:
            packed = pickle.dumps(error)
            pickle.loads(packed)
        except Exception:
            packed = b""
        if not packed or len(packed) > _ERROR_ROOM - _ERROR.size:
            packed = pickle.dumps(RuntimeError(f"{type(error).__name__}: {str(error)[:1000]}"))
        at = number % _ERRORS * _ERROR_ROOM
        os.pwrite(self.memory._errors.fd, _ERROR.pack(number, len(packed)) + packed, at)

    def commit(self, record: Record) -> None:
        """Make a record current, together with the block of its version."""
        self._words[_VERSION_OF_BLOCK + record.version % 2] = record.version + 1
        self._write(record)

    def _write(self, record: Record) -> None:
        epoch = self._words[_EPOCH] + 1
        start = _RECORDS + epoch % 2 * _RECORD_WORDS
        for place, number in enumerate(record, start):
            self._words[place] = number
        self._words[_EPOCH] = epoch

    def report(self, record: Record) -> None:
        """Store the outcome of the last push for its client, and wake all waiting threads."""
        at = _outcome_at(record.slot - 1, record.push)
        self._words[at] = 0
        self._words[at + 1], self._words[at + 2] = record.outcome, record.value
        self._words[at] = record.push + 1
        self.wakeup.wake()

    # --- the client ---

    def claim_slot(self) -> int:
        """Claim a slot for a client in this process.

        Raises:
            RuntimeError: All slots are taken.
        """
        for slot in range(SLOTS):
            if self._lock(slot, fcntl.F_WRLCK):
                self._words[self._word(slot, _PULLED)] = 0
                return slot
        raise RuntimeError(f"ParameterServer: at most {SLOTS} clients can be open at once; close some")

    def next_push(self, slot: int) -> int:
        """Reserve and return the number of a client's next push."""
        at = self._word(slot, _NEXT_PUSH)
        self._words[at] += 1
        return self._words[at] - 1

    def outcome(self, slot: int, push: int) -> Outcome | None:
        """Return the outcome of a push, or None if the push has no outcome yet.

        Raise ``RuntimeError`` if later pushes of the slot have overwritten the outcome.
        """
        at = _outcome_at(slot, push)
        number, outcome, value = self._words[at : at + _OUTCOME_WORDS]
        if number > push + 1:
            raise RuntimeError(
                "wait: the client was closed before this call, and the outcome of the push was overwritten"
            )
        return Outcome(outcome, value) if number == push + 1 else None

    def error(self, number: int) -> BaseException:
        """Return the stored error with this number."""
        data = os.pread(self.memory._errors.fd, _ERROR_ROOM, number % _ERRORS * _ERROR_ROOM)
        stored, size = _ERROR.unpack_from(data)
        if stored != number:
            return RuntimeError("the push failed; its error was overwritten by errors of later pushes")
        found: BaseException = pickle.loads(data[_ERROR.size : _ERROR.size + size])
        return found

    def count_pull(self, slot: int, version: int, size: int) -> None:
        """Count a client's pull."""
        self._words[self._word(slot, _PULLS)] += 1
        self._words[self._word(slot, _BYTES_OUT)] += size
        self._words[self._word(slot, _PULLED)] = version + 1
        if self._words[_PULLS_WAKE]:
            self.wakeup.wake()

    def pulls(self) -> tuple[int, int]:
        """Return the number of all pulls so far, and their total size in bytes."""
        words = self._words[_SLOT_WORDS:_OUTCOMES].tolist()
        return sum(words[_PULLS::_WORDS_PER_SLOT]), sum(words[_BYTES_OUT::_WORDS_PER_SLOT])

    def slowest(self, but: int) -> int | None:
        """Return the oldest version among the last pulls of the other live clients; None if there are none.

        After this call, each pull wakes the waiting threads.
        """
        self._words[_PULLS_WAKE] = 1
        pulled = self._words[_SLOT_WORDS:_OUTCOMES].tolist()[_PULLED::_WORDS_PER_SLOT]
        others = (slot for slot in range(SLOTS) if slot != but and pulled[slot] and self._is_locked(slot))
        return min((pulled[slot] - 1 for slot in others), default=None)

    @contextlib.contextmanager
    def reading(self, version: int, lock: bool) -> Iterator[None]:
        """Lock the block of a version against writes by the worker, unless ``lock`` is false."""
        lock = lock and self._lock(_BLOCK_LOCK + version % 2, fcntl.F_RDLCK)
        try:
            yield
        finally:
            if lock:
                self._lock(_BLOCK_LOCK + version % 2, fcntl.F_UNLCK)

    @staticmethod
    def _word(slot: int, word: int) -> int:
        return _SLOT_WORDS + slot * _WORDS_PER_SLOT + word

    def _lock(self, position: int, kind: int) -> bool:
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _LOCK.pack(kind, os.SEEK_SET, position, 1, 0))
        except BlockingIOError:
            return False
        return True

    def _is_locked(self, position: int) -> bool:
        asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, position, 1, 0)
        kind: int = _LOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, asked))[0]
        return kind != fcntl.F_UNLCK


def _outcome_at(slot: int, push: int) -> int:
    return _OUTCOMES + (slot * PENDING + push % PENDING) * _OUTCOME_WORDS
