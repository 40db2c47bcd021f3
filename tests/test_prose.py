"""Test ``tools/prose.py``, which ``make lint`` runs to find sentences that break a rule."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tools import prose

MODULE = '''"""Read numbers.

Of strings it returns nothing.
"""

# Whoever reads this is told about it.
x = 1  # a plain remark


def test_what_nobody_reads():
    """What it reads."""
    raise ValueError(f"{x} is no number")
'''

PAGE = """# A title

A plain sentence. The reader waits for who writes, `of what` it reads.

```python
print("whoever reads this")
```

| column | the value, too |
"""


def found_in(path: Path) -> list[tuple[str, int, str]]:
    return sorted((hit.kind, hit.line, hit.rule) for text in prose.texts([path]) for hit in prose.hits(text))


def test_prose_check_finds_each_kind_of_text_in_a_module(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(MODULE)
    assert found_in(path) == [
        ("comment", 6, "banned word"),
        ("docstring", 3, "opens with a preposition"),
        ("error", 12, "'is no …'"),
        ("summary", 11, "summary without a verb"),
        ("test name", 10, "clause or banned word"),
    ]


def test_prose_check_skips_code_in_pages(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    assert found_in(path) == [("docs", 3, "clause as a noun"), ("docs", 9, "', too'")]


def test_prose_check_reads_comments_of_native_files(tmp_path: Path) -> None:
    path = tmp_path / "code.cpp"
    path.write_text("int x;  // a counter\n// By this the reader\n// is woken.\n")
    assert found_in(path) == [("comment", 2, "opens with a preposition")]


@pytest.mark.parametrize(
    ("sentence", "rule"),
    [
        (
            "It returns the value " + "and another value " * 8 + "too late.",
            "30 words in a sentence (at most 25)",
        ),
        ("It reads; it writes; it ends.", "two semicolons"),
        ("Who reads it gets an error.", "clause as a noun"),
    ],
)
def test_prose_check_names_the_rule(sentence: str, rule: str, tmp_path: Path) -> None:
    text = prose.Text("docs", tmp_path, 1, sentence)
    assert [hit.rule for hit in prose.hits(text)] == [rule]


@pytest.mark.parametrize(
    "sentence",
    [
        "What is a channel?",
        "A peer that has no longer an address raises an error.",
        "With `tls=True` it encrypts.",
    ],
)
def test_prose_check_accepts_plain_sentences(sentence: str, tmp_path: Path) -> None:
    assert not list(prose.hits(prose.Text("docs", tmp_path, 1, sentence)))


def test_number_of_hits_may_only_fall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prose, "ALLOWED", tmp_path / "allowed.txt")
    prose.record(Counter(docs=2, comment=1))
    assert not list(prose.complaints(Counter(docs=2, comment=1)))
    assert list(prose.complaints(Counter(docs=3, comment=1))) == [
        "docs: there must be at most 2 hits, got 3; rewrite the new sentences"
    ]
    assert list(prose.complaints(Counter(docs=2))) == [
        "comment: the recorded number must be 0, got 1; run `python tools/prose.py --record`"
    ]
