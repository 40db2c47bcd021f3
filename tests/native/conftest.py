"""The compiler, with what it has compiled in this session."""

from __future__ import annotations

import pytest
from building import Builder


@pytest.fixture(scope="session")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    return Builder(tmp_path_factory.mktemp("native"))
