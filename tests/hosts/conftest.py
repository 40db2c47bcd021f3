"""What tests of channels across hosts have in common."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flowchan.hosts import serve


@pytest.fixture
def impatient() -> Iterator[None]:
    """Who is not heard of for two seconds is given up."""
    serve(patience=2)
    yield
    serve()
