"""Provide two nodes for each test file, and start the threads that run until the process exits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.child_processes import descendants
from support.optional_packages import optional
from support.waiting import wait_until


@pytest.fixture(autouse=True, scope="session")
def _lasting_threads() -> None:
    """Start torch's backward threads, and the thread that sends waiting commands."""
    torch = optional("torch")  # imported here, because the import must not happen during collection
    if torch:
        from flowchan.pipelines import RemoteNodes

        with RemoteNodes(1) as nodes:
            torch.ones(1, device=nodes[0], requires_grad=True).sum().backward()


@pytest.fixture(scope="module")
def two_nodes(one_compute_thread: None) -> Iterator[Any]:
    """Provide two nodes for a file.

    Nodes may open descriptors during any test, so leftovers are not checked after each test.
    """
    from flowchan.pipelines import RemoteNodes

    before = set(descendants())
    with RemoteNodes(2) as nodes:
        yield nodes
    wait_until(lambda: set(descendants()) <= before)
