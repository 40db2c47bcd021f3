"""A graph as Mermaid text, which GitHub, GitLab and many editors draw in place.

A limit of theirs, not of the text: most viewers refuse more than 500 arrows. Use a picture for larger graphs.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from flowchan.declare.values import Link, Stage
from flowchan.viz import labels
from flowchan.viz.labels import Picture, Pool, Role

if TYPE_CHECKING:
    from flowchan.declare.blueprint import Blueprint

# What surrounds the label makes the shape. Each class sets the text's colour with the ground's: dark viewers
# keep both.
SHAPES: dict[Role, tuple[str, str]] = {
    "source": ("([", "])"),
    "stage": ("(", ")"),
    "sink": ("[(", ")]"),
    "errors": ("{{", "}}"),
    "result": ("[/", "/]"),
    "unread": ("[/", "/]"),
}
CLASSES: dict[str, str] = {
    "source": "fill:#dcf3e4,stroke:#2f855a,color:#1f2933",
    "stage": "fill:#ffffff,stroke:#486581,color:#1f2933",
    "sink": "fill:#e9e3f8,stroke:#6b46c1,color:#1f2933",
    "errors": "fill:#fde4e4,stroke:#c53030,color:#1f2933",
    "result": "fill:#fff5c2,stroke:#a17c07,color:#1f2933",
    "unread": "fill:#ffffff,stroke:#c53030,color:#1f2933,stroke-dasharray:4",
    "threads": "fill:#eef4fb,stroke:#9fb8d6,color:#52606d",
    "processes": "fill:#fdf2df,stroke:#dba653,color:#52606d",
    "hosts": "fill:#fbeaee,stroke:#c0627a,color:#52606d",
}


def to_mermaid(blueprint: Blueprint) -> str:
    """The graph as a Mermaid flowchart, from left to right. Starts no stage and no source."""
    picture = labels.picture(blueprint)
    lines = ["---", f"title: {json.dumps(picture.name)}", "---", "flowchart LR"]
    for index, pool in enumerate(picture.pools):
        lines += _box(picture, index, pool)
    for index, (writer, reader, link) in enumerate(picture.arrows):
        if reader is None:
            role = labels.end_role(picture.stages[writer])
            lines.append(f"    out{index}{_shaped(role, labels.MEANING[role])}")
        lines.append(f"    n{writer} {_arrow(link)} {f'out{index}' if reader is None else f'n{reader}'}")
    red = [str(index) for index, (_, _, link) in enumerate(picture.arrows) if link.errors]
    if red:
        lines.append(f"    linkStyle {','.join(red)} stroke:#c53030")
    lines += [f"    classDef {name} {style}" for name, style in CLASSES.items()]
    return "\n".join(lines) + "\n"


def _box(picture: Picture, index: int, pool: Pool) -> list[str]:
    nodes = [
        f"        n{number}{_shaped(picture.roles[number], _words(picture.stages[number]))}"
        for number in pool.stages
    ]
    look = labels.looks(pool.place)
    return [
        f"    subgraph pool{index}[{_quoted(pool.title)}]",
        *nodes,
        "    end",
        f"    class pool{index} {look}",
    ]


def _words(stage: Stage) -> str:
    workers = labels.workers_text(stage)
    return f"{stage.name} {workers}".rstrip() + f"\n{labels.detail_text(stage)}"


def _shaped(role: Role, words: str) -> str:
    left, right = SHAPES[role]
    return f"{left}{_quoted(words)}{right}:::{role}"


def _arrow(link: Link) -> str:
    words = _quoted("\n".join(filter(None, labels.channel_text(link))))
    line = "-.->" if link.errors or link.feedback else "==>" if link.medium.copies else "-->"
    return f"{line}|{words}|"


def _quoted(words: str) -> str:
    """In quotes, with entity codes for what Mermaid, or the Markdown and HTML in its labels, would read as
    its own."""
    codes = {character: f"#{ord(character)};" for character in '"#<>&`\\'}
    return '"' + "".join(codes.get(character, character) for character in words).replace("\n", "<br/>") + '"'
