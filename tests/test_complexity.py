"""Test ``tools/complexity.py``, which ``make lint`` runs."""

from __future__ import annotations

from pathlib import Path

import pytest

complexity = pytest.importorskip("tools.complexity")  # needs lizard

PRODUCT = {
    "flowchan/few.py": "class A:\n    def few(self, a, b, c, d, e, f, *g, h=0, i=0, **j):\n        pass\n",
    "pipelines/many.py": "def many(a, b, c, d, e, f, g, h, i):\n    pass\n",
    "viz/deep.cpp": "int deep(int x) {\n" + "if (x) x++;\n" * 20 + "return x; }\n",
}


@pytest.fixture
def product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a product in which two functions are above a limit."""
    for name, text in PRODUCT.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "tools").mkdir()
    monkeypatch.setattr(complexity, "ROOT", tmp_path)
    monkeypatch.setattr(complexity, "ALLOWED", tmp_path / "tools" / "complexity_allowed.txt")
    complexity.ALLOWED.write_text("")
    return tmp_path


def test_complexity_check_names_each_function_above_a_limit(product: Path) -> None:
    assert list(complexity.problems()) == [
        "pipelines/many.py many: complexity 1 (at most 20), 9 parameters (at most 8); take it apart",
        "viz/deep.cpp deep: complexity 21 (at most 20), 1 parameters (at most 8); take it apart",
    ]


def test_allowed_function_may_not_grow_and_leaves_the_list(product: Path) -> None:
    complexity.ALLOWED.write_text("pipelines/many.py many 1 9\nviz/deep.cpp deep 21 1\n")
    assert not list(complexity.problems())
    complexity.ALLOWED.write_text(
        "pipelines/many.py many 1 9\nviz/deep.cpp deep 20 1\nflowchan/few.py few 1 9\n"
    )
    assert list(complexity.problems()) == [
        "viz/deep.cpp deep: complexity 21 (at most 20), 1 parameters (at most 8); take it apart",
        "flowchan/few.py few: is within the limits now; remove it from tools/complexity_allowed.txt",
    ]
