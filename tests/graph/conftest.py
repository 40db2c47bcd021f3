from __future__ import annotations

import pytest

from flowchan.graph import Blueprint


@pytest.fixture
def graph() -> Blueprint:
    return Blueprint("test")
