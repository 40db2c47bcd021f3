"""Send a function to hosts that may lack its module."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from flowchan.hosts.code import lacking, own_modules, pack_stage


class CodeForHosts:
    """Wrapper for a function.

    Unpickling it returns the function: by reference if the host has the module, otherwise by value.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._by_reference = pack_stage(function, ())
        own = getattr(function, "__module__", "")
        self._modules = (own,) if own in own_modules(self._by_reference) else ()
        self._by_value = pack_stage(function, self._modules) if self._modules else b""

    def __reduce__(self) -> tuple[Any, ...]:
        return _loaded, (self._modules, self._by_reference, self._by_value)


def _loaded(modules: tuple[str, ...], by_reference: bytes, by_value: bytes) -> Any:
    return pickle.loads(by_value if lacking(modules) else by_reference)
