"""Test that each SVG text has its computed width, so that texts do not overlap in viewers without
Helvetica."""

from __future__ import annotations

import re

import pytest

from flowchan import Graph
from flowchan.viz import svg
from flowchan.viz.text_widths import WIDTHS, width_of, with_widths

TEXT = '<text x="1" font-family="Helvetica,Arial" {}font-size="10.00">{}</text>'


def test_width_is_known_for_every_text_in_a_picture() -> None:
    graph = Graph("widths")
    graph.source([1], name="read & more").map(str, workers=3, name="parse").sink(print)
    texts = re.findall(r"<text [^>]*>", svg(graph))
    assert texts
    assert all("textLength=" in text for text in texts)


def test_width_of_a_name_fits_the_box_of_its_stage() -> None:
    graph = Graph("widths")
    graph.source([1]).map(str, name="a stage with quite a long name WWWW").sink(print)
    nodes = re.findall(r'<g [^>]*class="node">.*?</g>\n(?=<|$)', svg(graph), re.DOTALL)
    (node,) = [node for node in nodes if "quite a long name" in node]
    (length,) = re.findall(r'textLength="([\d.]+)"[^>]*>a stage with quite', node)
    across = [
        float(x) for path in re.findall(r' d="([^"]+)"', node) for x in re.findall(r"(-?[\d.]+),", path)
    ]
    assert 0.8 * (max(across) - min(across)) < float(length) < max(across) - min(across)


def test_width_is_known_for_every_printable_ascii_character() -> None:
    assert all(set(map(chr, range(32, 127))) <= set(widths) for widths in WIDTHS.values())
    assert width_of("Wi", 10, bold=False) == pytest.approx(11.66)
    assert width_of("Wi", 10, bold=True) == pytest.approx(12.22)


@pytest.mark.parametrize(("style", "text"), [("", "\u4e2d"), ("", "====keep===="), ('textLength="3" ', "a")])
def test_placeholder_or_text_of_unknown_width_is_unchanged(style: str, text: str) -> None:
    assert with_widths(TEXT.format(style, text), "====") == TEXT.format(style, text)


def test_html_entities_count_as_one_character() -> None:
    assert 'textLength="6.67"' in with_widths(TEXT.format("", "&amp;"), "====")
