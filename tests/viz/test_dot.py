"""The DOT text says what the picture promises."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Any, Optional

import pytest
from picture_graphs import chain, declared, leading_back, link, stage, wordcount

from flowchan.viz import to_dot
from flowchan.viz.labels import place, type_text

DOT = to_dot(wordcount())


def node(name: str, dot: str = DOT) -> str:
    return next(line for line in dot.splitlines() if f"<B>{name}</B>" in line and "shape=" in line)


def arrow(name: str, dot: str = DOT) -> list[str]:
    return [line for line in dot.splitlines() if "->" in line and f"tooltip={name}" in line.replace('"', "")]


def test_it_runs_from_left_to_right() -> None:
    assert "rankdir=LR" in DOT


def test_a_stage_shows_its_name_workers_and_the_place_of_its_function() -> None:
    assert "×2" in node("counts")
    assert "×" not in node("files")
    graphs = Path(__file__).with_name("picture_graphs.py")
    line = 1 + graphs.read_text().splitlines().index("def explode(*_: object) -> None:")
    assert f"picture_graphs.py:{line}" in node("counts")


def test_a_place_below_the_working_directory_is_relative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    assert "map · picture_graphs.py:" in node("counts", to_dot(wordcount()))


def test_a_function_that_is_not_python_shows_where_it_was_declared() -> None:
    assert place(stage("print", function=print)) == (str(Path(__file__).with_name("picture_graphs.py")), 1)


class Model:
    def __init__(self) -> None: ...

    def __call__(self, item: int) -> int:
        return item


@pytest.mark.parametrize(
    "function", [Model, functools.partial(Model), Model(), functools.partial(node, "x"), Path.rglob]
)
def test_places_are_found_in_every_kind_of_callable(function: Any) -> None:
    file, line = place(stage("any", function=function))
    assert os.path.basename(file) in ("test_dot.py", "pathlib.py", "_local.py", "__init__.py")
    assert line > 1


def test_stages_are_boxed_by_placement_threads_together_and_each_pool_apart() -> None:
    boxes = re.findall(r"subgraph cluster\d+ \{(.*?)\n\t\}", DOT, re.DOTALL)
    members = [set(re.findall(r"<B>(\w+)</B>", box)) for box in boxes]
    assert members == [{"files", "total", "report", "save"}, {"counts"}]
    assert "label=threads" in boxes[0]
    assert 'label="2 processes"' in boxes[1]


def test_a_channel_shows_item_type_capacity_and_medium() -> None:
    (files,) = arrow("files")
    assert "<B>Path</B>" in files
    assert "64 · processes" in files
    (errors,) = arrow("counts.errors")
    assert "<B>" not in errors


def test_sources_sinks_results_and_errors_look_different_from_stages() -> None:

    looks = {
        re.search(r"shape=\w+ style=\S+", node(name)).group() for name in ("files", "total", "report", "save")
    }
    result = next(line for line in DOT.splitlines() if "end3 [" in line)
    assert len(looks) == 4
    assert "shape=note" in result
    (errors,) = arrow("counts.errors")
    assert "dashed" in errors


def test_feedback_is_dashed_and_does_not_pull_its_stages_apart() -> None:
    dot = to_dot(leading_back())
    (back,) = arrow("worker", dot)
    assert "style=dashed" in back
    assert "constraint=false" in back
    assert dot.count("constraint=false") == dot.count("style=dashed") == 1
    assert ">feedback<" in dot
    assert ">feedback<" not in DOT


def test_a_channel_that_nobody_reads_is_a_result_only_behind_reduce_and_collect() -> None:
    dot = to_dot(declared("g", [stage("a"), stage("b", "collect")], [link("a", None), link("b", None)]))
    assert "read by nobody" in dot.split("end0 [")[1].split("end1 [")[0]
    assert "result" in dot.split("end1 [")[1]


def test_the_legend_explains_what_is_drawn_and_nothing_else() -> None:
    legend = next(line for line in DOT.splitlines() if line.strip().startswith("graph ["))
    for words in (
        "source",
        "sink",
        "takes failed items",
        "result",
        "threads of one process",
        "a pool of processes",
    ):
        assert words in legend
    only = to_dot(declared("g", [stage("a")], []))
    assert "pool of processes" not in only
    assert "failed items" not in only


def test_the_picture_brings_its_own_ground_for_dark_viewers() -> None:
    assert re.search(r'bgcolor="#f\w+"', DOT)


def test_names_with_markup_quotes_and_unicode_stay_names() -> None:
    name = '<b>&"\\N →é'
    dot = to_dot(declared(name, [stage(name), stage("b:c")], [link(name, "b:c")]))
    assert "<B>&lt;b&gt;&amp;&quot;" in dot
    assert "n0 -> n1" in dot


def test_two_stages_of_one_name_are_both_drawn() -> None:
    dot = to_dot(declared("g", [stage("a"), stage("a")], []))
    assert dot.count("<B>a</B>") == 2


def test_an_empty_graph_is_drawn() -> None:
    assert "digraph" in to_dot(declared("empty", [], []))


def test_a_thousand_stages_are_drawn() -> None:
    assert to_dot(chain(1000, 7)).count(" -> ") == 999


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (None, ""),
        (Any, ""),
        (int, "int"),
        (Path, "Path"),
        (list[int], "list[int]"),
        (dict[str, list[Path]], "dict[str, list[Path]]"),
        (tuple[int, ...], "tuple[int, ...]"),
        (int | None, "int | None"),
        (Optional[Path], "Path | None"),  # noqa: UP045
        (list[Any], "list[Any]"),
        ("Forward", "Forward"),
    ],
)
def test_item_types_read_like_annotations(item: Any, text: str) -> None:
    assert type_text(item) == text
