"""Live views of a run.

A view subscribes to the run's feed of statistics. It shows the model of these on a terminal, in a notebook,
or as lines.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from flowchan.declare.blueprint import Blueprint
from flowchan.viz.live.model import ProgressView
from flowchan.viz.live.notebook import Notebook, in_notebook
from flowchan.viz.live.terminal import LiveView


def watching(graph: Blueprint) -> AbstractContextManager[ProgressView]:
    """Choose the view that shows the progress of a run of ``graph``.

    The view is open from before the start of the run to its end. Output of the program appears above the
    view.
    """
    return nullcontext(Notebook(graph)) if in_notebook() else LiveView(graph=graph)
