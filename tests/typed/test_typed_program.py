"""Test that the program which ``make lint`` checks with mypy and pyright also runs."""

from __future__ import annotations

from tests.typed import program


def test_typed_program_returns_its_declared_types():
    assert program.main() == {
        "channels": (4, ["B"]),
        "awaited": [5],
        "words": 6,
        "pairs": (4, b"pag"),
        "good": [1.0, 0.5],
        "bad": [0],
        "blamed": ["invert"],
        "texts": ["0.0", "0.5", "11", "22", "3", "4", "5"],
        "total": 1.5,
        "largest": [1, 2],
        "letters": ["a", "b"],
        "so far": [("one", 1), ("two", 1), ("three", 2)],
        "group sizes": [1, 2],
    }
