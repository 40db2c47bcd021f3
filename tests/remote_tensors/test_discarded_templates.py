"""Test that a node drops the templates that its program discards, and only those."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import failing_operations
import pytest
from support.optional_packages import optional

from flowchan.pipelines import NodeDied, RemoteNodes
from flowchan.pipelines.remote_tensors import node_client

torch = optional("torch")

pytestmark = pytest.mark.usefixtures("one_compute_thread")

MOST = 40
SIZES = 150


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Provide a node whose program keeps few templates."""
    monkeypatch.setattr(node_client, "MAX_TEMPLATES", MOST)
    with RemoteNodes(1) as nodes:
        yield nodes


def known_to_node(x: Any) -> int:
    return int(torch.ops.failing.templates(x).item())


def use_many(x: Any) -> None:
    """Use two new templates for each size, and check the values."""
    for size in range(1, SIZES):
        assert (x[:size] + 1).sum().item() == 2 * size


def test_node_drops_templates_that_its_program_discards(nodes: Any) -> None:
    x = torch.ones(SIZES, device=nodes[0])
    for _ in range(2):  # discarded templates are made again
        use_many(x)
        nodes.sync()
        assert known_to_node(x) <= MOST + 5
        assert len(x._m.client._sent._templates) <= MOST + 5


def test_templates_are_dropped_although_the_program_never_waits(nodes: Any, tmp_path: Path) -> None:
    x = torch.ones(SIZES, device=nodes[0])
    for _ in range(5):
        for size in range(1, SIZES):
            x[:size].add_(1)
            x._m.client.flush()
    assert len(x._m.client._sent._templates) <= 2 * MOST + 400
    assert x[0].item() == 1 + 5 * (SIZES - 1)


def test_threads_that_discard_templates_lose_no_command(nodes: Any) -> None:
    """A template in use by another thread's call stays on the node until that call's command has arrived."""
    x = torch.ones(SIZES, device=nodes[0])
    errors: list[BaseException] = []

    def use() -> None:
        try:
            use_many(x)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_dead_node_names_a_lost_operation_of_a_discarded_template(nodes: Any) -> None:
    x = torch.ones(SIZES, device=nodes[0])
    use_many(x)
    lost = torch.ops.failing.fail(x, "kill")
    x._m.client.forget()
    with pytest.raises(NodeDied) as caught:
        lost.cpu()
    assert "failing::fail" in caught.value.operation


assert failing_operations  # the nodes know its operations
