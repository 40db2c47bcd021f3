"""Define the graph that users declare, check and run."""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING

from flowchan.check.rules import check, duplicates
from flowchan.declare.blueprint import Blueprint
from flowchan.declare.networkx_graph import to_networkx
from flowchan.errors import FlowchanError, GraphError, Problem
from flowchan.public import public
from flowchan.run.runnable import Runnable
from flowchan.run.worker_pool import WorkerPool

if TYPE_CHECKING:
    import networkx


@public
class Graph(Blueprint, Runnable):
    """Graph of stages that are connected by channels.

    Declare the graph with :meth:`source`, :meth:`input`, :meth:`stage` and the operators of the streams that
    these methods return. Then call :meth:`run`. To interact with the running graph, call :meth:`start`
    instead.

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
        """Return an SVG picture for notebooks, or ``None`` if it cannot be drawn."""
        try:
            return pkgutil.resolve_name("flowchan.viz:svg")(self)  # type: ignore[no-any-return]
        except FlowchanError:
            return None

    def check(self) -> tuple[Problem, ...]:
        """Check the declaration without running anything.

        Returns:
            All problems, each with source lines of the declaration; empty if the graph is valid.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> numbers = graph.source(range(3))
            >>> [problem.rule for problem in graph.check()]
            ['unread']
        """
        return check(self)

    def to_networkx(self) -> networkx.MultiDiGraph:
        """Return the declared graph as a ``networkx.MultiDiGraph``, without running anything.

        Each stage is a node with its name as the key. The attributes of a node are ``operator``, ``workers``,
        ``placement`` and ``where``, the line of the declaration. Each channel between two stages is an edge
        with the channel's name as the key. Edges have the attributes ``name``, ``transport``, ``capacity``,
        ``item`` (the annotated type, or an empty string), ``feedback``, ``errors``, ``writer_port`` and
        ``reader_port``. All attributes are strings, ints or bools. A channel without a reader has no edge.

        Returns:
            A new graph. Changing it does not affect this graph.

        Raises:
            GraphError: Several stages or channels have the same name.

        Example:
            >>> import networkx
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> graph.source(["a", "bb"], name="words").map(len, capacity=8).sink(print)
            >>> joined = graph.to_networkx()
            >>> networkx.dag_longest_path(joined)
            ['words', 'len', 'print']
            >>> joined.edges["len", "print", "len"]["capacity"]
            8
        """
        problems = [problem for _, problem in duplicates(self, self.stages)]
        if problems:
            raise GraphError(self.name, problems)
        return to_networkx(self)

    def pool(self) -> WorkerPool:
        """Create a pool that keeps worker processes from one run to the next.

        Returns:
            The pool. Enter it with ``with graph.pool() as pool``, and call ``pool.run()`` or ``pool.start()``
            any number of times.

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
