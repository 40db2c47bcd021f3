"""Start the threads that stay until the process ends, before the first test looks for leftovers."""

from __future__ import annotations

import pytest
from support.optional_packages import optional


@pytest.fixture(autouse=True, scope="session")
def _lasting_threads() -> None:
    """Start torch's backward threads and the thread that sends waiting commands."""
    torch = optional("torch")  # not when the files are collected
    if torch:
        from flowchan.pipelines import RemoteNodes

        with RemoteNodes(1) as nodes:
            torch.ones(1, device=nodes[0], requires_grad=True).sum().backward()
