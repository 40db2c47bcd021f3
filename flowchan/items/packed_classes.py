"""Keep the pickles of classes that are sent by value, because many items need the same class.

A pickle is kept only if nothing on which it depends can change unnoticed. All class attributes must therefore
be constants, and all globals that the methods use must be importable.
"""

from __future__ import annotations

import enum
import io
import pickle
import types
import weakref
from typing import Any

from cloudpickle import cloudpickle as by_value

from flowchan.items.worker_globals import lookup, own_names

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, types.EllipsisType)
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)

_LIBRARIES = ("dataclasses", "reprlib", "functools", "enum", "collections", "namedtuple_")
"""Modules that generate methods of classes. The generated methods of a named tuple have separate globals,
whose name begins with ``namedtuple_``."""


class PackedClasses:
    """Keeps the pickles of classes in the process that sends the classes."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[type, tuple[tuple[int, ...], bytes | None]]
        self._known = weakref.WeakKeyDictionary()
        self._in_progress: set[type] = set()

    def get(self, cls: type, pickler: Any) -> bytes | None:
        """Return the pickle of a class, or None if it is sent by name or must not be kept."""
        version = _version(cls)
        known = self._known.get(cls)
        if known is not None:
            # Once a class has changed, stop keeping its pickle. The changed attribute may be a counter, which
            # would change again and again.
            if known[1] is not None and known[0] != version:
                known = self._known[cls] = version, None
            return known[1]
        if cls in self._in_progress:
            return None
        packed = None
        if not by_value._should_pickle_by_reference(cls) and _is_constant(cls):
            self._in_progress.add(cls)
            try:
                packed = _pack(cls, pickler)
            finally:
                self._in_progress.discard(cls)
        self._known[cls] = version, packed
        return packed


def _pack(cls: type, pickler: Any) -> bytes:
    out = io.BytesIO()
    pickler(out, protocol=5).dump(cls)
    return out.getvalue()


class UnpackedClasses:
    """Keeps the classes that a process has received as pickles, so that equal pickles yield one class."""

    def __init__(self) -> None:
        self._made: dict[bytes, weakref.ref[type]] = {}
        self._latest: weakref.WeakKeyDictionary[type, bytes] = weakref.WeakKeyDictionary()

    def get(self, packed: bytes) -> type:
        """Return the class in a pickle. The same pickle always yields the same class."""
        reference = self._made.get(packed)
        cls = reference() if reference is not None else None
        if cls is None:
            cls = pickle.loads(packed)
            assert isinstance(cls, type)
            self._made.pop(self._latest.get(cls, b""), None)
            self._latest[cls] = packed
            self._made[packed] = weakref.ref(cls, lambda _: self._made.pop(packed, None))
        return cls


def _version(cls: type) -> tuple[int, ...]:
    return tuple([id(value) for base in cls.__mro__[:-1] for value in vars(base).values()])


def _is_constant(cls: type) -> bool:
    if lookup(own_names(cls.__module__), cls.__qualname__) is not cls:
        return False
    return all(
        _is_constant_member(cls, name, value)
        for base in cls.__mro__
        if not by_value._should_pickle_by_reference(base)
        for name, value in vars(base).items()
    )


def _is_constant_member(cls: type, name: str, value: Any) -> bool:
    if isinstance(value, property):
        return all(_is_constant_member(cls, "", part) for part in (value.fget, value.fset, value.fdel))
    if isinstance(value, (classmethod, staticmethod)):
        value = value.__func__
    if isinstance(value, types.FunctionType):
        return _is_constant_function(cls, value)
    # namedtuple or Python itself has set these attributes.
    if name == "_field_defaults" or (name.startswith("_") and name.endswith("_")):
        return True
    if isinstance(value, _DESCRIPTORS):
        return True
    return isinstance(value, enum.Enum) or _is_constant_value(cls, value)


def _is_constant_value(cls: type, value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_constant_value(cls, part) for part in value)
    if isinstance(value, (type, types.FunctionType)):
        return value is cls or by_value._should_pickle_by_reference(value)
    known = isinstance(value, (*_CONSTANTS, types.ModuleType, types.BuiltinFunctionType))
    return known or type(value).__module__ in ("dataclasses", "_collections")


def _is_constant_function(cls: type, function: types.FunctionType) -> bool:
    if by_value._should_pickle_by_reference(function):
        return True
    names = function.__globals__
    used = [names[name] for name in by_value._extract_code_globals(function.__code__) if name in names]
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    of_library = str(names.get("__name__")).startswith(_LIBRARIES)
    return all(
        _is_constant_function(cls, value)
        if isinstance(value, types.FunctionType) and value in cells
        else _is_constant_value(cls, value)
        for value in ([] if of_library else used) + defaults + cells
        if not (of_library and isinstance(value, (set, dict)))
    ) and (of_library or not set(vars(function)) - {"__wrapped__"})
