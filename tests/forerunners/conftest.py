from __future__ import annotations

from collections.abc import Iterator

import pytest
from executors import WORKERS
from gates import Gate

from flowchan.pipelines import TaskPool


@pytest.fixture(params=["thread", "process"])
def pool(request: pytest.FixtureRequest) -> Iterator[TaskPool]:
    with TaskPool(WORKERS, on=request.param) as made:
        yield made


@pytest.fixture
def processes() -> Iterator[TaskPool]:
    with TaskPool(2, on="process") as made:
        yield made


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Is opened at the end, whatever the test does."""
    made = Gate()
    yield made
    made.open()
    del made.channel  # pytest keeps the gate until after the look for what is left
