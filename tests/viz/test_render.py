"""Test that pictures are drawn wherever the package is installed, even without ``dot``.

The first renderer that works draws the picture.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from picture_graphs import chain, declared, edge, stage, wordcount

from flowchan.viz import RenderError, draw
from flowchan.viz.dot import FONT, to_dot
from flowchan.viz.render import _engines, render
from flowchan.viz.wrapping import MOST_COLUMNS

HEADS = {"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF", "dot": b"digraph", "mmd": b"---\ntitle"}

PYGRAPHVIZ = not subprocess.run(
    [sys.executable, "-c", "import pygraphviz"], capture_output=True, check=False
).returncode


@pytest.mark.parametrize("suffix", HEADS)
def test_draw_writes_the_format_of_the_suffix(suffix: str, tmp_path: Path) -> None:
    if suffix == "pdf" and not (PYGRAPHVIZ or shutil.which("dot")):
        pytest.skip("neither dot nor pygraphviz is installed to draw a .pdf: apt-get install graphviz")
    path = draw(wordcount(), tmp_path / f"graph.{suffix}")
    assert path.read_bytes().startswith(HEADS[suffix])


def dot_program(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a shell script the only ``dot`` program that can be found."""
    program = folder / "dot"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/bin")


def test_the_dot_program_draws_if_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dot_program(tmp_path, 'echo "drawn by dot $1"', monkeypatch)
    assert render("digraph { counts }", "png") == b"drawn by dot -Tpng\n"


@pytest.mark.parametrize("script", ["exit 1", "kill -SEGV $$", ""], ids=["fails", "crashes", "draws nothing"])
def test_next_renderer_is_used_if_one_fails(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dot_program(tmp_path, script, monkeypatch)
    assert b"counts" in render("digraph { counts }", "svg")


def test_graphviz_pure_draws_without_dot_using_common_fonts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert draw(wordcount(), tmp_path / "graph.png").read_bytes().startswith(HEADS["png"])
    drawn = draw(wordcount(), tmp_path / "graph.svg").read_text()
    assert f'font-family="{FONT}"' in drawn
    assert drawn.count("font-family=") == drawn.count(f'font-family="{FONT}"')


@pytest.mark.skipif(
    not PYGRAPHVIZ,
    reason="pygraphviz or its system libraries are missing: apt-get install graphviz, pip install pygraphviz",
)
def test_pygraphviz_draws_if_no_other_renderer_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    assert render("digraph { counts }", "pdf").startswith(HEADS["pdf"])


@pytest.mark.parametrize(
    ("picture", "install"), [("svg", "pip install graphviz-pure"), ("pdf", "apt install graphviz")]
)
def test_error_without_renderer_names_install_command(
    picture: str, install: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RenderError, match=rf"\.{picture} .*{install} "):
        draw(wordcount(), tmp_path / f"graph.{picture}")
    assert draw(wordcount(), tmp_path / "graph.mmd").exists()


def test_svg_contains_every_stage_and_channel(tmp_path: Path) -> None:
    root = ElementTree.parse(draw(wordcount(), tmp_path / "graph.svg")).getroot()
    text = " ".join(root.itertext())
    for word in (
        "wordcount",
        "files",
        "counts",
        "total",
        "report",
        "Path",
        "dict[str, int]",
        "in processes",
    ):
        assert word in text


def test_a_thousand_stages_are_drawn_in_every_placement(tmp_path: Path) -> None:
    for every in (1, 7, 2000):
        path = draw(chain(1000, every), tmp_path / f"{every}.svg")
        assert path.read_text().count('class="edge"') == 999


def test_a_cycle_and_names_with_markup_are_drawn(tmp_path: Path) -> None:
    stages = [stage("<&>"), stage('"b"', on="process"), stage("c")]
    edges = [edge("<&>", '"b"'), edge('"b"', "c"), edge("c", "<&>"), edge('"b"', "c", errors=True)]
    assert draw(declared("loop", stages, edges), tmp_path / "loop.svg").read_text().count('class="edge"') == 4


def test_error_for_an_unknown_suffix_names_the_suffix(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"graph\.gif.*\.svg, \.png"):
        draw(wordcount(), tmp_path / "graph.gif")


def test_invalid_dot_raises_with_graphvizs_message() -> None:
    with pytest.raises(RenderError, match="Graphviz failed"):
        render("digraph { a -> ", "svg")


def test_graphviz_crash_raises_render_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crash = subprocess.CompletedProcess([], -11, b"", b"")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: crash)
    with pytest.raises(RenderError, match="-11"):
        render("digraph {}", "svg")


def test_every_renderer_keeps_stage_and_channel_ids() -> None:
    graph = chain(MOST_COLUMNS + 1, every_process=3)
    expected = {*(f"s{number}" for number in range(len(graph.stages)))}
    expected |= {*(f"e{number}" for number in range(len(graph.edges)))}
    rendered = list(_engines("svg"))
    assert rendered
    for _, command, draw_with in rendered:
        drawn = ElementTree.fromstring(draw_with(command, to_dot(graph)))
        ids = [id for element in drawn.iter() if (id := element.get("id"))]
        assert len(ids) == len({*ids})
        assert {id for id in ids if id[0] in "se"} == expected
