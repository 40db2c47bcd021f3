"""Test that the figures on the two benchmark pages match the stored figures."""

from __future__ import annotations

import json

from benchmarks import table
from benchmarks.harness import Result, Row, at_least, at_most


def test_benchmark_page_shows_the_stored_figures() -> None:
    stored = json.loads(table.LATEST.read_text())
    assert table.PAGE.read_text() == table.page(stored)


def test_readme_shows_the_stored_figures() -> None:
    stored = json.loads(table.LATEST.read_text())
    readme = table.FRONT.read_text()
    assert readme == table.front(stored, readme)
    shown = readme.partition(table.BEGIN)[2].partition(table.END)[0]
    assert shown.count("\n| ") == 2 + len(table.FRONT_ROWS)


def test_ratio_is_above_one_when_flowchan_is_faster() -> None:
    fast, slow = Result("work", "flowchan", "s", [1.0]), Result("work", "peer", "s", [2.0])
    assert at_most(1, fast, slow) == Row("work", "≥ 1 × peer", "1 s", "2 s", "2", reached=True)
    assert at_least(1, fast, slow) == Row("work", "≥ 1 × peer", "1 s", "2 s", "0.5", reached=False)
