"""Handle packages that some Python versions lack, and large packages.

New Python versions lack torch for some months. After a process has loaded a large package, each fork takes
four times as long.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

LARGE = ("torch", "sklearn", "polars", "pyarrow", "PIL")
PIPES = Path(__file__).parents[1] / "sequential"
"""Folder whose conftest.py loads torch."""
NAMES = "|".join(LARGE)
LOADS = re.compile(
    rf"^\s*(?:import|from) (?:{NAMES})\b|(?:importorskip|optional)\(.(?:{NAMES})\b|one_compute_thread",
    re.MULTILINE,
)
"""Lines by which a file loads a large library into its process."""
PROGRAM = re.compile(r'"""(?:[^"\\]|"(?!"")|\\.)*"""', re.DOTALL)
"""String of several lines.

Such a string may be a program for another process, so its imports do not count.
"""


def loads_large(file: Path) -> bool:
    """Return whether the file loads a large library when it is collected."""
    return PIPES in file.resolve().parents or LOADS.search(PROGRAM.sub("", file.read_text())) is not None


class _Missing:
    """Placeholder for a module that is not installed.

    A test that uses the placeholder is skipped. A file that uses it while being imported is also skipped.
    """

    def __init__(self, package: str) -> None:
        self._package = package

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, attribute: str) -> Any:
        pytest.skip(f"{self._package} is not installed: pip install {self._package}", allow_module_level=True)


def optional(name: str, package: str = "") -> Any:
    """Return the module, or a placeholder that skips its users. ``package`` is the module's name on PyPI, if
    different."""
    top = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != top:
            raise
        return _Missing(package or top)
