"""Test ``tools/complexity.py``, which ``make lint`` runs."""

from __future__ import annotations

from pathlib import Path

import pytest

complexity = pytest.importorskip("tools.complexity")  # the module needs lizard

PRODUCT = {
    "flowchan/few.py": "class A:\n    def few(self, a, b, c, d, e, f, *g, h=0, i=0, **j):\n        pass\n",
    "pipelines/many.py": "def many(a, b, c, d, e, f, g, h, i):\n    pass\n",
    "viz/deep.cpp": "int deep(int x) {\n" + "if (x) x++;\n" * 20 + "return x; }\n",
}


@pytest.fixture
def product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write product code with two functions above a limit."""
    for name, text in PRODUCT.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(complexity, "ROOT", tmp_path)
    return tmp_path


def test_complexity_check_names_each_function_above_a_limit(product: Path) -> None:
    assert list(complexity.problems()) == [
        "pipelines/many.py many: complexity 1 (at most 20), 9 parameters (at most 8); split it",
        "viz/deep.cpp deep: complexity 21 (at most 20), 1 parameters (at most 8); split it",
    ]
