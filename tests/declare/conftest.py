from __future__ import annotations

import pytest

from flowchan.declare.blueprint import Blueprint


@pytest.fixture
def graph() -> Blueprint:
    return Blueprint("test")
