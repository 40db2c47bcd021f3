"""The graph that users write: a declaration that can be checked and run."""

from __future__ import annotations

import pkgutil

from flowchan.check.rules import check
from flowchan.declare.blueprint import Blueprint
from flowchan.errors import FlowchanError, Problem
from flowchan.run.runnable import Runnable
from flowchan.run.worker_pool import WorkerPool


class Graph(Blueprint, Runnable):
    """Stages joined by channels. Declare with :meth:`source`, :meth:`input`, :meth:`stage` and the operators
    of
    the streams they return; then :meth:`run` it, or :meth:`start` it and take part while it runs."""

    def _repr_svg_(self) -> str | None:
        """The picture that a notebook shows; nothing where no picture can be drawn."""
        try:
            return pkgutil.resolve_name("flowchan.viz:svg")(self)  # type: ignore[no-any-return]
        except FlowchanError:
            return None

    def check(self) -> tuple[Problem, ...]:
        """Everything that is wrong with the declaration, with the lines it stands on; empty when nothing is.
        Runs nothing."""
        return check(self)

    def pool(self) -> WorkerPool:
        """Keeps the worker processes from one run to the next: ``with graph.pool() as pool`` run it by
        ``pool.run()`` or ``pool.start()``, as often as you like."""
        return WorkerPool(self)

    def _blueprint(self) -> Blueprint:
        return self
