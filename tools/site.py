"""Add pages from outside docs/ to the site, as a hook for mkdocs (see mkdocs.yml).

The hook adds the README (as the first page), the repository's other pages, every example, and the help text
of each command. Links in the sources point to files in the repository; the hook makes them point to pages on
the site.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import textwrap
from pathlib import Path
from typing import Any

import click
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "build" / "reference"
PAGES = {
    "README.md": "index.md",
    "SECURITY.md": "SECURITY.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/results/latest.json": "benchmarks.json",
}
"""Files outside docs/, and the names of their pages on the site."""
EXAMPLES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").rglob("*.py"))
EXAMPLES_TEXT = """# Examples

Each program runs on real data and prints a result.
The examples are in the folder `examples` of the repository.
Some examples need more packages: `pip install torch scikit-learn pillow pyarrow`.
"""
LINK = re.compile(r"(\]\()([^)#:\s]+)(?=[)#])")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
EXAMPLE = re.compile(r"^( +)Example:$", re.MULTILINE)
"""Heading of a docstring section that griffe shows as code only if it is named ``Examples``."""
METHOD = re.compile(r"^    (\w+) = (\w+)\.\1$", re.MULTILINE)
"""Method that is defined as a function in another module."""
DEFAULT = re.compile(r"(?<== )DEFAULT_[A-Z_]+\b")
ROLE = re.compile(r":(?:class|func|meth|mod|data|attr):`~?\.?([^`]+)`")


def on_startup(**_: Any) -> None:
    """Copy the package in its installed layout. Convert roles to Markdown, and examples to the format that
    griffe reads.

    Replace the names of defaults with their numbers.
    """
    values = (ROOT / "flowchan" / "declare" / "values.py").read_text()
    numbers = dict(re.findall(r"^(DEFAULT_[A-Z_]+)\b.*?(\d+)\)?$", values, re.MULTILINE))
    shutil.rmtree(REFERENCE, ignore_errors=True)
    for source, target in (("flowchan", ""), ("pipelines", "pipelines"), ("viz", "viz")):
        for path in (ROOT / source).rglob("*.py*"):
            if path.suffix not in (".py", ".pyi"):
                continue
            to = REFERENCE / "flowchan" / target / path.relative_to(ROOT / source)
            to.parent.mkdir(parents=True, exist_ok=True)
            text = METHOD.sub(_method, path.read_text())
            text = EXAMPLE.sub(r"\1Examples:", ROLE.sub(r"`\1`", text))
            text = text.replace(".collective.group import", ".collective._group import")
            to.write_text(DEFAULT.sub(lambda match: numbers.get(match[0], match[0]), text))
    # Rename the module. Otherwise, griffe would show it instead of the function with the same name.
    (REFERENCE / "flowchan/collective/group.py").rename(REFERENCE / "flowchan/collective/_group.py")


def _method(match: re.Match[str]) -> str:
    """Return the definition of a method that a class takes from another module, for the reference."""
    for path in (ROOT / "flowchan").rglob(f"{match[2]}.py"):
        text = path.read_text()
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == match[1]:
                return textwrap.indent(ast.get_source_segment(text, node) or match[0], "    ")
    return match[0]


def on_config(config: Any) -> Any:
    """Add the examples to the navigation."""
    for section in config.nav:
        if section.get("Examples"):
            pages = [{Path(path).name: _page_of(path)} for path in EXAMPLES]
            section["Examples"] = [{"All examples": "examples/index.md"}, *pages]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the files from outside docs/."""
    for path, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text()))
    for path in EXAMPLES:
        files.append(File.generated(config, _page_of(path), content=_example(path)))
    files.append(File.generated(config, "examples/index.md", content=_list_of_examples()))
    files.append(File.generated(config, "reference/command.md", content=_commands()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Make links point to the site's pages for the linked files."""
    here = next(
        (path for path, name in PAGES.items() if name == page.file.src_uri), f"docs/{page.file.src_uri}"
    )
    code = [match.span() for match in FENCE.finditer(markdown)]

    def led(match: re.Match[str]) -> str:
        if any(start <= match.start() < end for start, end in code):
            return match[0]
        target = os.path.normpath(os.path.join(os.path.dirname(here), match[2]))
        return match[1] + os.path.relpath(_on_site(target), os.path.dirname(page.file.src_uri) or ".")

    return LINK.sub(led, markdown)


def _on_site(path: str) -> str:
    """Return the site's path for a file in the repository. mkdocs reports missing files."""
    if path == "examples":
        return "examples/index.md"
    if path in EXAMPLES:
        return _page_of(path)
    return PAGES.get(path, path.removeprefix("docs/"))


def _page_of(example: str) -> str:
    return str(Path(example).with_suffix(".md"))


def _example(path: str) -> str:
    text = (ROOT / path).read_text()
    return f"# {Path(path).name}\n\n{_summary(text, path)}\n\n```python\n{text}```\n"


def _list_of_examples() -> str:
    """Return the page that lists the examples with their summaries."""
    rows = [
        f"| [{Path(path).name}]({os.path.relpath(_page_of(path), 'examples')}) "
        f"| {_summary((ROOT / path).read_text(), path)} |"
        for path in EXAMPLES
    ]
    return "\n".join([EXAMPLES_TEXT, "| program | what it does |", "|---|---|", *rows, ""])


def _summary(text: str, path: str) -> str:
    """Return the first paragraph of a module's docstring."""
    return (ast.get_docstring(ast.parse(text)) or path).partition("\n\n")[0].replace("\n", " ")


def _commands() -> str:
    """Return the help of the command and its subcommands, as the command prints it."""
    from flowchan.cli.commands import main

    return "\n".join(["# The command", *_helps(main, "flowchan")])


def _helps(command: click.Command, name: str, parent: click.Context | None = None) -> list[str]:
    context = click.Context(command, info_name=name.rpartition(" ")[2], parent=parent)
    found = [f"\n## {name}\n\n```text\n{command.get_help(context)}\n```"]
    for sub in getattr(command, "commands", {}).values():
        found += _helps(sub, f"{name} {sub.name}", context)
    return found
