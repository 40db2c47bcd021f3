"""Draw pictures of a graph, and show the progress of a run.

Pictures and live views only read immutable values and statistics. While a live view is open on a terminal, an
additional thread reads the program's output.

``draw(graph, "graph.svg")`` writes a picture; :func:`to_dot` and :func:`to_mermaid` return text that needs no
renderer. :func:`timeline` draws a run from its trace.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from flowchan.viz.dot import to_dot
from flowchan.viz.mermaid import to_mermaid
from flowchan.viz.render import PICTURES, RenderError
from flowchan.viz.render import render as _render
from flowchan.viz.trace_timeline import timeline

if TYPE_CHECKING:
    from flowchan.declare.blueprint import Blueprint

__all__ = ["FORMATS", "RenderError", "draw", "svg", "timeline", "to_dot", "to_mermaid"]

FORMATS = (*PICTURES, "dot", "mmd")
"""File suffixes that :func:`draw` supports."""


def svg(blueprint: Blueprint) -> str:
    """Return the picture of a graph as SVG, as shown in notebooks.

    Args:
        blueprint: Graph to draw.

    Returns:
        The SVG text.

    Raises:
        RenderError: Graphviz is missing or failed.

    Example:
        >>> from flowchan import Graph
        >>> from flowchan.viz import svg
        >>> graph = Graph()
        >>> graph.source(range(3)).sink(print)
        >>> "<svg" in svg(graph)
        True
    """
    return _render(to_dot(blueprint), "svg").decode()


def draw(blueprint: Blueprint, path: str | os.PathLike[str]) -> Path:
    """Draw a graph and write it to a file.

    Args:
        blueprint: Graph to draw.
        path: Path of the file, whose suffix selects the format. Graphviz renders .svg, .png and .pdf; .dot
            and .mmd (Mermaid) are text and need no renderer.

    Returns:
        The path of the file.

    Raises:
        ValueError: The suffix is unknown.
        OSError: The file cannot be written.
        RenderError: Graphviz is missing or failed.

    Example:
        >>> import tempfile
        >>> from flowchan import Graph
        >>> from flowchan.viz import draw
        >>> graph = Graph()
        >>> graph.source(range(3)).sink(print)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     draw(graph, f"{folder}/graph.mmd").name
        'graph.mmd'
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
