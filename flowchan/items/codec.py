"""Serialise items that the core does not encode directly.

The format is pickle protocol 5. The contents of arrays and tensors are sent separately from the pickle, as
buffers (``arrays.py``). The contents are therefore written once and read in place.

Functions and classes from ``__main__``, or from a file that ``flowchan run`` has loaded, are pickled by value
with cloudpickle (``main_code.py``). Other processes may have a different ``__main__``, so references to it
would fail. Importable functions and classes are pickled by reference.
"""

from __future__ import annotations

import functools
import io
import pickle
import threading
import traceback
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from flowchan import _core
from flowchan.items import shared_tensors
from flowchan.items.arrays import reducers
from flowchan.items.text import short
from flowchan.items.tracebacks import shortened
from flowchan.items.unpicklable import smallest
from flowchan.public import public
from flowchan.transport import descriptors
from flowchan.transport.device import transfer
from flowchan.transport.interrupts import is_interrupt, unless_interrupted

# Modules whose functions and classes other processes cannot import.
by_value_modules: set[str] = {"__main__", "__mp_main__"}


Packed = bytes | list[Any]


@public
def pack(value: object) -> Packed:
    """Serialise a value in the format of items between processes, so that items can contain it packed.

    :func:`unpack` restores the value. A receiver can keep the packed value without unpickling anything, and
    can handle unpickling errors later.

    Args:
        value: Any value that can be an item.

    Returns:
        Bytes, or a list of bytes, buffers and channels. A put into a channel between processes copies the
        contents of the buffers once, and the receiver reads them in place.

    Raises:
        TypeError: A part of the value cannot be serialised; the message names this part.

    Example:
        >>> from flowchan import pack, unpack
        >>> unpack(pack({"a": 1}))
        {'a': 1}
    """
    return _with_companions(*_pack_with(value, descriptors.Companions()))


def pack_to_pass_on(value: object) -> tuple[Packed, Callable[[], None]]:
    """Serialise a value for a process that will pass it on without unpacking it.

    Return the packed value, and a function to call if the value is not sent after all.
    """
    packed, companions = _pack_with(value, descriptors.Unopened())
    return _with_companions(packed, companions), companions.take_back


def pack_away(value: object) -> Packed:
    """Serialise a value for another host, including copies of any shared memory."""
    return _with_companions(*_pack_with(value, descriptors.DuplicatedDescriptors()))


def _with_companions(packed: Packed, companions: descriptors.Parcel) -> Packed:
    if not companions.kept:
        return packed
    return [*([packed] if isinstance(packed, bytes) else packed), *companions.kept]


def _pack_with(value: object, parcel: descriptors.Parcel) -> tuple[Packed, descriptors.Parcel]:
    outer, descriptors.now.packing = descriptors.now.packing, parcel
    try:
        return _pack(value), descriptors.now.packing
    except BaseException:
        descriptors.now.packing.take_back()
        raise
    finally:
        descriptors.now.packing = outer


def _pack(value: object) -> Packed:
    buffers: list[pickle.PickleBuffer] = []
    out = io.BytesIO()
    try:
        pickler = pickle.Pickler(out, protocol=5, buffer_callback=buffers.append)
        pickler.dispatch_table = reducers()
        pickler.dump(value)
        data = out.getvalue()
    except unless_interrupted(Exception):
        data = None
    if data is None or _names_local_objects(data):
        del buffers[:]
        if descriptors.now.packing is not None:
            descriptors.now.packing.take_back()
            descriptors.now.packing = type(descriptors.now.packing)()
        data = _dumps_by_value(value, buffers.append)
    return [data, *buffers] if buffers else data


@public
def unpack(packed: Packed) -> Any:
    """Restore the value that was passed to :func:`pack`.

    Args:
        packed: The return value of :func:`pack`.

    Returns:
        The value.

    Raises:
        Exception: Whatever unpickling the value raises.

    Example:
        >>> from flowchan import pack, unpack
        >>> unpack(pack([1, 2]))
        [1, 2]
    """
    return pickle.loads(packed) if isinstance(packed, bytes) else _unpack(packed)


