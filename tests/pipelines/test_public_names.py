"""What ``flowchan.pipelines`` shows, and that it is written on the public names of flowchan only."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import torch  # noqa: F401 - its threads begin here, not in a test

import flowchan
from flowchan import pipelines

SOURCES = sorted((Path(__file__).parents[2] / "pipelines").rglob("*.py"))


@pytest.mark.parametrize("name", pipelines.__all__)
def test_every_public_name_and_method_has_a_docstring(name: str) -> None:
    value = getattr(pipelines, name)
    assert value.__doc__
    assert value.__module__ == "flowchan.pipelines"
    if inspect.isclass(value):
        bare = [
            method
            for method, member in vars(value).items()
            if not method.startswith("_")
            and (callable(member) or isinstance(member, property))
            and not member.__doc__
        ]
        assert not bare


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_of_flowchan_only_public_names_are_imported(source: Path) -> None:
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flowchan":
            if node.module == "flowchan":
                assert {alias.name for alias in node.names} <= set(flowchan.__all__)
            else:
                assert (node.module or "").startswith("flowchan.pipelines.")
        elif isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] == "flowchan" for alias in node.names)
