"""Read and write files that contain the items of one channel.

Format, version 1. All numbers are little-endian. The file consists of a header, one record for each item, and
an end record.

- Header: ``MAGIC``, the version (u32), and the length (u32) and the CRC-32 (u32) of a JSON object, followed
  by the JSON object. Its keys are "graph", "channel" and "flowchan" (the version that wrote the file).
- Record: the number of the item (u64, from 0) and the number of parts (u32). The length (u64) and the CRC-32
  (u32) of the body follow, and then the CRC-32 of these four fields (u32) and the body. The body contains the
  length of each part (u64), followed by the parts. They are a pickle and the buffers of its arrays, as
  :func:`flowchan.pack` returns them.
- End record: a record with the number ``END``, whose only part is a JSON object. Its keys are "items", the
  number of items, and "stopped", the reason why the recording ended before the channel, or "".

Invariant. A record is written before its item is passed on, and this process does not buffer it. If the
program is killed, only the last record can be incomplete.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import operator
import os
import struct
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from flowchan.items.arguments import whole
from flowchan.items.codec import unpack
from flowchan.items.latest_value import parts_of
from flowchan.items.text import shown
from flowchan.public import public

log = logging.getLogger("flowchan.run")

MAGIC, VERSION = b"FLOWREC\n", 1
END = 2**64 - 1
MOST = 1_000_000
"""Default limit on the number of items in a file."""
MAX_BYTES = 1_000_000_000
"""Default limit on the size of a file."""
JOINED_BYTES = 65_536
"""Maximum size of a record whose parts are joined, so that a single call writes them."""
_HEAD = struct.Struct("<8sIII")
_RECORD = struct.Struct("<QIQI")
_CRC = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class RecordingOptions:
    """Options of a declared recording: its file, its limits, and the names for its header."""

    path: str
    graph: str
    channel: str
    most: int
    max_bytes: int

    @contextlib.contextmanager
    def opened(self) -> Iterator[RecordingWriter]:
        """Create or truncate the file, and complete it at the end of the block."""
        writer = RecordingWriter(self)
        try:
            yield writer
        finally:
            writer.close()


def recording_options(
    path: str | os.PathLike[str], graph: str, channel: str, most: int, max_bytes: int
) -> RecordingOptions:
    """Check the arguments of a recording."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"record: path must be a path, got {shown(path)}")
    whole("record", "most", most, 1)
    whole("record", "max_bytes", max_bytes, 1)
    file = os.path.abspath(os.fsdecode(path))  # the program may change its working directory before a run
    if os.path.isdir(file) or not os.access(os.path.dirname(file), os.W_OK):
        raise ValueError(
            f"record: path must name a file in a folder that exists and is writable, got {file!r}"
        )
    return RecordingOptions(file, graph, channel, most, max_bytes)