def _unpack(packed: list[Any]) -> Any:
    beside = [part for part in packed if isinstance(part, _core.Channel) or shared_tensors.is_storage(part)]
    outer, descriptors.now.beside = descriptors.now.beside, beside
    try:
        return pickle.loads(packed[0], buffers=packed[1 : len(packed) - len(beside)])
    finally:
        descriptors.now.beside = outer


Kept = tuple[int, list[Any], Callable[[Any], None] | None, int, tuple[int, ...], list[Any]]


def dumps(item: object, leaves: bool = False) -> Packed | Kept:
    """Serialise an item for the core.

    If the item needs device memory or file descriptors (PINNED or PARCEL), the result is a tuple:

    - the ID of the device memory, or 0
    - the pickle and its buffers
    - a function to call with the channel after the item has been put, or None
    - the ID of the bundle of file descriptors, or 0
    - the descriptors in the bundle
    - the objects that keep these descriptors open

    Args:
        item: The item.
        leaves: True if the item goes to another host.

    Returns:
        The pickle and its buffers, or the tuple described above.
    """
    try:
        packed, channels = _pack_with(item, descriptors.Leaving() if leaves else descriptors.Parcel())
    except TypeError as error:
        error.__traceback__ = shortened(error.__traceback__)
        raise
    on_device = None if isinstance(packed, bytes) else transfer.parcel(packed[1:])
    result: Packed | Kept = packed
    if on_device is not None or channels.id:
        result = (
            on_device.id if on_device else 0,
            [packed] if isinstance(packed, bytes) else packed,
            on_device,
            channels.id,
            tuple(channels.descriptors),
            channels.kept,
        )
    if leaves:
        _last.dumped = (id(result), channels.counted) if channels.counted else None
    return result


class _Last(threading.local):
    """Remembers the last item with channels that this thread has serialised for another host.

    ``dumped`` contains the ``id`` of the serialised item, and the callbacks that release its channels.
    """

    dumped: tuple[int, list[Callable[[], None]]] | None = None


_last = _Last()


def not_put(dumped: object) -> None:
    """Release the channels in a result of :func:`dumps` that was never put."""
    last, _last.dumped = _last.dumped, None
    if last is not None and last[0] == id(dumped):
        for call in last[1]:
            call()


_NAMES_SOMETHING = pickle.STACK_GLOBAL
"""Byte that protocol 5 writes for each reference to a function or class. Searching for one byte is fast."""


def _names_local_objects(data: bytes) -> bool:
    if _NAMES_SOMETHING not in data:
        return False
    for name in by_value_modules:  # noqa: SIM110  # faster than any(), which matters for each item
        if name.encode() in data:
            return True
    return False


def _dumps_by_value(item: object, aside: Any) -> bytes:
    out = io.BytesIO()
    try:
        _by_value_pickler()(out, protocol=5, buffer_callback=aside).dump(item)
    except unless_interrupted(Exception) as error:
        raise TypeError(_refusal(item, error)) from (error if _is_of_user(error) else None)
    return out.getvalue()


@functools.cache
def _by_value_pickler() -> Any:
    """Return a pickler class that tries flowchan's reducers first, and otherwise pickles by value."""
    from flowchan.items.main_code import ByValuePickler  # imported late, because most items do not need it

    class Pickler(ByValuePickler):
        def reducer_override(self, obj: object) -> Any:
            reduce = reducers().get(type(obj))
            return super().reducer_override(obj) if reduce is None else reduce(obj)

    return Pickler


def dumps_in_one(value: object) -> bytes:
    """Serialise a value for a process on this machine as one bytes object, which plain pickle can load."""
    try:
        data = pickle.dumps(value, protocol=5)
    except unless_interrupted(Exception):
        return _dumps_by_value(value, None)
    return _dumps_by_value(value, None) if _names_local_objects(data) else data


