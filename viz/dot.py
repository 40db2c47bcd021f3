"""Convert a graph to DOT text, which :mod:`flowchan.viz.render` turns into pictures.

A long graph is arranged in rows that run alternately to the right and to the left (see
:mod:`flowchan.viz.wrapping`). Graphviz lays out arrows from left to right. Arrows to the left are therefore
declared from reader to writer, with ``dir=back``.

In an SVG picture, the elements of the stages have the IDs ``s0``, ``s1`` and so on, in the order of
declaration. The elements of the channels have the IDs ``e0``, ``e1`` and so on.

The picture has its own light background, so that its colours look the same in a dark viewer.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from flowchan.declare.values import Edge, Stage
from flowchan.viz import labels
from flowchan.viz.labels import Ground, Picture, Role

if TYPE_CHECKING:
    from graphviz import Digraph

    from flowchan.declare.blueprint import Blueprint

FONT = "Helvetica,Arial,DejaVu Sans,sans-serif"
GROUND, INK, FAINT = "#fbfcfd", "#1f2933", "#52606d"
BLUE, RED = "#627d98", "#c53030"

# Border colour, shape and style of each role.
STYLES: dict[Role, tuple[str, str, str]] = {
    "source": ("#2f855a", "ellipse", "filled"),
    "stage": ("#486581", "box", "filled,rounded"),
    "sink": ("#6b46c1", "cylinder", "filled"),
    "errors": (RED, "box", "filled,rounded,dashed"),
    "server": ("#0f766e", "cylinder", "filled"),
    "result": ("#a17c07", "note", "filled"),
    "unread": (RED, "note", "filled,dashed"),
}
END = "#fff5c2"
# Fill colour of each background, and its text in the legend.
GROUNDS: dict[Ground, tuple[str, str]] = {
    "threads": ("#eef4fb", "on threads"),
    "processes": ("#fbd99b", "in processes"),
    "hosts": ("#f3bccb", "on other hosts"),
}


LIVE = "{:=^36}"
"""Placeholder in a live picture for a stage's activity, formatted with the stage's number."""


def to_dot(blueprint: Blueprint, *, live: bool = False) -> str:
    """Return the graph as DOT text, without starting any stage or source.

    Args:
        blueprint: Graph to convert.
        live: True to leave room for the activity of each stage, for :mod:`flowchan.viz.live` (default:
            False).

    Returns:
        The text, for Graphviz.

    Example:
        >>> from flowchan import Graph
        >>> from flowchan.viz import to_dot
        >>> graph = Graph()
        >>> graph.source(range(3)).sink(print)
        >>> print(to_dot(graph).splitlines()[0])
        digraph flowchan {
    """
    import graphviz

    picture = labels.picture(blueprint)
    edge_ids = {id(edge): f"e{number}" for number, edge in enumerate(blueprint.edges)}
    dot = graphviz.Digraph(
        name="flowchan",
        graph_attr={
            "rankdir": "LR",
            "bgcolor": GROUND,
            "fontname": FONT,
            "fontcolor": INK,
            "label": _legend(picture),
            "labelloc": "t",
            "labeljust": "l",
            "nodesep": "0.3",
            "ranksep": "0.35",
            "pad": "0.3",
        },
        node_attr={
            "fontname": FONT,
            "fontsize": "12",
            "fontcolor": INK,
            "margin": "0.14,0.06",
            "penwidth": "1.3",
        },
        edge_attr={"fontname": FONT, "fontsize": "9", "fontcolor": FAINT, "color": BLUE, "arrowsize": "0.7"},
    )
    for number, stage in enumerate(picture.stages):
        index = blueprint.stages.index(stage)
        _node(dot, number, stage, picture, f"s{index}", LIVE.format(index) if live else "")
    for index, (writer, reader, edge) in enumerate(picture.arrows):
        if reader is None:
            _loose_end(dot, f"end{index}", picture.stages[writer], edge)
        head = f"end{index}" if reader is None else f"n{reader}"
        attributes = _arrow(edge, picture, _is_vertical(picture, writer, reader))
        attributes["id"] = edge_ids[id(edge)]
        _join(dot, f"n{writer}", head, _points_back(picture, writer, reader), attributes)
    if picture.wraps:
        _align_columns(dot, picture)
    return labels.encodable(dot.source)


def _node(dot: Digraph, number: int, stage: Stage, picture: Picture, id: str, does: str) -> None:
    import graphviz

    file, line = labels.place(stage)
    dot.node(
        f"n{number}",
        id=id,
        label=_stage_label(stage, picture.captions, does),
        tooltip=graphviz.escape(f"{stage.name}: {stage.kind}, {labels.relative(file)}:{line}"),
        **_style_of(picture.roles[number], GROUNDS[labels.ground(stage.placement)][0]),
    )


def _style_of(role: Role, fill: str) -> dict[str, str]:
    border, shape, style = STYLES[role]
    attributes = {"color": border, "fillcolor": fill, "shape": shape, "style": style}
    return attributes | {"margin": "0.01,0.04"} if shape == "ellipse" else attributes


def _stage_label(stage: Stage, captions: Mapping[str, str], does: str) -> str:
    workers, options = labels.workers_text(stage), labels.option_text(stage)
    count = f" <B>{workers}</B>" if workers else ""
    rows = [f"<B>{escape(stage.name)}</B>{count}"]
    if options:
        rows.append(f'<FONT POINT-SIZE="10">{escape(options)}</FONT>')
    detail = escape(labels.detail_text(stage, captions)).replace("\n", "<BR/>")
    rows.append(f'<FONT POINT-SIZE="9" COLOR="{FAINT}">{detail}</FONT>')
    if does:
        rows.append(f'<FONT POINT-SIZE="9">{does}</FONT>')
    cells = "".join(f"<TR><TD>{row}</TD></TR>" for row in rows)
    return f'<<TABLE BORDER="0" CELLSPACING="0" CELLPADDING="1">{cells}</TABLE>>'


def _loose_end(dot: Digraph, node: str, writer: Stage, edge: Edge) -> None:
    import graphviz

    role = labels.end_role(writer)
    words = labels.MEANING[role]
    if role == "result":
        words = f"{words} <B>{escape(labels.result_name(writer))}</B>"
    dot.node(
        node,
        label=f'<<FONT POINT-SIZE="10">{words}</FONT>>',
        tooltip=graphviz.escape(edge.name),
        **_style_of(role, END if role == "result" else "#ffffff"),
    )


def _is_vertical(picture: Picture, writer: int, reader: int | None) -> bool:
    """Return whether an arrow connects two stages in the same column."""
    return picture.wraps and reader is not None and picture.places[writer][1] == picture.places[reader][1]


def _points_back(picture: Picture, writer: int, reader: int | None) -> bool:
    """Return whether an arrow points left, or up within a column."""
    if not picture.wraps:
        return False
    row, column = picture.places[writer]
    if reader is None:
        return row % 2 == 1
    row_to, column_to = picture.places[reader]
    return (column_to, row_to) < (column, row)


def _join(dot: Digraph, tail: str, head: str, back: bool, attributes: dict[str, Any]) -> None:
    if back:
        dot.edge(head, tail, **attributes, dir="back")
    else:
        dot.edge(tail, head, **attributes)


def _align_columns(dot: Digraph, picture: Picture) -> None:
    """Align the stages of each column, and keep their order with invisible arrows."""
    joined = {(writer, reader) for writer, reader, _ in picture.arrows}
    for column in range(1 + max(column for _, column in picture.places)):
        own = sorted((row, number) for number, (row, place) in enumerate(picture.places) if place == column)
        with dot.subgraph() as aligned:
            aligned.attr(rank="same")
            for _, number in own:
                aligned.node(f"n{number}")
        for (row, number), (row_below, number_below) in itertools.pairwise(own):
            if row_below > row and (number, number_below) not in joined:
                dot.edge(f"n{number}", f"n{number_below}", style="invis")


def _arrow(edge: Edge, picture: Picture, vertical: bool) -> dict[str, Any]:
    import graphviz

    attributes = {"tooltip": graphviz.escape(labels.channel_tooltip(edge))}
    item, rest = labels.channel_text(edge, picture.captions)
    if item or rest:
        lines = "<BR/>".join(filter(None, (item and f"<B>{escape(item)}</B>", escape(rest))))
        # Use a table, because it adds padding around the text.
        cells = f"<TD>{lines}</TD>"
        if vertical:
            # Graphviz centres the label on a vertical arrow, so an empty cell moves the text to the right of
            # the arrow.
            widest = max(labels.text_width(item, 9.0, bold=True), labels.text_width(rest, 9.0))
            cells = f'<TD WIDTH="{widest + 40:.0f}"></TD>{cells}'
        attributes["label"] = f'<<TABLE BORDER="0" CELLPADDING="3"><TR>{cells}</TR></TABLE>>'
    if edge.transport.copies:
        attributes |= {"penwidth": "2.2"}
    if edge.feedback:
        attributes |= {"style": "dashed"}
        if not picture.wraps:  # an arrow that points back must not affect the layout
            attributes |= {"constraint": "false"}
    elif picture.wraps:  # otherwise, the invisible arrows between rows would bend the rows
        attributes |= {"weight": "20"}
    if edge.errors:
        attributes |= {"color": RED, "fontcolor": RED, "style": "dashed"}
    return attributes


def _legend(picture: Picture) -> str:
    """Return the title, followed by rows that explain the boxes and arrows in use."""
    ends: set[Role] = {
        labels.end_role(picture.stages[writer]) for writer, reader, _ in picture.arrows if reader is None
    }
    used = {*picture.roles, *ends} - {"stage"}
    boxes = [_swatch(STYLES[role][0], "#ffffff", labels.MEANING[role]) for role in STYLES if role in used]
    boxes += [_swatch(FAINT, *GROUNDS[kind]) for kind in GROUNDS if kind in picture.grounds]
    # Use only characters that the small fonts of renderers contain. These fonts lack dashed and heavy arrows.
    arrows = []
    if {edge.transport.copies for _, _, edge in picture.arrows} == {True, False}:
        arrows += [_line("→", BLUE, "within the program"), _line("▬►", BLUE, "between processes")]
    if any(edge.feedback for _, _, edge in picture.arrows):
        arrows.append(_line("← –", BLUE, "feedback"))
    if any(edge.errors for _, _, edge in picture.arrows):
        arrows.append(_line("– →", RED, "failed items"))
    title = f'<FONT POINT-SIZE="15"><B>{escape(picture.name) or "?"}</B></FONT>'
    return (
        '<<TABLE BORDER="0" CELLSPACING="0" CELLPADDING="3">'
        f'<TR><TD ALIGN="LEFT" COLSPAN="{3 * KEYS_PER_ROW}">{title}</TD></TR>'
        f"{_rows(boxes)}{_rows(arrows)}</TABLE>>"
    )


def _rows(keys: list[str]) -> str:
    firsts = range(0, len(keys), KEYS_PER_ROW)
    return "".join(f"<TR>{SPACE.join(keys[first : first + KEYS_PER_ROW])}</TR>" for first in firsts)


KEYS_PER_ROW = 5
"""Number of entries in each row of the legend. An entry takes two columns, followed by an empty column."""
SPACE = '<TD WIDTH="10"></TD>'


def _swatch(border: str, fill: str, words: str) -> str:
    box = (
        f'<TABLE BORDER="1" CELLBORDER="0" CELLSPACING="0" CELLPADDING="0" COLOR="{border}" '
        f'BGCOLOR="{fill}" FIXEDSIZE="TRUE" WIDTH="14" HEIGHT="9"><TR><TD></TD></TR></TABLE>'
    )
    return f"<TD>{box}</TD>{_key(words)}"


def _line(arrow: str, colour: str, words: str) -> str:
    return f'<TD><FONT POINT-SIZE="9" COLOR="{colour}">{arrow}</FONT></TD>{_key(words)}'


def _key(words: str) -> str:
    return f'<TD ALIGN="LEFT"><FONT POINT-SIZE="9" COLOR="{FAINT}">{words}</FONT></TD>'
