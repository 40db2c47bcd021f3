"""Render DOT text as a picture with Graphviz.

The first engine that succeeds draws the picture:

- the ``dot`` program, which knows the fonts on this machine;
- graphviz-pure, which is installed with flowchan and needs nothing else;
- the engine in the pygraphviz wheel, which needs system libraries.

Each engine runs in its own process, so that a crash or a warning does not affect the program.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator

from flowchan.errors import FlowchanError
from flowchan.viz.dot import FONT
from flowchan.viz.text_widths import with_widths

PICTURES = ("svg", "png", "pdf")
_LIVE = "=" * 20
"""Part of the placeholders in a live picture, which are replaced by texts later."""
_INSTALL = f"{shlex.quote(sys.executable)} -m pip install graphviz-pure"

_WHEEL = """
import sys, pygraphviz
graph = pygraphviz.AGraph(string=sys.stdin.buffer.read().decode())
sys.stdout.buffer.write(graph.draw(format=sys.argv[1], prog="dot"))
"""


class RenderError(FlowchanError):
    """A picture could not be drawn: Graphviz is missing, or failed on this graph.

    Example:
        >>> from flowchan import Graph
        >>> from flowchan.viz import RenderError, svg
        >>> graph = Graph()
        >>> graph.source(range(3)).sink(print)
        >>> try:
        ...     picture = svg(graph)
        ... except RenderError as error:
        ...     print(f"install Graphviz: {error}")
    """


def render(dot: str, picture: str) -> bytes:
    """Draw a graph with Graphviz.

    Args:
        dot: The graph in Graphviz's language.
        picture: One of the formats in :data:`PICTURES`.

    Returns:
        The contents of the file.

    Raises:
        ValueError: The format is unknown.
        RenderError: Graphviz is missing or failed.
    """
    if picture not in PICTURES:
        raise ValueError(f"render: picture must be one of {', '.join(PICTURES)}, got {picture!r}")
    failures = []
    for engine, command, draw in _engines(picture):
        try:
            drawn = draw(command, dot)
            return with_widths(drawn.decode(), _LIVE).encode() if picture == "svg" else drawn
        except (RenderError, OSError) as error:
            failures.append(f"{engine}: {error}")
    if failures:
        raise RenderError(f"Graphviz failed: {'; '.join(failures)}")
    install = "apt install graphviz" if picture == "pdf" else _INSTALL
    raise RenderError(
        f"no renderer for .{picture} pictures is installed; install one: {install} (.dot and "
        ".mmd need no renderer)"
    )


def _engines(picture: str) -> Iterator[tuple[str, list[str], Callable[[list[str], str], bytes]]]:
    if program := shutil.which("dot"):
        yield "dot", [program, f"-T{picture}"], _run
    folders = [
        os.path.dirname(sys.executable),
        sysconfig.get_path("scripts"),
        os.environ.get("PATH", os.defpath),
    ]
    if picture != "pdf" and (program := shutil.which("graphviz-pure", path=os.pathsep.join(folders))):
        yield "graphviz-pure", [program, f"-T{picture}"], _run_without_fonts
    if importlib.util.find_spec("pygraphviz"):
        # -P stops Python from importing a file in the working directory that has the same name as one of
        # these modules.
        yield "pygraphviz", [sys.executable, "-P", "-c", _WHEEL, picture], _run


def _run(command: list[str], dot: str) -> bytes:
    engine = subprocess.run(command, input=dot.encode(), capture_output=True, check=False)
    if engine.returncode or not engine.stdout:
        captions = engine.stderr.decode(errors="replace").strip().splitlines()
        raise RenderError(f"status {engine.returncode}, {captions[-1] if captions else 'no error output'}")
    return engine.stdout


def _run_without_fonts(command: list[str], dot: str) -> bytes:
    """Draw with a single font instead of a list, because graphviz-pure does not accept lists of fonts."""
    first = FONT.partition(",")[0]
    drawn = _run(command, dot.replace(FONT, first))
    return drawn.replace(f'font-family="{first},sans-Serif"'.encode(), f'font-family="{FONT}"'.encode())
