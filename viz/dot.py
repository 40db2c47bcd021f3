"""Convert a graph to DOT text, which :mod:`flowchan.viz.render` turns into pictures.

A long graph is broken into rows. An arrow from one row to another is drawn as two separate ends, each
labelled with the stage at the other end.

In an SVG picture, the element of the first declared stage has the id ``s0``, and that of the first channel
``e0``. The second end of a broken arrow has the id of the channel and ``-2``.

The picture has its own light background, so its colours look the same in a dark viewer.
"""

from __future__ import annotations

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

# border colour, shape, style
STYLES: dict[Role, tuple[str, str, str]] = {
    "source": ("#2f855a", "ellipse", "filled"),
    "stage": ("#486581", "box", "filled,rounded"),
    "sink": ("#6b46c1", "cylinder", "filled"),
    "errors": (RED, "box", "filled,rounded,dashed"),
    "result": ("#a17c07", "note", "filled"),
    "unread": (RED, "note", "filled,dashed"),
}
END = "#fff5c2"
# fill colour, text in the legend
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
            dot.edge(f"n{writer}", f"end{index}", id=edge_ids[id(edge)], **_arrow(edge, picture.captions))
        elif picture.rows[writer] == picture.rows[reader]:
            dot.edge(f"n{writer}", f"n{reader}", id=edge_ids[id(edge)], **_arrow(edge, picture.captions))
        else:
            _broken(dot, index, picture, writer, reader, edge, edge_ids[id(edge)])
    _begin_rows(dot, picture)
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


def _broken(
    dot: Digraph, index: int, picture: Picture, writer: int, reader: int, edge: Edge, id: str
) -> None:
    """Draw an arrow between two rows as two ends, each labelled with the stage at the other end."""
    for node, other, arrow in ((f"to{index}", reader, "→ {}"), (f"from{index}", writer, "{} →")):
        words = escape(arrow.format(picture.stages[other].name))
        dot.node(
            node,
            label=f'<<FONT POINT-SIZE="10" COLOR="{FAINT}"><I>{words}</I></FONT>>',
            shape="plaintext",
            margin="0.02,0.02",
        )
    attributes = _arrow(edge, picture.captions) | {"constraint": "true"}
    dot.edge(f"n{writer}", f"to{index}", id=id, **attributes)
    attributes.pop("label", None)
    dot.edge(f"from{index}", f"n{reader}", id=f"{id}-2", **attributes)


def _begin_rows(dot: Digraph, picture: Picture) -> None:
    """Arrange the rows below each other.

    Each row has an invisible point on its left, with an invisible arrow to the row's first nodes.
    """
    rows = max(picture.rows, default=0) + 1
    if rows == 1:
        return
    led = {
        reader
        for writer, reader, edge in picture.arrows
        if reader is not None and picture.rows[writer] == picture.rows[reader] and not edge.feedback
    }
    entered: dict[int, list[str]] = {}
    for index, (writer, reader, _) in enumerate(picture.arrows):
        if reader is not None and picture.rows[writer] != picture.rows[reader]:
            entered.setdefault(reader, []).append(f"from{index}")
    with dot.subgraph() as first:
        first.attr(rank="same")
        for row in range(rows):
            first.node(f"row{row}", label="", shape="point", style="invis", width="0", height="0")
    for row in range(1, rows):
        dot.edge(f"row{row - 1}", f"row{row}", style="invis")
    for number, row in enumerate(picture.rows):
        for node in entered.get(number, () if number in led else [f"n{number}"]):
            dot.edge(f"row{row}", node, style="invis")


def _arrow(edge: Edge, captions: Mapping[str, str]) -> dict[str, Any]:
    import graphviz

    attributes = {"tooltip": graphviz.escape(labels.channel_tooltip(edge))}
    item, rest = labels.channel_text(edge, captions)
    if item or rest:
        lines = "<BR/>".join(filter(None, (item and f"<B>{escape(item)}</B>", escape(rest))))
        # a table adds padding around the text
        attributes["label"] = f'<<TABLE BORDER="0" CELLPADDING="3"><TR><TD>{lines}</TD></TR></TABLE>>'
    if edge.transport.copies:
        attributes |= {"penwidth": "2.2"}
    if edge.feedback:  # it points backwards, and must not influence the layout
        attributes |= {"style": "dashed", "constraint": "false"}
    if edge.errors:
        attributes |= {"color": RED, "fontcolor": RED, "style": "dashed"}
    return attributes


def _legend(picture: Picture) -> str:
    """Return the title and the legend: a row that explains the boxes, and a row that explains the arrows."""
    ends: set[Role] = {
        labels.end_role(picture.stages[writer]) for writer, reader, _ in picture.arrows if reader is None
    }
    used = {*picture.roles, *ends}
    boxes = [
        _swatch(STYLES[role][0], "#ffffff") + _key(labels.MEANING[role]) for role in STYLES if role in used
    ]
    boxes += [
        _swatch(FAINT, GROUNDS[kind][0]) + _key(GROUNDS[kind][1])
        for kind in GROUNDS
        if kind in picture.grounds
    ]
    # Renderers' small fonts contain these characters, but not dashed or heavy arrows.
    arrows = []
    if {edge.transport.copies for _, _, edge in picture.arrows} == {True, False}:
        arrows += [
            _line("→", BLUE) + _key("within the program"),
            _line("▬►", BLUE) + _key("between processes"),
        ]
    if any(edge.feedback for _, _, edge in picture.arrows):
        arrows.append(_line("← –", BLUE) + _key("feedback"))
    if any(edge.errors for _, _, edge in picture.arrows):
        arrows.append(_line("– →", RED) + _key("failed items"))
    title = (
        f'<TR><TD ALIGN="LEFT"><FONT POINT-SIZE="15"><B>{escape(picture.name) or "?"}</B></FONT></TD></TR>'
    )
    return f'<<TABLE BORDER="0" CELLSPACING="0" CELLPADDING="2">{title}{_row(boxes)}{_row(arrows)}</TABLE>>'


def _row(keys: list[str]) -> str:
    if not keys:
        return ""
    cells = f'<TABLE BORDER="0" CELLSPACING="4" CELLPADDING="1"><TR>{"".join(keys)}</TR></TABLE>'
    return f'<TR><TD ALIGN="LEFT">{cells}</TD></TR>'


def _swatch(border: str, fill: str) -> str:
    return f'<TD BORDER="1" COLOR="{border}" BGCOLOR="{fill}" WIDTH="18"></TD>'


def _line(arrow: str, colour: str) -> str:
    return f'<TD><FONT COLOR="{colour}">{arrow}</FONT></TD>'


def _key(words: str) -> str:
    return f'<TD ALIGN="LEFT"><FONT POINT-SIZE="10" COLOR="{FAINT}">{words}</FONT></TD>'
