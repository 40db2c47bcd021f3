"""Test that all code blocks in the README and the docs run and print the stated output.

``execute.py`` describes the rules. Other tests check links, pictures, the reference and troubleshooting.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from execute import FENCE, blocks
from support.preloaded_programs import Template
from test_layers import LAYERS

import flowchan

ROOT = Path(__file__).parents[2]
EXECUTE = Path(__file__).parent / "execute.py"
DOCS = ROOT / "docs"


def has_code(page: Path) -> bool:
    return any(block.language in ("python", "sh") for block in blocks(page.read_text()))


def needs_torch(page: Path) -> bool:
    return any("torch" in block.text for block in blocks(page.read_text()))


WITH_TORCH = " with torch"
FOLDERS = ("howto", "from", "explanation", "appendix", "groups", "sequential")
TOGETHER = {
    folder + suffix: pages
    for folder in FOLDERS
    for suffix in ("", WITH_TORCH)
    if (
        pages := [
            page
            for page in sorted((DOCS / folder).glob("*.md"))
            if needs_torch(page) == (suffix == WITH_TORCH)
        ]
    )
}
"""Short pages. Those in one folder run in the same process, but those that need torch run in another one,
because its forks are slow."""
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted(DOCS.glob("*.md")),
]
ALL = [*PAGES, *(page for pages in TOGETHER.values() for page in pages)]
RUNS = {page.relative_to(ROOT).as_posix(): [page] for page in PAGES if has_code(page)} | TOGETHER
TARGET = re.compile(r"\]\(([^)\s]+)|src=\"([^\"]+)\"")
STARTS = re.compile(r"\.(run|start|pool|trainer|join)\(|\b(Sequential|TaskPool|BackgroundTask|dataset)\(")
"""Calls that start workers in a sample."""
PUBLIC = {
    "flowchan": "flowchan/__init__.py",
    "flowchan.pipelines": "pipelines/__init__.py",
    "flowchan.pipelines.children": "pipelines/children/__init__.py",
    "flowchan.hosts": "flowchan/hosts/__init__.py",
    "flowchan.collective": "flowchan/collective/__init__.py",
    "flowchan.collective.training.gradients": "flowchan/collective/training/gradients.py",
    "flowchan.collective.training.engine": "flowchan/collective/training/engine.py",
    "flowchan.transport": "flowchan/transport/__init__.py",
    "flowchan.viz": "viz/__init__.py",
    "flowchan.viz.insight": "viz/insight/__init__.py",
    "flowchan.viz.insight.opentelemetry": "viz/insight/opentelemetry.py",
}


def execute(programs: Template, directory: Path, *pages: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return programs.run(EXECUTE, *pages, cwd=directory, env={**os.environ, "PATH": path})


@pytest.fixture(scope="module")
def programs() -> Iterator[Template]:
    """Provide the template that runs programs without torch."""
    with contextlib.closing(Template("flowchan.hosts", "flowchan.pipelines")) as template:
        yield template


@pytest.mark.parametrize("pages", RUNS)
def test_code_on_a_page_prints_the_stated_output(
    programs: Template, torch_programs: Template, pages: str, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    used = torch_programs if any(map(needs_torch, RUNS[pages])) else programs
    done = execute(used, tmp_path, *RUNS[pages])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "page",
    [
        "```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n",
        "```python\nprint(1 + 1)  # → 3\n```\n",
        "```python\nprint(1)  # → 1\nprint(2)\n```\n",
        "```python\n1 / 0\n```\n",
        "```sh\nflowchan check nothing.py\n```\n",
        "```python\nx = 1\n```\n\n```python\nprint(x)\n```\n",
    ],
    ids=["text", "comment", "unmentioned", "exception", "command", "name of another block"],
)
def test_page_with_failing_code_or_wrong_output_is_rejected(
    programs: Template, page: str, tmp_path: Path
) -> None:
    (tmp_path / "page.md").write_text(page)
    assert execute(programs, tmp_path, tmp_path / "page.md").returncode != 0


def test_samples_that_start_processes_have_a_main_guard() -> None:
    """Processes started by spawn and forkserver import the script, and cannot import a notebook."""
    unguarded = [
        f"{page.name}:{block.line}"
        for page in ALL
        for block in blocks(page.read_text())
        if 'on="process"' in block.text
        and STARTS.search(block.text)
        and 'if __name__ == "__main__":' not in block.text
        and block.language == "python"
        and page.name != "notebooks.md"
    ]
    assert unguarded == []


def test_targets_of_links_and_pictures_exist() -> None:
    targets = [(page, *found) for page in ALL for found in TARGET.findall(FENCE.sub("", page.read_text()))]
    assert targets
    for page, left, right in targets:
        target, _, anchor = (left or right).partition("#")
        if target.startswith("https://"):
            continue
        found = (page.parent / target).resolve() if target else page
        assert found.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(found), f"{page.name}: {target}#{anchor}"


@functools.cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: ``<a id>``, and those that GitHub and the site create for headings."""
    text = FENCE.sub("", page.read_text())
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    kept = re.findall(r"<a id=\"([\w-]+)\">", text)  # these keep old links to renamed headings working
    return {*kept, *(re.sub(r"[^\w\- ]", "", one.lower()).strip().replace(" ", "-") for one in headings)}


