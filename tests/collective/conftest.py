"""Fixtures that run the members of a group as threads, as processes, or on two hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.group_members import in_processes, in_threads, over_hosts, raised

HERE = {"threads": in_threads, "processes": in_processes}
ANYWHERE = HERE | {"hosts": over_hosts}


@pytest.fixture(params=ANYWHERE.values(), ids=ANYWHERE)
def run(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Return a function that runs a body as each member of a group, and returns the results in rank order."""
    return _checked(request.param)


@pytest.fixture(params=HERE.values(), ids=HERE)
def run_on_one_host(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    return _checked(request.param)


def _checked(runner: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    return lambda size, body, *arguments: raised(runner(size, body, *arguments))
