"""Mark the public names of flowchan's packages, and import them on first use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T", bound=Any)

PACKAGES = ("flowchan.pipelines.children", "flowchan.pipelines", "flowchan")
"""Packages with public names; a package precedes the package that contains it."""


def public(value: T) -> T:
    """Mark a class or function as a public name of its package, and return it.

    Messages, tracebacks and pickles then name the package that users import, not the defining module. The
    package's ``__init__.py`` must also list the name.
    """
    value.__module__ = next(one for one in PACKAGES if value.__module__.startswith(f"{one}."))
    return value


def names_on_first_use(
    package: str, modules: Mapping[str, tuple[str, ...]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package that imports its modules on first use (PEP 562).

    A name becomes an attribute of the package only after its module was imported completely. Otherwise,
    another thread could see a part of the module.

    Args:
        package: Name of the package.
        modules: The public names that each module of the package defines. A module without names is itself
            public.

    Returns:
        The two functions.
    """
    defined_in = {name: module for module, names in modules.items() for name in names}
    own = [module for module, names in modules.items() if not names]

    def from_module(name: str) -> Any:
        """Import the module of a public name on its first use."""
        if name in own:
            return importlib.import_module(f"{package}.{name}")
        if name not in defined_in:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            found = getattr(importlib.import_module(f"{package}.{defined_in[name]}"), name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            text = f"{package}.{name} needs torch: pip install 'flowchan[torch]'"
            raise ImportError(text, name="torch") from error
        setattr(sys.modules[package], name, found)
        return found

    def all_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *defined_in, *own})

    return from_module, all_names
