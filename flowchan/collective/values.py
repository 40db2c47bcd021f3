"""Values of Python as bytes, in the way of channels between processes."""

from __future__ import annotations

import pickle
from typing import Any

from flowchan import _core
from flowchan.items.codec import pack_away, unpack

_WHOLE, _PARTS = b"\0", b"\1"


def dumps(value: Any) -> bytes:
    """Raises ``TypeError`` naming the part that can't be serialised."""
    packed = pack_away(value)
    if isinstance(packed, bytes):
        return packed + _WHOLE
    if any(isinstance(part, _core.Channel) for part in packed):
        raise TypeError(
            "a channel can't be given to a group's members by a collective; put it into a channel"
        )
    return pickle.dumps([bytes(part) for part in packed], 5) + _PARTS


def loads(data: bytes) -> Any:
    packed = memoryview(data)[:-1]
    if data[-1:] == _WHOLE:
        return pickle.loads(packed)
    first, *buffers = pickle.loads(packed)
    return unpack([first, *map(bytearray, buffers)])
