"""Pickle functions and classes of the main script, and of modules that a process lacks, by value.

Plain cloudpickle gives the functions of each pickle separate globals, and creates a new class in each
process. This module instead lets a process that has run the same script use its own function or class, if the
definition is identical. ``isinstance`` therefore works, and objects that return to the program have the
program's types. All other functions in a worker process share their globals; see ``worker_globals``.

Lambdas, closures and other functions to which no name in their module refers share the globals only inside
:func:`~flowchan.items.worker_globals.shared_globals`. Outside such a block, each of them keeps the values
that were sent with it.
"""

from __future__ import annotations

import types
import weakref
from typing import Any

import cloudpickle
from cloudpickle import cloudpickle as by_value

from flowchan.items.definitions import digest_of, fingerprint
from flowchan.items.packed_classes import PackedClasses, UnpackedClasses
from flowchan.items.worker_globals import lookup, own_names, shares_all, worker_globals

packed_classes = PackedClasses()
unpacked_classes = UnpackedClasses()


def unpack_class(packed: bytes) -> type:
    """Return the class in a pickle. The same pickle always yields the same class."""
    return unpacked_classes.get(packed)


class ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickler that pickles functions and classes as the module docstring describes.

    Attributes:
        keeps_classes: True if the pickle of a class may be kept and used for many objects. Such a class has a
        separate pickle inside the pickle. The outer pickle therefore does not show the names of the modules
        to which the class refers.
    """

    keeps_classes = True

    def reducer_override(self, obj: object) -> Any:
        """Reduce a function, a class or an ``object()``, and leave all other objects to pickle."""
        if not isinstance(obj, (type, types.FunctionType)):
            return _reduce_sentinel(obj) if type(obj) is object else NotImplemented
        if isinstance(obj, type) and self.keeps_classes:
            packed = packed_classes.get(obj, type(self))
            if packed is not None:
                return unpack_class, (packed,)
        reduction = super().reducer_override(obj)
        if not isinstance(reduction, tuple):
            return reduction
        if reduction[0] is by_value._make_function:
            return _reduce_function(obj, reduction)
        if reduction[0] in (by_value._make_skeleton_class, by_value._make_skeleton_enum):
            return _reduce_class(obj, reduction)
        return reduction


# --- functions


_without_state: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
"""Functions and classes that this process has created but whose state has not arrived yet. The value tells
whether a function shares its globals."""


def _reduce_function(function: Any, reduction: Any) -> Any:
    _, (code, base, *rest), state, *_ = reduction
    path = function.__qualname__
    named = path if lookup(function.__globals__, path) is function else None
    arguments = (named, _digest_of_parts(function) if named else None, code, base, *rest)
    return _make_function, arguments, state, None, None, _set_function_state


def _digest_of_parts(function: Any) -> object:
    """Return a digest of a function's defaults and closure.

    Together with the code, these parts distinguish functions. Return ``()`` if the function has neither
    defaults nor a closure, and None if a variable of the closure has no value yet.
    """
    parts = (function.__defaults__, function.__kwdefaults__, function.__closure__)
    if parts == (None, None, None):
        return ()
    try:
        cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
    except ValueError:
        return None
    return digest_of((*parts[:2], *cells))


def _make_function(named: str | None, parts: Any, code: Any, base: dict[str, Any], *rest: Any) -> Any:
    if named is not None and parts is not None:
        own = lookup(own_names(base.get("__name__", "")), named)
        if isinstance(own, types.FunctionType) and own.__code__ == code and _digest_of_parts(own) == parts:
            return own
    shares = worker_globals.shared and (named is not None or shares_all.get())
    if shares:
        names = worker_globals.of(base)
        names.setdefault("__builtins__", __builtins__)
        function = types.FunctionType(code, names, *rest)
    else:
        function = by_value._make_function(code, base, *rest)
    _without_state[function] = shares
    return function


def _set_function_state(function: Any, state: Any) -> None:
    attributes, slots = state
    shares = _without_state.pop(function, None)
    if worker_globals.shared and shares is not False:
        worker_globals.offer(function.__globals__, slots["__globals__"])
        slots["__globals__"] = {}
    if shares is None:  # the process has kept its own function
        if worker_globals.shared:
            worker_globals.offer(function.__dict__, attributes)
        return
    builtins = function.__globals__["__builtins__"]
    by_value._function_setstate(function, (attributes, slots))
    function.__globals__["__builtins__"] = builtins


# --- classes


def _reduce_class(cls: Any, reduction: Any) -> Any:
    maker, arguments, state, *_ = reduction
    named = cls.__qualname__ if lookup(own_names(cls.__module__), cls.__qualname__) is cls else None
    mark = fingerprint(cls) if named else None
    return _make_class, (cls.__module__, named, mark, maker, *arguments), state, None, None, _set_class_state


def _make_class(module: str, named: str | None, mark: str | None, maker: Any, *arguments: Any) -> Any:
    known = by_value._DYNAMIC_CLASS_TRACKER_BY_ID.get(arguments[-2])
    own = lookup(own_names(module), named) if named is not None else None
    if isinstance(own, type) and known in (None, own) and fingerprint(own) == mark:
        return own
    made = maker(*arguments)
    _without_state[made] = False
    return made


def _set_class_state(cls: Any, state: Any) -> Any:
    attributes, slots = state
    if _without_state.pop(cls, None) is not None:
        return by_value._class_setstate(cls, (attributes, slots))
    if worker_globals.shared:
        worker_globals.offer(
            cls, {name: value for name, value in attributes.items() if _is_data(name, value)}
        )
    return cls


def _is_data(name: str, value: Any) -> bool:
    return not name.startswith("_") and not hasattr(type(value), "__get__")


# --- sentinels


def _reduce_sentinel(obj: object) -> Any:
    """Send an ``object()`` that is a global of the script by name, because programs compare its identity."""
    for name, value in list(own_names("__main__").items()):
        if value is obj:
            return _sentinel, (name,)
    return object, ()


_sentinels: dict[str, object] = {}


def _sentinel(name: str) -> object:
    own = own_names("__main__").get(name)
    return own if type(own) is object else _sentinels.setdefault(name, object())
