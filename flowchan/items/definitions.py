"""Compare functions, classes and values across processes that run the same Python."""

from __future__ import annotations

import functools
import pickle
import types
import weakref
from typing import Any

from flowchan.transport.interrupts import unless_interrupted

DIGEST_LIMIT = 4 << 20
"""Maximum size of values that are compared, in bytes."""

MAIN = ("__main__", "__mp_main__")
"""Names of the module of the main script. A process that was not forked uses the second one."""

_ATOMS = (type(None), bool, int, float, complex, str, bytes)

_fingerprints: weakref.WeakKeyDictionary[type, tuple[tuple[int, ...], str]] = weakref.WeakKeyDictionary()


def fingerprint(cls: type) -> str:
    """Return a string that identifies the code of a class in all processes that run the same Python."""
    members = vars(cls)
    version = tuple(map(id, members.values()))
    known = _fingerprints.get(cls)
    if known is not None and known[0] == version:
        return known[1]
    bases = [fingerprint(base) if base.__module__ in MAIN else base.__qualname__ for base in cls.__bases__]
    code = [f"{name}={text}" for name, value in sorted(members.items()) if (text := text_of(value))]
    fields = [str(members.get(name)) for name in ("_member_names_", "_fields", "__slots__")]
    text = "\n".join([cls.__qualname__, *bases, *code, *fields])
    import hashlib  # imported late, because it loads OpenSSL

    mark = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).hexdigest()
    _fingerprints[cls] = version, mark
    return mark


def text_of(member: Any, depth: int = 4) -> str:
    """Return the code of a class member as text, or an empty string if it has none."""
    if isinstance(member, (classmethod, staticmethod)):
        member = member.__func__
    elif isinstance(member, functools.cached_property):
        member = member.func
    elif isinstance(member, property):
        return "".join(text_of(part) for part in (member.fget, member.fset, member.fdel))
    elif type(member) is type(_cached):
        member = member.__wrapped__
    if not isinstance(member, types.FunctionType):
        return ""
    inner = [cell.cell_contents for cell in member.__closure__ or () if cell != types.CellType()]
    parts = [text_of(part, depth - 1) for part in inner] if depth else []
    return f"{_code_text(member.__code__)} {digest_of(member.__defaults__)} {parts}"


@functools.cache
def _cached() -> None: ...


def _code_text(code: Any) -> str:
    constants = [
        _code_text(one) if isinstance(one, types.CodeType) else _stable(one) for one in code.co_consts
    ]
    names = code.co_names, code.co_varnames, code.co_freevars
    return f"{code.co_name} {code.co_firstlineno} {code.co_code!r} {names} {constants}"


def _stable(constant: object) -> str:
    return str(sorted(map(repr, constant))) if isinstance(constant, frozenset) else repr(constant)


class _TooLarge(Exception):
    """Raised if a value is too large to be compared."""


class _Sum:
    """File that stores nothing and only computes a digest of the data written to it."""

    def __init__(self) -> None:
        import hashlib  # see fingerprint()

        self._sum, self._left = hashlib.blake2b(digest_size=16), DIGEST_LIMIT

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self._left -= size
        if self._left < 0:
            raise _TooLarge
        self._sum.update(data)
        return size

    def digest(self) -> bytes:
        return self._sum.digest()


class _DigestPickler(pickle.Pickler):
    """Pickler for comparisons. It stores the code of functions, but only the names of classes and modules."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType):
            return str, (text_of(obj),)
        if isinstance(obj, type):
            local = obj.__module__ in MAIN or "<locals>" in obj.__qualname__
            return (str, (obj.__qualname__,)) if local else NotImplemented
        if isinstance(obj, types.ModuleType):
            return str, (obj.__name__,)
        if type(obj).__module__.partition(".")[0] in ("torch", "flowchan"):
            raise _TooLarge
        return NotImplemented


def digest_of(value: object) -> object:
    """Return a digest that is equal for equal values, or None if the value cannot be compared."""
    if isinstance(value, _ATOMS):
        return type(value), value
    found = _Sum()
    try:
        _DigestPickler(found, protocol=5).dump(value)
    except unless_interrupted(Exception):
        return None
    return found.digest()
