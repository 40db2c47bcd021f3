"""Manage the globals of the functions that a worker process has received by value.

In a worker process, all functions of one module share their globals. Tasks of a pool therefore see the
variables that the pool's initializer has set. If the worker has run the script, these are the script's own
globals.

Values arrive together with functions. A value is assigned to its global if the variable is new, or if the
value differs from the one that arrived last. Otherwise the worker keeps the current value, including its own
changes.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from flowchan.items.definitions import MAIN, digest_of

shares_all: ContextVar[bool] = ContextVar("shares_all", default=False)
"""Whether lambdas and closures also share the globals of their module, as named functions do."""

_CODE = (types.FunctionType, type)


class WorkerGlobals:
    """Keeps the globals of the functions that this process has received, by module."""

    def __init__(self) -> None:
        self.shared = False
        self._of_module: dict[str, dict[str, Any]] = {}
        self._arrived: dict[tuple[int, str], object] = {}

    def share(self) -> None:
        """Begin to share globals between functions, because this process has become a worker."""
        self.shared = True
        self._of_module.clear()
        self._arrived.clear()

    def of(self, base: dict[str, Any]) -> dict[str, Any]:
        """Return the globals that the received functions of a module share.

        ``base`` contains attributes of the module, such as ``__file__``.
        """
        name = usual(base.get("__name__", ""))
        own = own_names(name)
        if own and own.get("__file__") == base.get("__file__"):
            return _names_in_use(own)
        return self._of_module.setdefault(name, base)

    def offer(self, target: dict[str, Any] | type, values: dict[str, Any]) -> None:
        """Assign received values to globals or attributes, unless the worker is to keep its own value."""
        names = vars(target) if isinstance(target, type) else target
        for name, value in values.items():
            key = id(target), name
            if name in names and names[name] is value:
                self._arrived[key] = value if isinstance(value, _CODE) else digest_of(value)
                continue
            digest = digest_of(value)
            if name not in names:
                stays = False
            elif key in self._arrived:
                known = self._arrived[key]
                stays = known is value or digest == (digest_of(known) if isinstance(known, _CODE) else known)
            else:
                stays = digest == digest_of(names[name])
            self._arrived[key] = digest
            if not stays or digest is None or isinstance(value, type):
                _assign(target, name, value)


worker_globals = WorkerGlobals()


def _assign(target: Any, name: str, value: Any) -> None:
    if isinstance(target, type):
        setattr(target, name, value)
    else:
        target[name] = value


@contextlib.contextmanager
def shared_globals() -> Iterator[None]:
    """Let lambdas and closures that are unpickled in this block also share the globals of their module."""
    token = shares_all.set(True)
    try:
        yield
    finally:
        shares_all.reset(token)


def usual(module: str) -> str:
    """Return the name of a module in the program that started this process."""
    return "__main__" if module in MAIN else module


def lookup(names: dict[str, Any], path: str) -> Any:
    """Return the function or class with a qualified name, or None if it does not exist."""
    first, *others = path.split(".")
    found = names.get(first)
    for name in others:
        found = vars(found).get(name) if isinstance(found, type) else None
        found = found.__func__ if isinstance(found, (classmethod, staticmethod)) else found
    return found


def own_names(module: str) -> dict[str, Any]:
    """Return the names in a module, or an empty dict if this process has neither imported nor run it."""
    found = sys.modules.get(usual(module))
    return {} if found is None else vars(found)


def _names_in_use(names: dict[str, Any]) -> dict[str, Any]:
    """Return the globals that the functions of a module use.

    In a process that was not forked, the main module contains only a copy of these globals
    (``runpy.run_path``).
    """
    for value in list(names.values()):
        members = list(vars(value).values()) if isinstance(value, type) else [value]
        for member in members:
            if isinstance(member, types.FunctionType) and member.__globals__.get("__name__") in MAIN:
                return member.__globals__
    return names
