"""Serialising what the core's direct encoding does not cover: pickle protocol 5, by value where plain pickle
can't or where the other process could not find the name. The contents of arrays and tensors go beside the
pickle, as buffers (``arrays.py``), so that they are written once and read where they lie.

Functions and classes of ``__main__`` (and of a file that ``flowchan run`` loaded) go by value through
cloudpickle, because another process has another ``__main__``; everything importable goes by reference.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from flowchan import _core
from flowchan.items import shared_tensors
from flowchan.items.arrays import reducers
from flowchan.items.text import short
from flowchan.items.unpicklable import smallest
from flowchan.transport import descriptors
from flowchan.transport.device import transfer
from flowchan.transport.interrupts import is_interrupt, unless_interrupted

# Names of modules whose functions and classes other processes can't import.
by_value_modules: set[str] = {"__main__", "__mp_main__"}


Packed = bytes | list[Any]


def pack(value: object) -> Packed:
    """What a channel between processes makes of ``value``, to be sent in its place: :func:`unpack` makes the
    value of it.

    So whoever gets it has it in hand before anything of the value is made, and chooses what becomes of it
    when that fails. Bytes; or a list of bytes, buffers and channels: the contents of the buffers are copied
    when the list is put into a channel between processes, and read there where they lie. Raises ``TypeError``
    naming the part that can't be serialised.
    """
    return _beside(*_pack_with(value, descriptors.Companions()))


def pack_to_pass_on(value: object) -> tuple[Packed, Callable[[], None]]:
    """The same for a value that goes through the hands of who does not look at it; and what to call if it
    does not go."""
    packed, companions = _pack_with(value, descriptors.Unopened())
    return _beside(packed, companions), companions.take_back


def pack_away(value: object) -> Packed:
    """The same for a value that leaves the machine: memory that processes share is copied."""
    return _beside(*_pack_with(value, descriptors.DuplicatedDescriptors()))


def _beside(packed: Packed, companions: descriptors.Parcel) -> Packed:
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
    if data is None or _names_what_is_only_here(data):
        del buffers[:]
        if descriptors.now.packing is not None:
            descriptors.now.packing.take_back()
            descriptors.now.packing = type(descriptors.now.packing)()
        data = _dumps_by_value(value, buffers.append)
    return [data, *buffers] if buffers else data


def unpack(packed: Packed) -> Any:
    """The value that was given to :func:`pack`. Raises what the making of the value raises."""
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
    """The pickle and its buffers. For a PINNED or PARCEL item an id or 0, them, what is to be called with the
    channel once the item is inside or None, the id of its parcel or 0, the descriptors in that, and what
    keeps them open. ``leaves``: to another host."""
    packed, channels = _pack_with(item, descriptors.Leaving() if leaves else descriptors.Parcel())
    on_device = None if isinstance(packed, bytes) else transfer.parcel(packed[1:])
    if on_device is None and not channels.id:
        return packed
    whole = [packed] if isinstance(packed, bytes) else packed
    return (
        on_device.id if on_device else 0,
        whole,
        on_device,
        channels.id,
        tuple(channels.descriptors),
        channels.kept,
    )


_NAMES_SOMETHING = pickle.STACK_GLOBAL
"""Protocol 5 has it wherever it refers to a function or a class. To look for one byte is quick."""


def _names_what_is_only_here(data: bytes) -> bool:
    if _NAMES_SOMETHING not in data:
        return False
    for name in by_value_modules:  # noqa: SIM110  # quicker than any(), and done for each item
        if name.encode() in data:
            return True
    return False


def _dumps_by_value(item: object, aside: Any) -> bytes:
    out = io.BytesIO()
    try:
        _by_value_pickler()(out, protocol=5, buffer_callback=aside).dump(item)
    except unless_interrupted(Exception) as error:
        raise TypeError(f"can't send {short(item)} to another process: {_culprit(item, error)}") from error
    return out.getvalue()


@functools.cache
def _by_value_pickler() -> Any:
    """cloudpickle's, with our reducers before its own."""
    import cloudpickle  # slow to import, and most items do without

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: object) -> Any:
            reduce = reducers().get(type(obj))
            return super().reducer_override(obj) if reduce is None else reduce(obj)

    return Pickler


def dumps_for_worker(value: object) -> bytes:
    """By cloudpickle, for a process of this machine that this one starts: tensors that are shared stay so."""
    out = io.BytesIO()
    _sharing_pickler()(out, protocol=5).dump(value)
    return out.getvalue()


@functools.cache
def _sharing_pickler() -> Any:
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: object) -> Any:
            if shared_tensors.is_storage(obj):
                return shared_tensors.reduce_storage(obj)
            if shared_tensors.is_tensor(obj) and shared_tensors.is_shared(obj):
                return shared_tensors.reduce_tensor(obj)
            return super().reducer_override(obj)

    return Pickler


keeps_sealed: ContextVar[bool] = ContextVar("keeps_sealed", default=False)
"""Whether what is got in this context and would be unpickled stays as it is: :class:`Sealed`."""


@dataclass(frozen=True, slots=True, repr=False)
class Sealed:
    """An item on its way through the hands of who does not look at it."""

    packed: Packed

    def value(self) -> Any:
        return unpack(self.packed)


@dataclass(frozen=True, slots=True, repr=False)
class Opening:
    """Is put in the place of a value that is there as :class:`Sealed`: whoever gets it gets the value."""

    packed: Packed

    def __reduce__(self) -> tuple[Any, ...]:
        return unpack, (self.packed,)


def loads(data: Packed | tuple[Any, list[Any], tuple[list[int], int] | None]) -> Any:
    """The object that :func:`dumps` was given. Of a PINNED or PARCEL item comes what keeps it in existence,
    the list, and the descriptors of its parcel with the reason why they are not all."""
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


@dataclass(frozen=True, slots=True, repr=False)
class Unreadable:
    """Stands for an item that a stage could not receive, because unpickling it raised. ``data`` is its
    pickle, without the arrays beside it."""

    data: bytes

    def __repr__(self) -> str:
        return f"<an item that can't be unpickled, {len(self.data)} bytes>"


def _culprit(item: object, error: BaseException) -> str:
    """Names the innermost attribute, element or key that can't be pickled."""
    path, culprit, reason = smallest(item, str(error))
    where = f"its {', '.join(path)} ({short(culprit)})" if path else "it"
    return f"{where} can't be pickled ({reason})"


_core._set_codec(dumps, loads, Unreadable, is_interrupt)
