"""Base class of everything that can be run: a graph, and a pool for a graph."""

from __future__ import annotations

import contextlib
import os
import pkgutil
from abc import ABC, abstractmethod
from typing import Any

from flowchan.check.rules import raise_for
from flowchan.declare.blueprint import Blueprint
from flowchan.errors import Interrupted
from flowchan.items.arguments import flag, refuses_misspelt, whole
from flowchan.items.tracebacks import methods_end_at_caller
from flowchan.run.crew.main_guard import leave_if_unguarded
from flowchan.run.crew.memory import budget
from flowchan.run.policy.plan import Plan, plan
from flowchan.run.results import Results
from flowchan.run.run import Run
from flowchan.transport.interrupts import (
    DeferralBlock,
    interrupts_deferred,
    signal_of,
    terminate_as_interrupt,
)

SHOWN_EVERY_S = 0.1
"""Seconds between two updates of the progress display."""


@methods_end_at_caller
class Runnable(ABC):
    """Object whose graph can be started and run."""

    @abstractmethod
    def _blueprint(self) -> Blueprint: ...

    def _begin(self, plan: Plan) -> Run:
        return Run(plan)

    def _watching(self) -> contextlib.AbstractContextManager[Any]:
        """Return the progress display. It is looked up here, because its module imports this package."""
        watching = pkgutil.resolve_name("flowchan.viz.live:watching")
        return watching(self._blueprint())  # type: ignore[no-any-return]

    @refuses_misspelt("start")
    def start(self, *, seed: int | None = None, memory: int | None = None) -> Run:
        """Check the graph and start it.

        Args:
            seed: Random seed for all workers, at least 0. Workers in runs with equal seeds draw equal random
                numbers. The default is a new seed, which the report shows.
            memory: Maximum number of bytes in all channels together; each channel gets the same share. The
                default is half of the memory of the machine or of the process's control group.

        Returns:
            The running graph.

        Raises:
            GraphError: The graph is not valid; the error lists all problems.
            OSError: There is not enough memory for the channels.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> squares = graph.source(range(3)).map(lambda n: n * n).collect()
            >>> with graph.start() as run:
            ...     list(run.iter(squares))
            [0, 1, 4]
        """
        graph = self._blueprint()
        chosen = int.from_bytes(os.urandom(6)) if seed is None else whole("run", "seed", seed, 0)
        leave_if_unguarded(graph)
        raise_for(graph)
        with terminate_as_interrupt():
            return self._start(graph, chosen, memory)

    def _start(self, graph: Blueprint, seed: int, memory: int | None) -> Run:
        run, deferral = None, DeferralBlock()
        try:
            with interrupts_deferred() as deferral:
                most = budget() if memory is None else whole("run", "memory", memory, 1)
                run = self._begin(plan(graph, seed, most))
                graph._started.update(stage.name for stage in graph.stages)
        except KeyboardInterrupt as interrupt:
            if run is not None:
                run._interruption.end(signal_of(interrupt), again=deferral.deferred > 1)
            raise
        return run

    @refuses_misspelt("run")
    def run(self, *, seed: int | None = None, memory: int | None = None, progress: bool = False) -> Results:
        """Run the graph until it has ended, and return its results.

        The first Ctrl-C or SIGTERM stops the sources and lets the stages finish the items in flight. The
        second one aborts the run.

        Args:
            seed: Random seed for all workers; see :meth:`start`.
            memory: Maximum number of bytes in all channels; see :meth:`start`.
            progress: Whether to show the progress on a terminal, in a notebook or as plain lines. If the
                source has a length, this includes totals and the remaining time.

        Returns:
            The results by stream.

        Raises:
            GraphError: The graph is not valid; nothing was started.
            RunError: A stage failed.
            Interrupted: Ctrl-C or SIGTERM ended the run. The exception is a ``KeyboardInterrupt`` with the
                finished results.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph("squares")
            >>> squares = graph.source(range(3)).map(lambda n: n * n).collect()
            >>> graph.run()[squares]
            [0, 1, 4]
        """
        flag("run", "progress", progress)
        graph = self._blueprint()
        leave_if_unguarded(graph)  # before the progress is displayed
        with (
            terminate_as_interrupt(),
            self._watching() if progress else contextlib.nullcontext() as view,
            contextlib.ExitStack() as subscription,
        ):
            run, deferral = None, DeferralBlock()
            try:
                with interrupts_deferred() as deferral:
                    run = self.start(seed=seed, memory=memory)
                    for out in run._ports.inputs.values():
                        out.close()  # the caller does not get the handle, so no items can be put
                    if view is not None:
                        subscription.enter_context(run.subscribe(stats=view.show, every=SHOWN_EVERY_S))
                return run.wait()
            except KeyboardInterrupt as interrupt:
                if run is not None and not isinstance(interrupt, Interrupted):
                    run._interruption.end(signal_of(interrupt), again=deferral.deferred > 1)
                raise
