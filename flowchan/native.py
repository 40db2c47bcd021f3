"""Choose the core: the compiled module if it is installed, otherwise its Python replacement.

The compiled module needs Linux. Without it, only channels between threads, graphs of threads, ``check`` and
``viz`` work; everything else raises ``RuntimeError``. ``flowchan/__init__.py`` imports this module before any
module that imports ``flowchan._core``. Only this module makes the choice.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

from flowchan.errors import _needs_native

SWITCH = "FLOWCHAN_PURE_PYTHON"
"""Environment variable that hides the compiled module if set to "1"; tests use it."""

_CORE = "flowchan._core"


def is_compiled() -> bool:
    """Return whether this program uses the compiled core."""
    return sys.modules[_CORE].__name__ == _CORE


def need_native(problem: str) -> None:
    """Raise ``RuntimeError(problem)`` unless this program uses the compiled core."""
    if not is_compiled():
        raise _needs_native(problem)


def _choose() -> None:
    """Load the core. If a compiled module exists but fails to load, raise its error."""
    spec = None if os.environ.get(SWITCH) == "1" else importlib.util.find_spec(_CORE)
    # a source tree without a build has only a folder of this name
    is_missing = spec is None or spec.origin is None
    sys.modules[_CORE] = importlib.import_module("flowchan.pure.core" if is_missing else _CORE)


_choose()
