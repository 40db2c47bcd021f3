"""Look up the tests that a list names as evidence for its entries."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def is_listed_test(test: str) -> bool:
    """Return whether the test ``file::name`` exists in this folder."""
    file, _, name = test.partition("::")
    return re.search(rf"^def {name}\(", (TESTS / file).read_text(), re.MULTILINE) is not None
