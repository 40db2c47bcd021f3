"""Every code block of the README and of the guide runs and prints what the text says; ``execute.py`` has the
rules."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXECUTE = Path(__file__).parent / "execute.py"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def execute(page: Path, directory: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [sys.executable, EXECUTE, page],
        cwd=directory, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_on_a_page_runs_and_prints_what_the_page_says(page: Path, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    done = execute(page, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "page",
    [
        "```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n",
        "```python\nprint(1 + 1)  # → 3\n```\n",
        "```python\nprint(1)  # → 1\nprint(2)\n```\n",
        "```python\n1 / 0\n```\n",
        "```sh\nflowchan check nothing.py\n```\n",
    ],
    ids=["text", "comment", "unmentioned", "exception", "command"],
)
def test_a_page_with_a_false_statement_fails(page: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(page)
    assert execute(tmp_path / "page.md", tmp_path).returncode != 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_and_picture_of_a_page_leads_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)|src=\"([^\"]+)\"", page.read_text())
    for target in (left or right for left, right in targets):
        assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"
