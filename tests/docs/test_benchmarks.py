"""The pages with figures show what is stored, and nothing else."""

from __future__ import annotations

import json

from benchmarks import table


def test_the_page_of_benchmarks_shows_what_is_stored() -> None:
    stored = json.loads(table.LATEST.read_text())
    assert table.PAGE.read_text() == table.page(stored)


def test_the_readme_shows_six_rows_of_what_is_stored() -> None:
    stored = json.loads(table.LATEST.read_text())
    readme = table.FRONT.read_text()
    assert readme == table.front(stored, readme)
    shown = readme.partition(table.BEGIN)[2].partition(table.END)[0]
    assert shown.count("\n| ") == 2 + len(table.FRONT_ROWS)
