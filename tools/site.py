"""Add pages from outside docs/ to the site, as a hook of mkdocs (see mkdocs.yml).

These are the README as the first page, the other pages of the repository, every example, and the help of each
command. Links in the sources point to files of the repository. The hook points them to pages of the site.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
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
"""Files outside of docs/, and their names on the site."""
EXAMPLES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").rglob("*.py"))
LINK = re.compile(r"(\]\()([^)#:\s]+)(?=[)#])")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
EXAMPLE = re.compile(r"^( +)Example:$", re.MULTILINE)
"""Section of a docstring, which griffe reads as code under the name ``Examples``."""
ROLE = re.compile(r":(?:class|func|meth|mod|data|attr):`~?\.?([^`]+)`")


def on_startup(**_: Any) -> None:
    """Lay the package out as installed, with roles as Markdown and examples as griffe reads them."""
    shutil.rmtree(REFERENCE, ignore_errors=True)
    for source, target in (("flowchan", ""), ("pipelines", "pipelines"), ("viz", "viz")):
        for path in (ROOT / source).rglob("*.py*"):
            if path.suffix not in (".py", ".pyi"):
                continue
            to = REFERENCE / "flowchan" / target / path.relative_to(ROOT / source)
            to.parent.mkdir(parents=True, exist_ok=True)
            text = EXAMPLE.sub(r"\1Examples:", ROLE.sub(r"`\1`", path.read_text()))
            to.write_text(text.replace(".collective.group import", ".collective._group import"))
    # griffe would show this module instead of the function of the same name
    (REFERENCE / "flowchan/collective/group.py").rename(REFERENCE / "flowchan/collective/_group.py")


def on_config(config: Any) -> Any:
    """List the examples."""
    for section in config.nav:
        if section.get("Examples"):
            section["Examples"] = [{Path(path).stem: _page_of(path)} for path in EXAMPLES]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the files from outside docs/."""
    for path, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text()))
    for path in EXAMPLES:
        files.append(File.generated(config, _page_of(path), content=_example(path)))
    files.append(File.generated(config, "reference/command.md", content=_commands()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to the site's pages of the linked files."""
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
    """Return the site's path of a file of the repository. mkdocs reports missing ones."""
    if path == "examples":
        return _page_of(EXAMPLES[0])
    if path in EXAMPLES:
        return _page_of(path)
    return PAGES.get(path, path.removeprefix("docs/"))


def _page_of(example: str) -> str:
    return str(Path(example).with_suffix(".md"))


def _example(path: str) -> str:
    text = (ROOT / path).read_text()
    title = (ast.get_docstring(ast.parse(text)) or path).partition("\n\n")[0].replace("\n", " ")
    return f"# {Path(path).name}\n\n{title}\n\n```python\n{text}```\n"


def _commands() -> str:
    """Return the help of the command and of its subcommands, as they print it."""
    from flowchan.cli.commands import main

    return "\n".join(["# The command", *_helps(main, "flowchan")])


def _helps(command: click.Command, name: str, parent: click.Context | None = None) -> list[str]:
    context = click.Context(command, info_name=name.rpartition(" ")[2], parent=parent)
    found = [f"\n## {name}\n\n```text\n{command.get_help(context)}\n```"]
    for sub in getattr(command, "commands", {}).values():
        found += _helps(sub, f"{name} {sub.name}", context)
    return found
