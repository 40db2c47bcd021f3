"""Tests by their names, where a list says which of them shows what."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def there_is(test: str) -> bool:
    """A ``file::name``, of a file in this folder."""
    file, _, name = test.partition("::")
    return re.search(rf"^def {name}\(", (TESTS / file).read_text(), re.MULTILINE) is not None
