"""Live views of a run. They are subscribers of its feed: each gets statistics, and shows what the model makes
of them on a terminal, in a notebook, or by lines."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from flowchan.declare.blueprint import Blueprint
from flowchan.viz.live.model import ProgressView
from flowchan.viz.live.notebook import Notebook, in_notebook
from flowchan.viz.live.terminal import LiveView


def watching(graph: Blueprint) -> AbstractContextManager[ProgressView]:
    """Choose the view that shows how far a run of ``graph`` is. It is open from before the run starts until
    the run has ended: what is printed in between appears above it."""
    return nullcontext(Notebook(graph)) if in_notebook() else LiveView(graph=graph)