def shown_by(file: str) -> list[str]:
    """Return the names in a file's ``__all__`` without importing the file."""
    (names,) = re.findall(r"^__all__ = [\[(](.*?)[\])]", (ROOT / file).read_text(), re.MULTILINE | re.DOTALL)
    return re.findall(r'"(\w+)"', names)


def test_reference_lists_exactly_the_public_names() -> None:
    listed = [
        name
        for page in (DOCS / "reference").glob("*.md")
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    ]
    public = {name: f"{module}.{name}" for module in reversed(PUBLIC) for name in shown_by(PUBLIC[module])}
    assert sorted(listed) == sorted(public.values())


@pytest.mark.parametrize("name", ["Graph", "Stream"])
def test_reference_lists_all_public_members_of_the_class(name: str) -> None:
    page = (DOCS / "reference/graphs.md").read_text()
    (listed,) = re.findall(
        rf"::: flowchan\.{name}\n    options:\n      group_by_category: false\n      members: \[(.*)\]", page
    )
    graph = flowchan.Graph("graph")
    made = {"Graph": graph, "Stream": graph.source("abc")}[name]
    # the section "Attributes" of a dataclass's docstring lists its fields
    fields = {field.name for field in dataclasses.fields(made)} if dataclasses.is_dataclass(made) else set()
    assert {name for name in dir(made) if not name.startswith("_")} - fields == set(listed.split(", "))