class RecordingWriter:
    """Writes the items of one run to a file until the file reaches a limit.

    A recording never disturbs the run. A recording that reaches a limit or fails ends with a warning, and the
    run continues.
    """

    def __init__(self, options: RecordingOptions) -> None:
        from importlib.metadata import version  # imported late, because few programs record items

        self._options = options
        self._items = self._size = 0
        self._file: IO[bytes] | None = _open_alone(options.path)
        about = {"graph": options.graph, "channel": options.channel, "flowchan": version("flowchan")}
        text = json.dumps(about).encode()
        try:
            self._write([_HEAD.pack(MAGIC, VERSION, len(text), zlib.crc32(text)) + text])
        except OSError as error:
            self._release()
            raise OSError(error.errno, error.strerror, options.path) from None
        except BaseException:
            self._release()
            raise

    def write(self, item: Any) -> None:
        """Write one item, unless the recording has ended."""
        if self._file is None:
            return
        if self._items == self._options.most:
            self._stop(f"the limit of {self._options.most:,} items was reached")
            return
        try:
            parts = _record(self._items, parts_of(item))
        except Exception as error:
            self._stop(f"item {self._items} can't be recorded: {error}")
            return
        if self._size + sum(map(len, parts)) > self._options.max_bytes:
            self._stop(f"the limit of {self._options.max_bytes:,} bytes was reached")
            return
        try:
            self._write(parts)
        except OSError as error:
            self._stop(f"item {self._items} could not be written: {error.strerror or error}")
        else:
            self._items += 1

    def close(self) -> None:
        """Complete and close the file. Later calls have no effect."""
        self._end("")

    def _stop(self, reason: str) -> None:
        log.warning(
            "the recording %r of channel %r ended after %s items, because %s; the run continues",
            self._options.path, self._options.channel, f"{self._items:,}", reason,
        )  # fmt: skip
        self._end(reason)

    def _end(self, stopped: str) -> None:
        if self._file is None:
            return
        text = json.dumps({"items": self._items, "stopped": stopped}).encode()
        try:
            with contextlib.suppress(OSError):  # a file without an end record counts as incomplete
                self._write(_record(END, [memoryview(text)]))
        finally:
            self._release()

    def _write(self, parts: list[bytes | memoryview]) -> None:
        """Write the parts. If this fails, truncate the file to its last complete record."""
        assert self._file is not None
        length = sum(map(len, parts))
        try:
            for part in [b"".join(parts)] if length <= JOINED_BYTES else parts:
                rest = memoryview(part)
                while rest:
                    rest = rest[self._file.write(rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)
                self._file.seek(self._size)
            raise
        self._size += length

    def _release(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            # Unlock it explicitly, because forked children inherit the file and would keep the lock.
            fcntl.flock(file, fcntl.LOCK_UN)
            file.close()


def _open_alone(path: str) -> IO[bytes]:
    file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666), "wb", buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.truncate(0)
    except BlockingIOError as error:
        file.close()
        raise BlockingIOError(error.errno, "another run is writing this recording", path) from None
    except BaseException:
        file.close()
        raise
    return file


def _record(number: int, parts: list[memoryview]) -> list[bytes | memoryview]:
    sizes = struct.pack(f"<{len(parts)}Q", *map(len, parts))
    crc = zlib.crc32(sizes)
    for part in parts:
        crc = zlib.crc32(part, crc)
    fields = _RECORD.pack(number, len(parts), len(sizes) + sum(map(len, parts)), crc)
    return [fields + _CRC.pack(zlib.crc32(fields)) + sizes, *parts]


@public
class Recording:
    """Items of one channel, recorded by an earlier run.

    You can iterate over a recording repeatedly, and ``graph.source(recording)`` emits its items.
    ``recording[number]`` is one item, and ``len(recording)`` is the number of items.

    Items are pickles, and unpickling can run arbitrary code. Use only recordings from people whose code you
    would also run.

    Args:
        path: Path of a file written by ``graph.record`` or ``flowchan record``.

    Attributes:
        path: The path.
        graph: Name of the graph.
        channel: Name of the channel.
        flowchan: Version of flowchan that wrote the file.
        complete: False if the program is still running, was killed before it completed the file, or had no
            space on the disk.
        stopped: Reason why the recording ended before the channel, such as a limit; empty if it did not.

    Raises:
        OSError: The file cannot be read.
        TypeError: ``path`` is not a path.
        ValueError: The file is not a recording, or has another format version. Reading an item also raises
            this if its record is damaged.

    Example:
        >>> import os, tempfile
        >>> from flowchan import Graph, Recording
        >>> path = os.path.join(tempfile.mkdtemp(), "words.rec")
        >>> graph = Graph()
        >>> graph.source(["a", "bb", "ccc"], name="words").map(len).sink(abs)
        >>> graph.record("words", path)
        >>> results = graph.run()
        >>> recording = Recording(path)
        >>> len(recording), recording[1], list(recording)
        (3, 'bb', ['a', 'bb', 'ccc'])
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"Recording: path must be a path, got {shown(path)}")
        self.path = os.fsdecode(path)
        self.complete, self.stopped = False, ""
        self._begins = array("Q")
        self._damage = ""
        with open(self.path, "rb") as file:
            about = self._header(file)
            self.graph, self.channel = str(about["graph"]), str(about["channel"])
            self.flowchan = str(about["flowchan"])
            self._scan(file)

    def __repr__(self) -> str:
        return f"<Recording {self.path!r} of channel {self.channel!r} with {len(self):,} items>"

    def __len__(self) -> int:
        return len(self._begins)

    def __iter__(self) -> Iterator[Any]:
        with open(self.path, "rb") as file:
            for number in range(len(self)):
                yield self._item(file, number)
        if self._damage:
            raise ValueError(self._damage)

    def __getitem__(self, number: int) -> Any:
        index = operator.index(number)
        if not -len(self) <= index < len(self):
            raise IndexError(
                f"Recording: number must be between {-len(self):,} and {len(self) - 1:,}, got {number}; "
                f"{self.path!r} has {len(self):,} items"
            )
        with open(self.path, "rb") as file:
            return self._item(file, index % len(self))

    def _header(self, file: IO[bytes]) -> dict[str, Any]:
        head = file.read(_HEAD.size)
        if not head.startswith(MAGIC) or len(head) < _HEAD.size:
            raise ValueError(
                f"Recording: path must be a file that `flowchan record` has written, got {self.path!r}"
            )
        _, found, length, crc = _HEAD.unpack(head)
        if found != VERSION:
            raise ValueError(
                f"Recording: {self.path!r} must have format version {VERSION}, got {found}; use the version "
                "of flowchan that wrote it"
            )
        text = file.read(length)
        if len(text) < length or zlib.crc32(text) != crc:
            raise ValueError(f"Recording: {self.path!r} has a damaged header; record the channel again")
        about: dict[str, Any] = json.loads(text)
        return about

    def _scan(self, file: IO[bytes]) -> None:
        """Find the records, except an incomplete one at the end of the file."""
        size = os.fstat(file.fileno()).st_size
        while len(head := file.read(_RECORD.size + _CRC.size)) == _RECORD.size + _CRC.size:
            number, _, length, _ = _RECORD.unpack_from(head)
            begin = file.tell() - len(head)
            if _CRC.unpack_from(head, _RECORD.size) != (zlib.crc32(head[: _RECORD.size]),) or number not in (
                len(self),
                END,
            ):
                self._damage = self._damaged(f"after item {len(self) - 1}" if len(self) else "at item 0")
                return
            if file.tell() + length > size:
                return
            if number == END:
                self._finish(file, begin)
                return
            self._begins.append(begin)
            file.seek(length, os.SEEK_CUR)

    def _finish(self, file: IO[bytes], begin: int) -> None:
        end = json.loads(self._parts(file, begin, "at its end")[0])
        self.complete, self.stopped = True, end["stopped"]

    def _item(self, file: IO[bytes], number: int) -> Any:
        parts = self._parts(file, self._begins[number], f"at item {number}")
        return unpack(parts if len(parts) > 1 else parts[0])

    def _parts(self, file: IO[bytes], begin: int, where: str) -> list[Any]:
        file.seek(begin)
        _, count, length, crc = _RECORD.unpack_from(file.read(_RECORD.size + _CRC.size))
        table = file.read(8 * count)
        sizes = struct.unpack(f"<{len(table) // 8}Q", table)
        parts: list[Any] = []
        found = zlib.crc32(table)
        if len(table) + sum(sizes) == length:  # a damaged table may contain huge sizes
            for size in sizes:  # read each part separately, because arrays need aligned memory
                parts.append(file.read(size))
                found = zlib.crc32(parts[-1], found)
        if not parts or found != crc:
            raise ValueError(self._damaged(where))
        return parts

    def _damaged(self, where: str) -> str:
        return f"Recording: {self.path!r} is damaged {where}; record the channel again"
