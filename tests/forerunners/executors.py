"""Helpers for the tests of executors."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

WORKERS = 3
"""Number of workers in the pool that most tests use."""


class Thing:
    """An object that supports weak references."""

    def method(self) -> None: ...


def cancelled(notified: bool) -> Future[Any]:
    """Return a cancelled future. If ``notified`` is true, its waiters know of the cancellation."""
    future: Future[Any] = Future()
    future.cancel()
    if notified:
        future.set_running_or_notify_cancel()
    return future


def ended(result: Any = None, error: BaseException | None = None) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error) if error else future.set_result(result)
    return future
