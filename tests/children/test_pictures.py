"""Test that children appear in pictures and reports like any stage."""

from __future__ import annotations

from flowchan.pipelines import children
from flowchan.viz import to_dot


def test_children_are_drawn_as_one_stage() -> None:
    with children.start(3) as kids:
        picture = to_dot(kids.graph)
    assert "<B>children</B> <B>×3</B>" in picture
    assert "starts children · test_pictures.py:" in picture
    assert "failures" not in picture


def test_report_counts_children_after_they_exit() -> None:
    with children.start(2) as kids:
        kids.run(lambda parent: None)
        kids.wait(60)
        assert "graph 'children': " in kids.report()
    lines = [line.split() for line in kids.report().splitlines() if line.startswith("children ")]
    assert lines[0][:6] == ["children", "map", "2", "process", "2", "2"]
