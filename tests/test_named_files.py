"""Check that source files mentioned in the product's comments and docstrings exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("flowchan", "pipelines", "viz", "flowchan_torch")
FILE_NAME = re.compile(r"(?<![\w./*])((?:\w+/)*\w+\.(?:py|cpp|hpp))\b")


def sources(*parts: str) -> Iterator[Path]:
    """Yield every source file in these folders."""
    for part in parts:
        yield from (path for path in (ROOT / part).rglob("*") if path.suffix in (".py", ".cpp", ".hpp"))


def test_files_named_in_the_product_exist() -> None:
    existing = [f"/{path.relative_to(ROOT)}" for path in sources(*PRODUCT, "tests", "tools", "examples")]
    missing = [
        f"{path.relative_to(ROOT)}:{number} names {name}"
        for path in sources(*PRODUCT)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for name in FILE_NAME.findall(line)
        if not any(one.endswith(f"/{name}") for one in existing)
    ]
    assert not missing, "\n".join(missing)


def test_pipelines_docstring_names_methods_that_exist() -> None:
    text = (ROOT / "pipelines" / "__init__.py").read_text()
    pipe = (ROOT / "pipelines" / "sequential" / "pipe.py").read_text()
    for method in re.findall(r"``(\w+)\(…?\.*\)``", text):
        assert f"def {method}(" in pipe
