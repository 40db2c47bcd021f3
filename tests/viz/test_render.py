"""Pictures are made wherever the package is installed, a ``dot`` program or not."""

from __future__ import annotations

import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from picture_graphs import chain, declared, link, stage, wordcount

from flowchan.viz import RenderError, draw, render

HEADS = {"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF", "dot": b"digraph", "mmd": b"---\ntitle"}


@pytest.mark.parametrize("suffix", HEADS)
def test_each_format_is_what_its_suffix_says(suffix: str, tmp_path: Path) -> None:
    path = draw(wordcount(), tmp_path / f"graph.{suffix}")
    assert path.read_bytes().startswith(HEADS[suffix])


def test_the_wheels_engine_draws_where_no_program_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: None)
    assert b"counts" in render("digraph { counts }", "svg")


def test_the_svg_holds_every_stage_and_channel(tmp_path: Path) -> None:
    root = ElementTree.parse(draw(wordcount(), tmp_path / "graph.svg")).getroot()
    text = " ".join(root.itertext())
    for word in ("wordcount", "files", "counts", "total", "report", "Path", "dict[str, int]", "64 · processes"):
        assert word in text


def test_a_thousand_stages_are_drawn_in_every_placement(tmp_path: Path) -> None:
    for every in (1, 7, 2000):
        path = draw(chain(1000, every), tmp_path / f"{every}.svg")
        assert path.read_text().count('class="edge"') == 999


def test_a_cycle_and_names_with_markup_are_drawn(tmp_path: Path) -> None:
    stages = [stage("<&>"), stage('"b"', on="process"), stage("c")]
    links = [link("<&>", '"b"'), link('"b"', "c"), link("c", "<&>"), link('"b"', "c", errors=True)]
    assert draw(declared("loop", stages, links), tmp_path / "loop.svg").read_text().count('class="edge"') == 4


def test_an_unknown_suffix_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"graph\.gif.*\.svg, \.png"):
        draw(wordcount(), tmp_path / "graph.gif")


def test_text_that_is_no_graph_is_an_error_with_graphviz_words() -> None:
    with pytest.raises(RenderError, match="Graphviz failed"):
        render("digraph { a -> ", "svg")


def test_a_crash_of_graphviz_is_an_error_and_not_the_end_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    crash = subprocess.CompletedProcess([], -11, b"", b"")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: crash)
    with pytest.raises(RenderError, match="-11"):
        render("digraph {}", "svg")
