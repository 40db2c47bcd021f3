"""Graph that users declare, check and run."""

from __future__ import annotations

import pkgutil

from flowchan.check.rules import check
from flowchan.declare.blueprint import Blueprint
from flowchan.errors import FlowchanError, Problem
from flowchan.run.runnable import Runnable
from flowchan.run.worker_pool import WorkerPool


class Graph(Blueprint, Runnable):
    """Graph of stages that are connected by channels.

    Declare the graph with :meth:`source`, :meth:`input`, :meth:`stage` and the operators of the streams that
    they return. Then call :meth:`run`, or :meth:`start` to interact with it while it runs.

    Args:
        name: Name of the graph in reports, pictures and errors (default: ``"graph"``).

    Raises:
        TypeError: ``name`` is not a string, or an argument has an unknown name.

    Example:
        >>> from flowchan import Graph
        >>> graph = Graph("squares")
        >>> squares = graph.source(range(3)).map(lambda n: n * n).collect()
        >>> graph.check()
        ()
        >>> graph.run()[squares]
        [0, 1, 4]
    """

    def _repr_svg_(self) -> str | None:
        """Return a picture for notebooks as SVG, or ``None`` if it cannot be drawn."""
        try:
            return pkgutil.resolve_name("flowchan.viz:svg")(self)  # type: ignore[no-any-return]
        except FlowchanError:
            return None

    def check(self) -> tuple[Problem, ...]:
        """Check the declaration without running anything.

        Returns:
            All problems, each with the source lines of the declaration; empty if the graph is valid.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> numbers = graph.source(range(3))
            >>> [problem.rule for problem in graph.check()]
            ['unread']
        """
        return check(self)

    def pool(self) -> WorkerPool:
        """Create a pool that keeps the worker processes from one run to the next.

        Returns:
            The pool. Enter it with ``with graph.pool() as pool``, then call ``pool.run()`` or
            ``pool.start()`` any number of times.

        Example:
            >>> import os
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> pids = graph.source(range(1)).map(lambda _: os.getpid(), on="process").collect()
            >>> with graph.pool() as pool:
            ...     pool.run()[pids] == pool.run()[pids]
            True
        """
        return WorkerPool(self)

    def _blueprint(self) -> Blueprint:
        return self
