"""Choose the core: the compiled module, or its Python replacement where the compiled one does not exist.

The compiled module needs Linux. Without it, channels between threads, graphs of threads, ``check`` and
``viz`` work, and everything else raises ``RuntimeError``. ``flowchan/__init__.py`` imports this module before
any module that imports ``flowchan._core``. No other module makes the choice.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

from flowchan.errors import _needs_native

SWITCH = "FLOWCHAN_PURE_PYTHON"
"""Environment variable that hides the compiled module if it is "1"; tests use it."""

_CORE = "flowchan._core"


def is_compiled() -> bool:
    """Return whether this program uses the compiled core."""
    return sys.modules[_CORE].__name__ == _CORE


def need_native(problem: str) -> None:
    """Raise ``RuntimeError`` with ``problem`` unless this program uses the compiled core."""
    if not is_compiled():
        raise _needs_native(problem)


def _choose() -> None:
    """Load the core. An error of a compiled module that exists is raised."""
    spec = None if os.environ.get(SWITCH) == "1" else importlib.util.find_spec(_CORE)
    if spec is None or spec.origin is None:  # in a source tree without a build, only the folder exists
        sys.modules[_CORE] = importlib.import_module("flowchan.pure.core")


_choose()
