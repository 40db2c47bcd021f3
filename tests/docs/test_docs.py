"""Every code block of the README and of the guide runs and prints what the text says; ``execute.py`` has the
rules. The site names everything that is public."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from execute import FENCE
from warm import Template

import flowchan

ROOT = Path(__file__).parents[2]
EXECUTE = Path(__file__).parent / "execute.py"
DOCS = ROOT / "docs"
TOGETHER = {name: sorted((DOCS / name).glob("*.md")) for name in ("howto", "from")}
"""Short pages, which share a process."""
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted(DOCS.glob("*.md")),
]
ALL = [*PAGES, *(page for pages in TOGETHER.values() for page in pages)]
RUNS = {page.name: [page] for page in PAGES} | TOGETHER
PUBLIC = {
    "flowchan": "flowchan/__init__.py",
    "flowchan.pipelines": "pipelines/__init__.py",
    "flowchan.hosts": "flowchan/hosts/__init__.py",
    "flowchan.collective": "flowchan/collective/__init__.py",
    "flowchan.collective.parallel": "flowchan/collective/parallel.py",
    "flowchan.collective.engine": "flowchan/collective/engine.py",
    "flowchan.viz": "viz/__init__.py",
}


def execute(programs: Template, directory: Path, *pages: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return programs.run(EXECUTE, *pages, cwd=directory, env={**os.environ, "PATH": path})


@pytest.mark.parametrize("pages", RUNS)
def test_the_code_on_a_page_runs_and_prints_what_the_page_says(
    torch_programs: Template, pages: str, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    done = execute(torch_programs, tmp_path, *RUNS[pages])
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
def test_a_page_with_a_false_statement_fails(torch_programs: Template, page: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(page)
    assert execute(torch_programs, tmp_path, tmp_path / "page.md").returncode != 0


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_every_link_and_picture_of_a_page_leads_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    for left, right in re.findall(r"\]\(([^)\s]+)|src=\"([^\"]+)\"", text):
        target, _, anchor = (left or right).partition("#")
        if target.startswith("https://"):
            continue
        found = (page.parent / target).resolve() if target else page
        assert found.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(found), f"{page.name}: {target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def shown_by(file: str) -> list[str]:
    """The names in ``__all__``, read without an import."""
    (names,) = re.findall(r"^__all__ = [\[(](.*?)[\])]", (ROOT / file).read_text(), re.MULTILINE | re.DOTALL)
    return re.findall(r'"(\w+)"', names)


def test_the_reference_has_every_public_name_and_no_other() -> None:
    listed = [
        name
        for page in (DOCS / "reference").glob("*.md")
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    ]
    public = {name: f"{module}.{name}" for module in reversed(PUBLIC) for name in shown_by(PUBLIC[module])}
    assert sorted(listed) == sorted(public.values())


def test_every_exception_has_an_entry_in_troubleshooting() -> None:
    named = {
        name
        for name in flowchan.__all__
        if isinstance(found := getattr(flowchan, name), type) and issubclass(found, BaseException)
    }
    headings = re.findall(r"^### (\w+)$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert named - {"FlowchanError"} <= set(headings)
