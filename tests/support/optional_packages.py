"""Packages that not every Python has, for torch comes later than a new Python; and those that are large, in
whose presence everything is forked at four times the cost."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

LARGE = ("torch", "sklearn", "polars", "pyarrow", "PIL")
LOADED = pytest.StashKey[list[str]]()
"""Which of them are there once the tests have been collected."""


class _Missing:
    """Stands for a module that is not installed. Who uses it is skipped: a test, or, while it is imported, a
    file."""

    def __init__(self, package: str) -> None:
        self._package = package

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, attribute: str) -> Any:
        pytest.skip(f"{self._package} is not installed: pip install {self._package}", allow_module_level=True)


def optional(name: str, package: str = "") -> Any:
    """The module, or what has those skipped who use it; ``package`` is its name for pip, if that differs."""
    top = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != top:
            raise
        return _Missing(package or top)