def test_every_exception_has_an_entry_in_troubleshooting() -> None:
    named = {
        name
        for name in flowchan.__all__
        if isinstance(found := getattr(flowchan, name), type) and issubclass(found, BaseException)
    }
    headings = re.findall(r"^### (\w+)$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert named - {"FlowchanError"} <= set(headings)


def template(node: ast.expr) -> str:
    """Return a message as in the troubleshooting table, with an ellipsis for each inserted value."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(template(part) for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return template(left) + template(right)
    return "…"


def assigned(function: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield each assignment in a function as a variable and an expression."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            yield from ((to.id, node.value) for to in node.targets if isinstance(to, ast.Name))


def wordings(node: ast.expr, names: list[tuple[str, ast.expr]]) -> Iterator[str]:
    """Yield the possible texts of an argument: for a variable, every text that is assigned to it."""
    match node:
        case ast.Name(id=name):
            yield from (template(value) for assigned_name, value in names if assigned_name == name)
        case ast.IfExp(body=body, orelse=otherwise):
            yield from map(template, (body, otherwise))
        case _:
            yield template(node)


def messages() -> Iterator[tuple[str, str]]:
    """Yield the messages of flowchan's exceptions and of a graph's problems, with their source lines.

    Messages with two fixed words or fewer are left out.
    """
    for file in (file for room in ("flowchan", "pipelines", "viz") for file in (ROOT / room).rglob("*.py")):
        for function in ast.walk(ast.parse(file.read_text())):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            names = list(assigned(function))
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                    error = getattr(flowchan, node.func.id, None)
                    if not (
                        isinstance(error, type)
                        and issubclass(error, flowchan.FlowchanError | flowchan.Problem)
                    ):
                        continue
                    for text in wordings(node.args[-1 if error is flowchan.Problem else 0], names):
                        if len(text.replace("…", " ").split()) > 2:
                            yield f"{file.relative_to(ROOT)}:{node.lineno}: {text}", text


def messages_of_the_core() -> Iterator[tuple[str, str]]:
    """Yield the messages of the native core, with an ellipsis between string literals."""
    literal = r'"((?:[^"\\]|\\.)*)"'
    for file in (ROOT / "flowchan" / "_core").glob("*.cpp"):
        text = re.sub(r'"\s*"', "", file.read_text())  # join adjacent string literals
        thrown = re.findall(r'\braise\("\w+",(.*?)\);', text, re.DOTALL)
        found = [re.split(literal, one) for one in thrown]
        whole = ["".join(part if place % 2 else "…" for place, part in enumerate(parts)) for parts in found]
        broken = re.findall(r"\braise_broken\((.*?)\);", text, re.DOTALL)
        listed = re.findall(r"std::length_error\((.*?)\);", text, re.DOTALL)
        parts = [one for text in (*broken, *listed) for one in re.findall(literal, text)]
        for one in (*whole, *parts):
            if len(one.replace("…", " ").split()) > 2:
                yield f"{file.relative_to(ROOT)}: {one}", one


NEVER_SHOWN = {"unknown port number ", "the run has ended"}
"""Messages that users never see: one reports a bug in the core, the other is only for flowchan's threads."""


def says(one: str, other: str) -> bool:
    """Return whether ``other`` contains ``one``. An ellipsis in ``one`` matches any text."""
    return re.search(".*".join(map(re.escape, one.strip("… ").split("…"))), other, re.DOTALL) is not None


def test_troubleshooting_has_a_row_for_every_message() -> None:
    quoted = re.findall(r"`([^`]+)`", (DOCS / "troubleshooting.md").read_text())
    rows = [text for text in quoted if len(text.replace("…", " ").split()) > 1]
    native = dict(messages_of_the_core())
    found = dict(messages())
    assert len(found) > 90  # otherwise, the search itself is broken
    assert len(native) > 10
    missing = {
        place: text
        for place, text in (found | native).items()
        if text not in NEVER_SHOWN and not any(says(row, text) or says(text, row) for row in rows)
    }
    assert missing == {}


PICTURES = [
    ("README.md", "wordcount.py"),
    ("docs/tutorial.md", "shop.py"),
    ("docs/concepts.md", "concepts.py"),
]


@pytest.mark.parametrize(("page", "program"), PICTURES, ids=[program for _, program in PICTURES])
def test_stored_picture_shows_the_labels_of_its_program(page: str, program: str, tmp_path: Path) -> None:
    """Compare only the texts of the two pictures, because another renderer may place them differently."""
    text = (ROOT / page).read_text()
    *_, block = (block for block in blocks(text) if block.file == program)
    (tmp_path / program).write_text(block.text)
    (stored,) = re.findall(r"\((?:docs/)?(images/\w+\.svg)\)(?!\])", text)
    flowchan = Path(sys.executable).parent / "flowchan"
    subprocess.run([flowchan, "viz", program, "-o", "new.svg"], cwd=tmp_path, check=True)
    assert labels(tmp_path / "new.svg") == labels(DOCS / stored)


def labels(picture: Path) -> list[str]:
    """Return the sorted texts of an SVG file."""
    return sorted(re.findall(r"<text[^>]*>([^<]*)", picture.read_text()))


def test_layers_picture_shows_every_layer() -> None:
    shown = labels(DOCS / "images" / "layers.svg")
    assert {part for parts in LAYERS for part in parts} <= set(shown)
