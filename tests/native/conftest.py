"""The compiler, with what it has compiled before."""

from __future__ import annotations

from pathlib import Path

import pytest
from building import Builder


@pytest.fixture(scope="session")
def builder() -> Builder:
    return Builder(Path(__file__).parents[2] / "build" / "native-tests")
