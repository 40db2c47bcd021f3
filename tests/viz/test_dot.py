"""Test that the DOT text contains everything that a picture should show."""

from __future__ import annotations

import functools
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import pytest
from picture_graphs import HERE, Declared, chain, declared, edge, leading_back, stage, wordcount

from flowchan import Graph, auto
from flowchan.declare.operators import OPERATORS
from flowchan.errors import Where
from flowchan.hosts import local
from flowchan.viz import to_dot, to_mermaid
from flowchan.viz.labels import option_text, place, result_name, type_text, workers_text

DOT = to_dot(wordcount())


def node(name: str, dot: str = DOT) -> str:
    return next(line for line in dot.splitlines() if f"<B>{name}</B>" in line and "shape=" in line)


def arrow(name: str, dot: str = DOT) -> list[str]:
    return [line for line in dot.splitlines() if "->" in line and f"tooltip={name}" in line.replace('"', "")]


def test_dot_is_laid_out_from_left_to_right() -> None:
    assert "rankdir=LR" in DOT


def test_stage_shows_name_workers_and_source_line() -> None:
    assert "×2" in node("counts")
    assert "×" not in node("files")
    graphs = Path(__file__).with_name("picture_graphs.py")
    line = 1 + graphs.read_text().splitlines().index("def explode(*_: object) -> None:")
    assert f"picture_graphs.py:{line}" in node("counts")


def test_source_path_below_the_working_directory_is_relative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    assert "map · picture_graphs.py:" in node("counts", to_dot(wordcount()))


def test_native_function_shows_where_the_stage_was_declared() -> None:
    assert place(stage("print", function=print)) == (str(Path(__file__).with_name("picture_graphs.py")), 1)


async def waits(item: int) -> int:
    return item


class Model:
    def __init__(self) -> None: ...

    def __call__(self, item: int) -> int:
        return item


@pytest.mark.parametrize("function", [Model, functools.partial(Model), Model(), functools.partial(node, "x")])
def test_source_location_is_found_for_every_kind_of_callable(function: Any) -> None:
    file, line = place(stage("any", function=function))
    assert os.path.basename(file) == "test_dot.py"
    assert line > 1


@pytest.mark.parametrize("function", [Path.rglob, json.loads, functools.partial(Path.rglob)])
def test_library_function_shows_the_users_own_line(function: Any) -> None:
    assert place(stage("any", "source", function=function)) == (HERE.file, HERE.line)


@pytest.mark.parametrize(("limit", "text"), [(auto(), "auto"), (auto(most=8), "auto ≤ 8")])
def test_stage_label_shows_auto_workers_and_their_limit(limit: Any, text: str) -> None:
    chosen = replace(stage("chosen"), auto=limit)
    assert workers_text(chosen) == text
    assert text in to_dot(declared("g", [stage("files", "source"), chosen], [edge("files", "chosen")]))
    assert text in to_mermaid(declared("g", [stage("files", "source"), chosen], [edge("files", "chosen")]))


def test_colour_of_a_stage_shows_its_placement() -> None:
    fills = {
        name: re.search(r'fillcolor="(#\w+)"', node(name)).group(1) for name in ("files", "counts", "total")
    }
    assert fills["files"] == fills["total"] != fills["counts"]


def test_channel_shows_item_type_and_unusual_settings() -> None:
    (files,) = arrow("files")
    assert "<B>Path</B>" in files
    assert "64" not in files.partition("tooltip=")[0]
    assert "capacity 64, processes" in files
    assert "label" not in arrow("total")[1]
    small = replace(edge("files", "counts"), capacity=8)
    (label,) = arrow("files", to_dot(declared("g", [stage("files", "source"), stage("counts")], [small])))
    assert ">capacity 8<" in label


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"operator": OPERATORS["batch"], "options": {"size": 32, "timeout": None}}, "32 items"),
        ({"operator": OPERATORS["batch"], "options": {"size": 32, "timeout": 0.5}}, "32 items or 0.5 s"),
        ({"operator": OPERATORS["take"], "options": {"n": 1_000}}, "1,000 items"),
        ({"retries": 2}, "2 retries"),
        ({"timeout": 5.0}, "5 s each"),
        ({"rate": 2.5}, "at most 2.5/s"),
        ({"workers": 4, "ordered": False}, "unordered"),
        ({"auto": auto(most=4), "ordered": False}, "unordered"),
        ({"auto": auto(most=1), "ordered": False}, ""),
        ({"function": waits}, "async"),
        ({"gpus": 1}, "1 GPU each"),
        ({"gpus": 0.5}, "0.5 GPU each"),
        ({"placement": local(2)}, "2 hosts: local-1, local-2"),
        ({}, ""),
    ],
)
def test_stage_shows_its_unusual_settings(options: dict[str, Any], words: str) -> None:
    assert option_text(replace(stage("any"), **options)) == words


