"""Test that nodes appear in pictures and reports like children."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from flowchan.pipelines import RemoteNodes  # noqa: E402
from flowchan.viz import to_dot  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_compute_thread")


def test_nodes_are_drawn_as_one_stage() -> None:
    with RemoteNodes(2) as nodes:
        picture = to_dot(nodes.graph)
    assert "<B>×2</B>" in picture
    assert "test_node_pictures.py:" in picture


def test_report_counts_nodes_while_they_run_and_afterwards() -> None:
    with RemoteNodes(2) as nodes:
        torch.ones(2, device=nodes[1]).sum().item()
        assert "graph 'children': " in nodes.report()
    lines = [line.split() for line in nodes.report().splitlines() if line.startswith("children ")]
    assert lines[0][:4] == ["children", "map", "2", "process"]
