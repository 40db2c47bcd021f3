"""Serialise Python values in the format of channels between processes."""

from __future__ import annotations

import pickle
from typing import Any

from flowchan import _core
from flowchan.items.codec import pack_away, unpack

_WHOLE, _PARTS, _PLAIN = 0, 1, 2
"""Last byte of the data, which names the format: one pickle, a pickle with buffers, or the core's encoding
for built-in types."""


def dumps(value: Any) -> bytes:
    """Serialise a value.

    Args:
        value: Any value.

    Returns:
        Bytes for :func:`loads`.

    Raises:
        TypeError: A part of the value cannot be serialised; the message names this part.
    """
    plain: bytes | None = _core._plain_bytes(value)
    if plain is not None:
        return plain
    packed = pack_away(value)
    if isinstance(packed, bytes):
        return packed + bytes([_WHOLE])
    if any(isinstance(part, _core.Channel) for part in packed):
        raise TypeError("a collective operation cannot send a channel; send it through another channel")
    return pickle.dumps([bytes(part) for part in packed], 5) + bytes([_PARTS])


def loads(data: bytes | bytearray) -> Any:
    """Restore a value from :func:`dumps`."""
    kind = data[-1]
    if kind == _PLAIN:
        return _core._from_plain_bytes(data if type(data) is bytes else bytes(data))
    packed = memoryview(data)[:-1]
    if kind == _WHOLE:
        return pickle.loads(packed)
    first, *buffers = pickle.loads(packed)
    return unpack([first, *map(bytearray, buffers)])
