"""Pictures of a graph, and the live view of a run. Both read frozen values and statistics; while a view is
drawn on a terminal, a thread of its own reads what is printed.

``draw(graph, "graph.svg")`` writes a picture; :func:`to_dot` and :func:`to_mermaid` give text that needs no
renderer.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from flowchan.viz.dot import to_dot
from flowchan.viz.mermaid import to_mermaid
from flowchan.viz.render import PICTURES, RenderError
from flowchan.viz.render import render as _render

if TYPE_CHECKING:
    from flowchan.declare.blueprint import Blueprint

__all__ = ["FORMATS", "RenderError", "draw", "svg", "to_dot", "to_mermaid"]

FORMATS = (*PICTURES, "dot", "mmd")
"""The suffixes that :func:`draw` knows."""


def svg(blueprint: Blueprint) -> str:
    """The picture of ``blueprint`` as SVG, as notebooks show it. Raises :class:`RenderError`."""
    return _render(to_dot(blueprint), "svg").decode()


def draw(blueprint: Blueprint, path: str | os.PathLike[str]) -> Path:
    """Draw ``blueprint`` into the file ``path`` and return its path. The suffix names the format: .svg, .png
    and .pdf are rendered by Graphviz, .dot and .mmd (Mermaid) are text and need no renderer.

    Raises ``ValueError`` for another suffix, ``OSError`` if the file can't be written, :class:`RenderError`
    if Graphviz is missing or fails.
    """
    path = Path(path)
    suffix = path.suffix[1:].lower()
    if suffix not in FORMATS:
        raise ValueError(
            f"{str(path)!r}: the name must end in one of {', '.join('.' + known for known in FORMATS)}"
        )
    if suffix == "mmd":
        content = to_mermaid(blueprint).encode()
    elif suffix == "dot":
        content = to_dot(blueprint).encode()
    else:
        content = _render(to_dot(blueprint), suffix)
    path.write_bytes(content)
    return path