def dumps_for_worker(value: object) -> bytes:
    """Serialise a value and its code for a child process, which then shares all shared tensors."""
    out = io.BytesIO()
    _sharing_pickler()(out, protocol=5).dump(value)
    return out.getvalue()


@functools.cache
def _sharing_pickler() -> Any:
    from flowchan.items.main_code import ByValuePickler

    class Pickler(ByValuePickler):
        def reducer_override(self, obj: object) -> Any:
            if shared_tensors.is_storage(obj):
                return shared_tensors.reduce_storage(obj)
            if shared_tensors.is_tensor(obj) and shared_tensors.is_shared(obj):
                return shared_tensors.reduce_tensor(obj)
            return super().reducer_override(obj)

    return Pickler


keeps_sealed: ContextVar[bool] = ContextVar("keeps_sealed", default=False)
"""Whether received items stay packed in this context, as :class:`Sealed` objects."""


@dataclass(frozen=True, slots=True, repr=False)
class Sealed:
    """Item that this process passes on without unpacking it."""

    packed: Packed

    def value(self) -> Any:
        """Return the unpacked item."""
        return unpack(self.packed)


@dataclass(frozen=True, slots=True, repr=False)
class Opening:
    """Replaces a packed value in an item, so that the receiver gets the value unpacked."""

    packed: Packed

    def __reduce__(self) -> tuple[Any, ...]:
        return unpack, (self.packed,)


def loads(data: Packed | tuple[Any, list[Any], tuple[list[int], int] | None]) -> Any:
    """Restore the object that was passed to :func:`dumps`.

    A PINNED or PARCEL item arrives as a tuple of a view, the pickle with its buffers, and the descriptor
    bundle. The view keeps the item alive. The bundle is a pair of the descriptors and an errno, which
    explains why some are missing.
    """
    if keeps_sealed.get() and not isinstance(data, tuple):
        return Sealed(data)
    if not isinstance(data, tuple):
        return unpack(data)
    keep, packed, parcel = data
    outer, descriptors.now.opened = (
        descriptors.now.opened,
        descriptors.OpenedDescriptors(*parcel) if parcel else None,
    )
    try:
        return unpack(transfer.arrivals(keep, packed))
    finally:
        if descriptors.now.opened is not None:
            descriptors.now.opened.close()
        descriptors.now.opened = outer


@public
@dataclass(frozen=True, slots=True, repr=False)
class Unreadable:
    """Replaces an item that a stage could not unpickle.

    Attributes:
        data: Pickle of the item, without its arrays.

    Example:
        >>> from flowchan import Graph, Unreadable
        >>> class Wrong:
        ...     def __reduce__(self):
        ...         return int, ("x",)  # unpickling calls int("x")
        >>> graph = Graph()
        >>> shown = graph.source([Wrong()]).map(str, on="process")
        >>> good, failed = shown.collect(), shown.errors.collect()
        >>> isinstance(graph.run()[failed][0].item, Unreadable)
        True
    """

    data: bytes

    def __repr__(self) -> str:
        return f"<an item that can't be unpickled, {len(self.data)} bytes>"


def _refusal(item: object, error: BaseException) -> str:
    """Describe the innermost attribute, element or key that cannot be pickled."""
    path, culprit, reason = smallest(item, str(error))
    names_culprit = reason.startswith(short(culprit))  # as flowchan's own messages do
    if path and names_culprit:
        reason = f"its {', '.join(path)}: {reason}"
    elif path:
        reason = f"its {', '.join(path)} ({short(culprit)}) can't be pickled ({reason})"
    elif names_culprit:
        return reason
    return f"can't send {short(item)} to another process: {reason}"


_PICKLERS = {"flowchan", "cloudpickle", "pickle", "copyreg"}


def _is_of_user(error: BaseException) -> bool:
    """Return whether the traceback contains user code, such as a ``__reduce__`` method."""
    return any(
        frame.f_globals.get("__name__", "").partition(".")[0] not in _PICKLERS
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


_core._set_codec(dumps, loads, Unreadable, is_interrupt, not_put)
