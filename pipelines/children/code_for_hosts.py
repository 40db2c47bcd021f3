"""Send a function to hosts that may lack its module."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from flowchan.hosts.code import lacking, own_modules, pack_stage


class CodeForHosts:
    """Picklable wrapper for a function whose module a host may lack.

    Unpickling the wrapper returns the function. The function comes from its module if the host has that
    module, and otherwise from the pickle.
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
