"""Play one side of a link frame by frame, so that a test decides which frame arrives when."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar

KEYLESS = 2**64 - 1
BYTES, REFERENCE = 2, 7  # kinds of items (flowchan/_core/frame.hpp)


class FrameType(IntEnum):
    """The types of frames (flowchan/_core/wire.hpp)."""

    OPEN, ITEM, OUT, INPUT, OUTPUT, END, PING, PONG, RECALL, WANT, PART, MOVED, UNREACHABLE, PULL, PULLED = (
        range(1, 16)
    )


STARVED, NO_MORE, BREAK, REMAKES = 1, 8, 16, 128  # flags


@dataclass
class Frame:
    """A frame; see ``Head`` in flowchan/_core/wire.hpp."""

    type: FrameType
    n: int = 0
    a: int = 0
    b: int = 0
    flags: int = 0
    payload: bytes = b""
    stream: int = 1

    SHORT: ClassVar = struct.Struct("<QQIHBB")
    REST: ClassVar = struct.Struct("<QQ")

    def carries_item(self) -> bool:
        return self.type in {FrameType.ITEM, FrameType.OUT}

    def to_bytes(self) -> bytes:
        head = self.SHORT.pack(len(self.payload), self.n, self.stream, 0, self.type, self.flags)
        return head + (b"" if self.carries_item() else self.REST.pack(self.a, self.b)) + self.payload


class ScriptedPeer:
    """The other side of a link's newest connection.

    Args:
        link: the link that the peer is connected to
    """

    def __init__(self, link: Any) -> None:
        link_end, self._sock = socket.socketpair()
        link.attach(link_end.detach())

    def __enter__(self) -> ScriptedPeer:
        return self

    def __exit__(self, *exc: object) -> None:
        self._sock.close()

    def send(self, *frames: Frame) -> None:
        """Send the frames in one piece."""
        self._sock.sendall(b"".join(frame.to_bytes() for frame in frames))

    def receive(self) -> Frame:
        """Return the link's next frame."""
        size, n, stream, _, number, flags = Frame.SHORT.unpack(self._read(Frame.SHORT.size))
        frame = Frame(FrameType(number), n, flags=flags, stream=stream)
        if not frame.carries_item():
            frame.a, frame.b = Frame.REST.unpack(self._read(Frame.REST.size))
        frame.payload = self._read(size)
        return frame

    def receive_type(self, wanted: FrameType) -> Frame:
        """Return the link's next frame of this type, and skip all others."""
        while (frame := self.receive()).type is not wanted:
            pass
        return frame

    def receive_all(self) -> Iterator[Frame]:
        """Yield the frames that the link sends because of all frames and items that it has so far.

        The link replies to a ping before it looks for other work, so the second reply comes after that work.
        """
        for n in range(2):
            self.send(Frame(FrameType.PING, n))
            while (frame := self.receive()).type is not FrameType.PONG:
                yield frame

    def _read(self, size: int) -> bytes:
        return self._sock.recv(size, socket.MSG_WAITALL) if size else b""
