"""Show live views of a run.

A view subscribes to the run's statistics and computes its content from them. The view shows the content on a
terminal, in a notebook, or as lines of text.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from flowchan.declare.blueprint import Blueprint
from flowchan.viz.live.model import ProgressView
from flowchan.viz.live.notebook import Notebook, in_notebook
from flowchan.viz.live.terminal import LiveView


def watching(graph: Blueprint) -> AbstractContextManager[ProgressView]:
    """Return a view that shows the progress of a run of ``graph``.

    The view is open from before the run starts until the run has ended. The program's output appears above
    the view.
    """
    return nullcontext(Notebook(graph)) if in_notebook() else LiveView(graph=graph)
