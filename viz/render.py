"""DOT text → a picture. Graphviz does it: its ``dot`` program where one is installed, else the engine that the
pygraphviz wheel carries. Both run in a process of their own, so that a crash or a warning of theirs stays there."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys

from flowchan.errors import FlowchanError

PICTURES = ("svg", "png", "pdf")

_WHEEL = """
import sys, pygraphviz
graph = pygraphviz.AGraph(string=sys.stdin.buffer.read().decode())
sys.stdout.buffer.write(graph.draw(format=sys.argv[1], prog="dot"))
"""


class RenderError(FlowchanError):
    """No picture could be made: no Graphviz engine is here, or the one that is here failed on this graph."""


def render(dot: str, picture: str) -> bytes:
    """The picture of ``dot`` in one of the formats of :data:`PICTURES`. Raises :class:`RenderError`."""
    if picture not in PICTURES:
        raise ValueError(f"picture={picture!r}: give one of {', '.join(PICTURES)}")
    engine = subprocess.run(_engine(picture), input=dot.encode(), capture_output=True, check=False)
    if engine.returncode or not engine.stdout:
        said = engine.stderr.decode(errors="replace").strip().splitlines()
        raise RenderError(f"Graphviz failed with status {engine.returncode}: {said[-1] if said else 'it said nothing'}")
    return engine.stdout


def _engine(picture: str) -> list[str]:
    program = shutil.which("dot")
    if program:
        return [program, f"-T{picture}"]
    if importlib.util.find_spec("pygraphviz"):
        # -P: a file of the user's named like one of ours must not be imported from the working directory.
        return [sys.executable, "-P", "-c", _WHEEL, picture]
    raise RenderError(
        "no Graphviz here to draw with: install its dot program, or pygraphviz; .dot and .mmd need neither"
    )
