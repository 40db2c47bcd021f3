"""Map keys to integers, so that equal keys go to the same branch or worker."""

from __future__ import annotations

import enum
import zlib
from typing import Any


class NotPortableError(TypeError):
    """Another process may have another integer for this key."""


def bucket_of(key: Any, portable: bool = False) -> int:
    """Map a key to an integer.

    Args:
        key: A hashable value.
        portable: Whether the integer must also be the same in every process.

    Returns:
        An integer that is the same for equal keys.

    Raises:
        NotPortableError: ``portable`` is given, and the hash of the key may differ from process to process.
            A number has the same hash in every process. The hashes of other types, such as ``datetime``, may
            include the hash of a string, which each process salts differently.
    """
    if isinstance(key, str):
        return zlib.crc32(key.encode("utf-8", "surrogatepass"))
    if isinstance(key, bytes):
        return zlib.crc32(key)
    if isinstance(key, tuple):
        number = 0
        for part in key:
            number = number * 1_000_003 ^ bucket_of(part, portable)
        return number
    if isinstance(key, frozenset):
        return sum(bucket_of(part, portable) for part in key)
    if key is None:
        return 0
    if isinstance(key, enum.Enum) and type(key).__hash__ is enum.Enum.__hash__:
        return bucket_of(key.name)
    if portable and not isinstance(key, int | float):
        from numbers import Number  # imported late, because few programs need it

        if not isinstance(key, Number):
            raise NotPortableError
    return hash(key)
