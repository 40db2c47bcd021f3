"""Create stand-ins for names of the native core, which raise because they need the compiled module."""

from __future__ import annotations

from typing import Any, NoReturn

from flowchan.errors import _needs_native


def missing_class(name: str) -> Any:
    """Return a class that can be extended but not instantiated."""
    fails = missing_function(name)
    return type(name, (), {"__init__": fails, "_make": staticmethod(fails)})


def missing_function(name: str) -> Any:
    """Return a function that always raises an error."""

    def fails(*args: Any, **options: Any) -> NoReturn:
        raise _needs_native(f"{name} is not available")

    return fails
