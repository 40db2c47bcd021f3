"""Map keys to integers, so that equal keys go to the same branch or worker."""

from __future__ import annotations

import enum
import zlib
from typing import Any


def is_portable(key: Any) -> bool:
    """Return whether :func:`bucket_of` returns the same integer for a key in every process.

    A number has the same hash in every process. The hashes of other types, such as ``datetime``, may include
    the hash of a string, which each process salts differently.
    """
    if isinstance(key, tuple | frozenset):
        return all(map(is_portable, key))
    if key is None or isinstance(key, str | bytes | int | float) or _is_plain_enum(key):
        return True
    from numbers import Number  # imported late, because few programs need it

    return isinstance(key, Number)


def _is_plain_enum(key: Any) -> bool:
    return isinstance(key, enum.Enum) and type(key).__hash__ is enum.Enum.__hash__


def bucket_of(key: Any) -> int:
    """Return an integer that is the same for equal keys.

    If :func:`is_portable` is true, the integer is also the same in every process.
    """
    if isinstance(key, str):
        return zlib.crc32(key.encode("utf-8", "surrogatepass"))
    if isinstance(key, bytes):
        return zlib.crc32(key)
    if isinstance(key, tuple):
        number = 0
        for part in key:
            number = number * 1_000_003 ^ bucket_of(part)
        return number
    if isinstance(key, frozenset):
        return sum(map(bucket_of, key))
    if key is None:
        return 0
    if _is_plain_enum(key):
        return bucket_of(key.name)
    return hash(key)
