"""The media of a group: threads of this process, and processes."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
from collective_members import Body, in_processes, in_threads


@pytest.fixture(params=[in_threads, in_processes], ids=["threads", "processes"])
def run(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Runs a body as every member of a group, and returns their results in the order of the ranks."""

    def checked(size: int, body: Body, *arguments: Any) -> list[Any]:
        found = request.param(size, body, *arguments)
        for one in found:
            if isinstance(one, BaseException):
                traceback.print_exception(one)
                raise one
        return found

    return checked
