"""Convert a graph to Mermaid text, which GitHub, GitLab and many editors show as a picture.

Most viewers reject graphs with more than 500 arrows. Draw larger graphs with :func:`flowchan.viz.draw`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from flowchan.declare.values import Edge, Stage
from flowchan.viz import labels
from flowchan.viz.labels import Ground, Role

if TYPE_CHECKING:
    from flowchan.declare.blueprint import Blueprint

# The brackets around a label select the shape. Each class sets the colours of both text and background, so
# dark viewers do not change them.
SHAPES: dict[Role, tuple[str, str]] = {
    "source": ("([", "])"),
    "stage": ("(", ")"),
    "sink": ("[(", ")]"),
    "errors": ("{{", "}}"),
    "server": ("[(", ")]"),
    "result": ("[/", "/]"),
    "unread": ("[/", "/]"),
}
STROKES: dict[Role, str] = {
    "source": "stroke:#2f855a",
    "stage": "stroke:#486581",
    "sink": "stroke:#6b46c1",
    "errors": "stroke:#c53030",
    "server": "stroke:#0f766e",
    "result": "stroke:#a17c07",
    "unread": "stroke:#c53030,stroke-dasharray:4",
}
FILLS: dict[Ground, str] = {"threads": "fill:#eef4fb", "processes": "fill:#fbd99b", "hosts": "fill:#f3bccb"}
ENDS = "fill:#fff5c2"


def to_mermaid(blueprint: Blueprint) -> str:
    """Return the graph as a Mermaid flowchart, without starting any stage or source.

    A graph that fits in one row runs from left to right; a longer graph runs from top to bottom.

    Args:
        blueprint: Graph to convert.

    Returns:
        The text, for Mermaid.

    Example:
        >>> from flowchan import Graph
        >>> from flowchan.viz import to_mermaid
        >>> graph = Graph()
        >>> graph.source(range(3)).sink(print)
        >>> "flowchart LR" in to_mermaid(graph)
        True
    """
    picture = labels.picture(blueprint)
    # Mermaid cannot arrange a graph in rows, and a long graph fits on a page only if drawn vertically.
    direction = "TB" if picture.wraps else "LR"
    lines = ["---", f"title: {json.dumps(picture.name)}", "---", f"flowchart {direction}"]
    classes = {}
    for number, stage in enumerate(picture.stages):
        role, ground = picture.roles[number], labels.ground(stage.placement)
        classes[f"{role}_{ground}"] = f"{FILLS[ground]},{STROKES[role]}"
        lines.append(f"    n{number}{_shaped(role, _words(stage, picture.captions))}:::{role}_{ground}")
    for index, (writer, reader, edge) in enumerate(picture.arrows):
        if reader is None:
            role = labels.end_role(picture.stages[writer])
            words = labels.MEANING[role]
            if role == "result":
                words += f" {labels.result_name(picture.stages[writer])}"
            classes[role] = f"{ENDS},{STROKES[role]}"
            lines.append(f"    out{index}{_shaped(role, words)}:::{role}")
        lines.append(
            f"    n{writer} {_arrow(edge, picture.captions)} "
            f"{f'out{index}' if reader is None else f'n{reader}'}"
        )
    red = [str(index) for index, (_, _, edge) in enumerate(picture.arrows) if edge.errors]
    if red:
        lines.append(f"    linkStyle {','.join(red)} stroke:#c53030")
    lines += [f"    classDef {name} {style},color:#1f2933" for name, style in classes.items()]
    return labels.encodable("\n".join(lines) + "\n")


def _words(stage: Stage, captions: Mapping[str, str]) -> str:
    first = f"{stage.name} {labels.workers_text(stage)}".rstrip()
    return "\n".join(filter(None, (first, labels.option_text(stage), labels.detail_text(stage, captions))))


def _shaped(role: Role, words: str) -> str:
    left, right = SHAPES[role]
    return f"{left}{_quoted(words)}{right}"


def _arrow(edge: Edge, captions: Mapping[str, str]) -> str:
    words = "\n".join(filter(None, labels.channel_text(edge, captions)))
    line = "-.->" if edge.errors or edge.feedback else "==>" if edge.transport.copies else "-->"
    return f"{line}|{_quoted(words)}|" if words else line


def _quoted(words: str) -> str:
    """Return a text in quotes, with special characters replaced by entity codes.

    Otherwise Mermaid, or the Markdown and HTML in its labels, would interpret these characters.
    """
    codes = {character: f"#{ord(character)};" for character in '"#<>&`\\'}
    return '"' + "".join(codes.get(character, character) for character in words).replace("\n", "<br/>") + '"'
