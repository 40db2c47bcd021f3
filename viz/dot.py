"""A graph as DOT text. Text only: :mod:`flowchan.viz.render` makes pictures of it.

Colours are chosen on a light ground that the picture brings along, so it reads the same in a dark viewer.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from flowchan.declare.values import Link, Stage
from flowchan.viz import labels
from flowchan.viz.labels import Picture, Pool, Role

if TYPE_CHECKING:
    from graphviz import Digraph

    from flowchan.declare.blueprint import Blueprint

FONT = "Helvetica,Arial,DejaVu Sans,sans-serif"
GROUND, INK, FAINT = "#fbfcfd", "#1f2933", "#52606d"
BLUE, RED = "#627d98", "#c53030"

# border, fill, shape, style
LOOKS: dict[Role, tuple[str, str, str, str]] = {
    "source": ("#2f855a", "#dcf3e4", "ellipse", "filled"),
    "stage": ("#486581", "#ffffff", "box", "filled,rounded"),
    "sink": ("#6b46c1", "#e9e3f8", "cylinder", "filled"),
    "errors": (RED, "#fde4e4", "box", "filled,rounded,dashed"),
    "result": ("#a17c07", "#fff5c2", "note", "filled"),
    "unread": (RED, "#ffffff", "note", "filled,dashed"),
}
# border, fill, and the legend's words
POOLS: dict[str, tuple[str, str, str]] = {
    "threads": ("#9fb8d6", "#eef4fb", "threads of one process"),
    "processes": ("#dba653", "#fdf2df", "a pool of processes"),
    "hosts": ("#c0627a", "#fbeaee", "processes on other hosts"),
}


LIVE = "{:=^36}"
"""Stands in a live picture where a stage says what it does, by the stage's number."""


def to_dot(blueprint: Blueprint, *, live: bool = False) -> str:
    """The graph as DOT text, ready for ``dot`` or for :func:`flowchan.viz.draw`. Starts no stage and no
    source. ``live``: with room for what each stage does (:mod:`flowchan.viz.live`)."""
    import graphviz

    picture = labels.picture(blueprint)
    dot = graphviz.Digraph(
        name="flowchan",
        graph_attr={
            "rankdir": "LR",
            # rank by the arrows alone, else a box is kept together and arrows run backwards
            "newrank": "true",
            "bgcolor": GROUND,
            "fontname": FONT,
            "fontcolor": INK,
            "label": _legend(picture),
            "labelloc": "t",
            "labeljust": "l",
            "nodesep": "0.35",
            "ranksep": "0.45",
            "pad": "0.3",
        },
        node_attr={
            "fontname": FONT,
            "fontsize": "12",
            "fontcolor": INK,
            "margin": "0.16,0.08",
            "penwidth": "1.3",
        },
        edge_attr={"fontname": FONT, "fontsize": "9", "fontcolor": FAINT, "color": BLUE, "arrowsize": "0.7"},
    )
    for index, pool in enumerate(picture.pools):
        dot.subgraph(_box(picture, index, pool, live))
    for index, (writer, reader, link) in enumerate(picture.arrows):
        if reader is None:
            _loose_end(dot, f"end{index}", picture.stages[writer], link)
        dot.edge(f"n{writer}", f"end{index}" if reader is None else f"n{reader}", **_arrow(link))
    return str(dot.source)


def _box(picture: Picture, index: int, pool: Pool, live: bool) -> Digraph:
    import graphviz

    border, fill, _ = POOLS[labels.looks(pool.place)]
    box = graphviz.Digraph(
        name=f"cluster{index}",
        graph_attr={
            "label": graphviz.escape(pool.title),
            "labelloc": "t",
            "labeljust": "l",
            "fontsize": "10",
            "fontcolor": FAINT,
            "color": border,
            "bgcolor": fill,
            "style": "rounded",
            "margin": "12",
        },
    )
    for number in pool.stages:
        stage = picture.stages[number]
        file, line = labels.place(stage)
        box.node(
            f"n{number}",
            label=_stage_label(stage, LIVE.format(number) if live else ""),
            tooltip=graphviz.escape(f"{stage.name}: {stage.kind}, {file}:{line}"),
            **_look(picture.roles[number]),
        )
    return box


def _look(role: Role) -> dict[str, str]:
    border, fill, shape, style = LOOKS[role]
    look = {"color": border, "fillcolor": fill, "shape": shape, "style": style}
    return look | {"margin": "0.01,0.04"} if shape == "ellipse" else look


def _stage_label(stage: Stage, does: str) -> str:
    workers = labels.workers_text(stage)
    count = f" <B>{workers}</B>" if workers else ""
    name = f"<B>{escape(stage.name)}</B>{count}"
    detail = f'<FONT POINT-SIZE="9" COLOR="{FAINT}">{escape(labels.detail_text(stage))}</FONT>'
    rows = f"<TR><TD>{name}</TD></TR><TR><TD>{detail}</TD></TR>"
    rows += f'<TR><TD><FONT POINT-SIZE="9">{does}</FONT></TD></TR>' if does else ""
    return f'<<TABLE BORDER="0" CELLSPACING="0" CELLPADDING="1">{rows}</TABLE>>'


def _loose_end(dot: Digraph, node: str, writer: Stage, link: Link) -> None:
    import graphviz

    role = labels.end_role(writer)
    words = labels.MEANING[role]
    dot.node(
        node,
        label=f'<<FONT POINT-SIZE="10">{words}</FONT>>',
        tooltip=graphviz.escape(link.name),
        **_look(role),
    )


def _arrow(link: Link) -> dict[str, Any]:
    import graphviz

    item, rest = labels.channel_text(link)
    first = f"<B>{escape(item)}</B><BR/>" if item else ""
    words = (
        # for the room around it
        f'<TABLE BORDER="0" CELLPADDING="3"><TR><TD>{first}{escape(rest)}</TD></TR></TABLE>'
    )
    look = {"label": f"<{words}>", "tooltip": graphviz.escape(link.name)}
    if link.medium.copies:
        look |= {"penwidth": "2.2"}
    if link.feedback:  # it runs against the order of the stages, which it must not pull apart
        look |= {"style": "dashed", "constraint": "false"}
    if link.errors:
        look |= {"color": RED, "fontcolor": RED, "style": "dashed"}
    return look


def _legend(picture: Picture) -> str:
    """The graph's name, and what explains this picture, no more: a row for its boxes and a row for its
    arrows."""
    ends: set[Role] = {
        labels.end_role(picture.stages[writer]) for writer, reader, _ in picture.arrows if reader is None
    }
    used = {*picture.roles, *ends}
    boxes = [_swatch(*LOOKS[role][:2]) + _key(labels.MEANING[role]) for role in LOOKS if role in used]
    boxes += [
        _swatch(*POOLS[on][:2]) + _key(POOLS[on][2])
        for on in POOLS
        if on in {labels.looks(pool.place) for pool in picture.pools}
    ]
    media = {link.medium.name for _, _, link in picture.arrows}
    # These characters are in the small fonts that renderers bring along; dashed and heavy arrows are not.
    arrows = [_line("→", BLUE) + _key("channel between threads")] if "threads" in media else []
    if "processes" in media:
        arrows.append(_line("▬►", BLUE) + _key("channel between processes"))
    if any(link.feedback for _, _, link in picture.arrows):
        arrows.append(_line("← –", BLUE) + _key("feedback"))
    if any(link.errors for _, _, link in picture.arrows):
        arrows.append(_line("– →", RED) + _key("failed items"))
    if arrows:
        arrows.append(_key("beside it: <B>item type</B>, capacity · medium"))
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