def test_long_graph_wraps_into_rows_and_keeps_every_arrow() -> None:
    dot = to_dot(chain(15, 7))
    arrows = [line for line in dot.splitlines() if " -> " in line and "invis" not in line]
    assert len(arrows) == 14
    assert dot.count("rank=same") == 5  # 15 stages make 3 rows of 5
    turned = [line.split()[:3] for line in arrows if "dir=back" in line]
    assert turned == [[f"n{reader}", "->", f"n{reader - 1}"] for reader in range(6, 10)]
    assert "rank=same" not in to_dot(chain(6, 7))


def test_rows_of_a_long_graph_are_in_order() -> None:
    """Invisible arrows keep the rows in order where the graph's arrows do not."""
    lines = [line.split() for line in to_dot(chain(15, 7)).splitlines() if "invis" in line]
    order = [(one, other) for one, arrow, other, *_ in lines if arrow == "->"]
    assert order == [
        ("n0", "n9"),
        ("n1", "n8"),
        ("n8", "n11"),
        ("n2", "n7"),
        ("n7", "n12"),
        ("n3", "n6"),
        ("n6", "n13"),
        ("n5", "n14"),
    ]


def test_result_is_named_after_its_variable(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("total = (\n    numbers\n    .reduce(add)\n)\nx.y = numbers.collect()\n")
    for line, name in ((3, "total"), (5, "any")):
        assert result_name(replace(stage("any"), where=Where(str(file), line))) == name


def test_graph_can_relabel_or_hide_stages() -> None:
    edges = [edge("a", "b"), edge("b", "c")]
    graph = Declared("g", (stage("a"), stage("b"), stage("c")), tuple(edges), {"a": "Linear", "c": None})
    dot = to_dot(graph)  # type: ignore[arg-type]
    assert ">Linear<" in dot
    assert dot.count(" -> ") == 1


def test_sources_sinks_results_and_errors_look_different_from_stages() -> None:

    looks = {
        re.search(r"shape=\w+ style=\S+", node(name)).group() for name in ("files", "total", "report", "save")
    }
    result = next(line for line in DOT.splitlines() if "end3 [" in line)
    assert "<B>total</B>" in result
    assert len(looks) == 4
    assert "shape=note" in result
    (errors,) = arrow("counts.errors")
    assert "dashed" in errors


def test_feedback_is_dashed_and_does_not_constrain_ranks() -> None:
    dot = to_dot(leading_back())
    (back,) = arrow("worker", dot)
    assert "style=dashed" in back
    assert "constraint=false" in back
    assert dot.count("constraint=false") == dot.count("style=dashed") == 1
    assert ">feedback<" in dot
    assert ">feedback<" not in DOT


def test_only_reduce_and_collect_make_an_unread_channel_a_result() -> None:
    dot = to_dot(declared("g", [stage("a"), stage("b", "collect")], [edge("a", None), edge("b", None)]))
    assert "not read" in dot.split("end0 [")[1].split("end1 [")[0]
    assert "result" in dot.split("end1 [")[1]


def test_legend_explains_only_drawn_elements() -> None:
    legend = next(line for line in DOT.splitlines() if line.strip().startswith("graph ["))
    for words in (
        "source",
        "sink",
        "takes failed items",
        "result",
        "on threads",
        "in processes",
    ):
        assert words in legend
    assert ">stage<" not in legend
    only = to_dot(declared("g", [stage("a")], []))
    assert "in processes" not in only
    assert "failed items" not in only


def test_picture_has_an_opaque_background() -> None:
    assert re.search(r'bgcolor="#f\w+"', DOT)


def test_markup_and_unicode_in_names_are_escaped() -> None:
    name = '<b>&"\\N →é'
    dot = to_dot(declared(name, [stage(name), stage("b:c")], [edge(name, "b:c")]))
    assert "<B>&lt;b&gt;&amp;&quot;" in dot
    assert "n0 -> n1" in dot


def test_two_stages_with_equal_names_are_both_drawn() -> None:
    dot = to_dot(declared("g", [stage("a"), stage("a")], []))
    assert dot.count("<B>a</B>") == 2


def test_an_empty_graph_is_drawn() -> None:
    assert "digraph" in to_dot(declared("empty", [], []))


def test_a_thousand_stages_are_drawn() -> None:
    dot = to_dot(chain(1000, 7))
    assert all(f"<B>s{number}</B>" in dot for number in range(1000))


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
def test_item_types_are_written_like_annotations(item: Any, text: str) -> None:
    assert type_text(item) == text


def test_lone_surrogate_in_a_name_is_drawn_as_replacement_character() -> None:
    graph = Graph("file \udcff")
    graph.source([1], name="read \udcff").sink(print)
    for text in (to_dot(graph), to_mermaid(graph)):
        assert "read \ufffd" in text
        text.encode()
