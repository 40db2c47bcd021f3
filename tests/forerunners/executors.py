"""What the tests of executors share."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

WORKERS = 3
"""Of the pool that most tests use."""


class Thing:
    """Can be referred to weakly."""

    def method(self) -> None: ...


def cancelled(told: bool) -> Future[Any]:
    """``told``: whether its executor has said so to those who wait."""
    future: Future[Any] = Future()
    future.cancel()
    if told:
        future.set_running_or_notify_cancel()
    return future


def ended(result: Any = None, error: BaseException | None = None) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error) if error else future.set_result(result)
    return future
