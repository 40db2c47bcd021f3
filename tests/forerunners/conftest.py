from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from executors import WORKERS
from support.worker_latch import Gate

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
    """Provide a gate that the fixture opens after the test, even if the test fails."""
    made = Gate()
    yield made
    made.open()
    del made.channel  # pytest would keep the gate until after the check for leftovers


@pytest.fixture
def go() -> Iterator[Callable[..., Future[Any]]]:
    """Provide ``go(function, *args)``, which calls the function in a thread. Every call must succeed."""
    started: list[tuple[threading.Thread, Future[Any]]] = []

    def begin(function: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        thread = threading.Thread(target=_ends, args=(future, function, args), daemon=True)
        thread.start()
        started.append((thread, future))
        return future

    yield begin
    while started:
        thread, future = started.pop()
        future.result()
        thread.join()
        del thread, future  # pytest would keep this frame until after the check for leftovers


def _ends(future: Future[Any], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        future.set_result(function(*args))
    except BaseException as error:
        future.set_exception(error)
