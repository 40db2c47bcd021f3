"""Mark the public names of the package ``flowchan``, where they are defined."""

from __future__ import annotations

import sys
from typing import Any, TypeVar

T = TypeVar("T", bound=Any)


def public(value: T) -> T:
    """Make a class or function an attribute of ``flowchan``, and return it.

    Messages, tracebacks and pickles then name the module that users import, not the defining module.
    ``flowchan/__init__.py`` must also list the name.
    """
    value.__module__ = "flowchan"
    setattr(sys.modules["flowchan"], value.__name__, value)
    return value
