"""Define how a graph or its pool starts a run."""

from __future__ import annotations

import contextlib
import os
import pkgutil
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from flowchan.check.rules import raise_for
from flowchan.declare.blueprint import Blueprint
from flowchan.errors import Interrupted
from flowchan.items.arguments import flag, refuses_misspelt, whole
from flowchan.items.tracebacks import methods_end_at_caller
from flowchan.native import need_native
from flowchan.run.crew.main_guard import leave_if_unguarded
from flowchan.run.crew.memory import budget
from flowchan.run.observe.run_trace import RunTrace
from flowchan.run.policy.plan import Plan, plan
from flowchan.run.results import Results
from flowchan.run.resume_file import ResumeFile
from flowchan.run.run import Run
from flowchan.transport.interrupts import (
    DeferralBlock,
    interrupts_deferred,
    signal_of,
    terminate_as_interrupt,
)

SHOWN_EVERY_S = 0.1
"""Seconds between updates of the progress display."""


@methods_end_at_caller
class Runnable(ABC):
    """Base class of ``Graph`` and ``WorkerPool``, whose graph can be started and run."""

    @abstractmethod
    def _blueprint(self) -> Blueprint: ...

    def _begin(self, plan: Plan, recording: ResumeFile | None, trace: RunTrace | None) -> Run:
        return Run(plan, recording=recording, trace=trace)

    def _watching(self) -> contextlib.AbstractContextManager[Any]:
        """Return the progress display.

        The display is imported only when needed, because its module imports this package.
        """
        watching = pkgutil.resolve_name("flowchan.viz.live:watching")
        return watching(self._blueprint())  # type: ignore[no-any-return]

    @refuses_misspelt("start")
    def start(
        self,
        *,
        seed: int | None = None,
        memory: int | None = None,
        resume: str | os.PathLike[str] | None = None,
        page: bool = False,
        metrics: int | str | None = None,
        trace: str | os.PathLike[str] | None = None,
    ) -> Run:
        """Check the graph and start it.

        Args:
            seed: Random seed for all workers, at least 0. In runs with equal seeds, workers draw equal random
                numbers. If omitted, the seed is new, and the report shows it.
            memory: Maximum total bytes in all channels, divided equally among them. The default is half of
                the memory of the machine or of the process's cgroup.
            resume: Path of a file that records finished items; see :meth:`run`. In a loop over
                ``run.iter()``, an item is finished when the loop takes the next item.
            page: Serve a live page of the run on this machine, at the address ``run.page`` (default: False).
            metrics: Port on 127.0.0.1, or ``"HOST:PORT"``, on which the run serves metrics to Prometheus
                (default: none). Port 0 picks any free port; ``run.metrics`` is the address.
            trace: Path of a trace file to write; see :meth:`run`.

        Returns:
            The running graph.

        Raises:
            GraphError: The graph is invalid, or it cannot be resumed; the error lists all problems.
            OSError: There is not enough memory for the channels, the trace cannot be written, or the page or
                metrics cannot be served.
            ValueError: ``metrics`` is not a port, or ``trace`` does not end in ``.json`` or ``.json.gz``.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> squares = graph.source(range(3)).map(lambda n: n * n).collect()
            >>> with graph.start() as run:
            ...     list(run.iter(squares))
            [0, 1, 4]
        """
        flag("start", "page", page)
        graph = self._blueprint()
        chosen = int.from_bytes(os.urandom(6)) if seed is None else whole("run", "seed", seed, 0)
        leave_if_unguarded(graph)
        raise_for(graph)
        _refuse_processes(graph)
        _refuse_ended_services(graph)
        with terminate_as_interrupt():
            return self._start(graph, _StartOptions(chosen, memory, resume, trace, page, metrics))

    def _start(self, graph: Blueprint, options: _StartOptions) -> Run:
        run, deferral = None, DeferralBlock()
        try:
            with interrupts_deferred() as deferral, contextlib.ExitStack() as undo:
                run = self._begin_observed(graph, options, undo)
                graph._started.update(stage.name for stage in graph.stages)
        except KeyboardInterrupt as interrupt:
            if run is not None:
                run._interruption.end(signal_of(interrupt), again=deferral.deferred > 1)
            raise
        return run

    def _begin_observed(self, graph: Blueprint, options: _StartOptions, undo: contextlib.ExitStack) -> Run:
        """Open the files and ports of a run, and start it. On an error, ``undo`` closes them."""
        memory = budget() if options.memory is None else whole("run", "memory", options.memory, 1)
        recording = None if options.resume is None else ResumeFile(graph, options.resume)
        if recording is not None:
            undo.callback(recording.close)
        traced = None if options.trace is None else RunTrace(options.trace)
        if traced is not None:
            undo.callback(traced.close)
        port = None if options.metrics is None else _metrics_port(options.metrics)
        if port is not None:
            undo.callback(port.close)
        finished = None if recording is None else recording.finished
        samples_items = traced is not None or options.page
        planned = plan(graph, options.seed, memory, finished, samples_items=samples_items)
        run = self._begin(planned, recording, traced)
        undo.pop_all()
        if port is not None:  # open the port first: if the page fails, the end of the run closes the port
            run._serve_metrics(port)
        if options.page:
            run._open_page()
        return run

    @refuses_misspelt("run")
    def run(
        self,
        *,
        seed: int | None = None,
        memory: int | None = None,
        progress: bool = False,
        resume: str | os.PathLike[str] | None = None,
        page: bool = False,
        metrics: int | str | None = None,
        trace: str | os.PathLike[str] | None = None,
    ) -> Results:
        """Run the graph to its end, and return the results.

        The first Ctrl-C or SIGTERM stops the sources and lets the stages finish the items in flight. The
        second signal aborts the run.

        Args:
            seed: Random seed for all workers; see :meth:`start`.
            memory: Maximum number of bytes in all channels; see :meth:`start`.
            progress: Show progress on a terminal, in a notebook or as plain lines. If the source has a
                length, the display includes totals and the remaining time.
            resume: Path of a file that records which source items have left the graph (default: no file). The
                file is created if it does not exist. If the program dies, the next run with this path skips
                these items and processes all others, so sinks may receive some items twice. The results
                contain only items of this run. Sources must yield the same items in the same order each time;
                new items may follow.
            page: Serve a live page of the run on this machine, and print its address to standard error
                (default: False).
            metrics: Port on which the run serves its metrics; see :meth:`start`.
            trace: Path of a file that ends in ``.json`` or ``.json.gz`` (default: no trace). The run
                overwrites this file with a trace that https://ui.perfetto.dev can open. The trace shows what
                each worker does, how many items each channel holds, and the paths of a few sampled items.

        Returns:
            The results, by stream.

        Raises:
            GraphError: The graph is invalid, or a stage does not support ``resume``. The ``resume`` file may
                also be in use, belong to another graph, or have other contents. Nothing was started.
            OSError: The trace cannot be written. Nothing was started.
            RunError: A stage failed, or the disk is full.
            ValueError: ``trace`` does not end in ``.json`` or ``.json.gz``.
            Interrupted: Ctrl-C or SIGTERM ended the run. This ``KeyboardInterrupt`` contains the finished
                results.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph("squares")
            >>> squares = graph.source(range(3)).map(lambda n: n * n).collect()
            >>> graph.run()[squares]
            [0, 1, 4]
            >>> import os, tempfile
            >>> path = os.path.join(tempfile.mkdtemp(), "squares.resume")
            >>> graph.run(resume=path)[squares]
            [0, 1, 4]
            >>> graph.run(resume=path)[squares]
            []
        """
        flag("run", "progress", progress)
        flag("run", "page", page)
        graph = self._blueprint()
        leave_if_unguarded(graph)  # exit before the progress display appears
        with (
            terminate_as_interrupt(),
            self._watching() if progress else contextlib.nullcontext() as view,
            contextlib.ExitStack() as subscription,
        ):
            run, deferral = None, DeferralBlock()
            try:
                with interrupts_deferred() as deferral:
                    run = self.start(
                        seed=seed, memory=memory, resume=resume, trace=trace, page=page, metrics=metrics
                    )
                    for out in run._ports.inputs.values():
                        out.close()  # the caller gets no handle to put items into these inputs
                    if view is not None:
                        subscription.enter_context(run.subscribe(stats=view.show, every=SHOWN_EVERY_S))
                if page:
                    print(f"page: {run.page}", file=sys.stderr)
                return run.wait()
            except KeyboardInterrupt as interrupt:
                if run is not None and not isinstance(interrupt, Interrupted):
                    run._interruption.end(signal_of(interrupt), again=deferral.deferred > 1)
                raise


def _refuse_processes(graph: Blueprint) -> None:
    for stage in graph.stages:
        if stage.placement.own_process:
            given = stage.placement.name
            need_native(f"{stage.where}: stage {stage.name!r}: on must be 'thread', got {given!r}")


def _refuse_ended_services(graph: Blueprint) -> None:
    # Search backwards, so that the error names the parameter server, which is declared after its inputs.
    for name, service in reversed(graph._services.items()):
        if service.inbox.closed:
            raise RuntimeError(
                f"start: graph {graph.name!r} runs only once, because {name!r} ended with the first run; "
                "declare the graph and its parameter server again"
            )


@dataclass(frozen=True, slots=True)
class _StartOptions:
    """Groups the options of :meth:`Runnable.start`."""

    seed: int
    memory: int | None
    resume: str | os.PathLike[str] | None
    trace: str | os.PathLike[str] | None
    page: bool
    metrics: int | str | None


def _metrics_port(metrics: int | str) -> Any:
    """Open the port that serves metrics.

    Its class is imported only when needed, because its module imports this package.
    """
    return pkgutil.resolve_name("flowchan.viz.insight.metrics_port:MetricsPort")(metrics)
