"""Base class of everything that can be run: a graph, and a pool for a graph."""

from __future__ import annotations

import contextlib
import os
import pkgutil
import sys
from abc import ABC, abstractmethod
from typing import Any

from flowchan.check.rules import raise_for
from flowchan.declare.blueprint import Blueprint
from flowchan.errors import Interrupted
from flowchan.items.arguments import flag, refuses_misspelt, whole
from flowchan.items.tracebacks import methods_end_at_caller
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
"""Seconds between two updates of the progress display."""


@methods_end_at_caller
class Runnable(ABC):
    """Object whose graph can be started and run."""

    @abstractmethod
    def _blueprint(self) -> Blueprint: ...

    def _begin(self, plan: Plan, recording: ResumeFile | None, trace: RunTrace | None) -> Run:
        return Run(plan, recording=recording, trace=trace)

    def _watching(self) -> contextlib.AbstractContextManager[Any]:
        """Return the progress display. It is looked up here, because its module imports this package."""
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
            seed: Random seed for all workers, at least 0. Workers in runs with equal seeds draw equal random
                numbers. The default is a new seed, which the report shows.
            memory: Maximum number of bytes in all channels together; each channel gets the same share. The
                default is half of the memory of the machine or of the process's control group.
            resume: Path of a file that records the finished items; see :meth:`run`. The items of a loop over
                ``run.iter()`` are finished when the loop takes the next one.
            page: Serve a live page of the run on this machine, at the address ``run.page`` (default: False).
            metrics: Port on 127.0.0.1, or ``"HOST:PORT"``, on which the run serves its metrics to Prometheus at
                ``/metrics`` (default: none). Port 0 chooses a free port; ``run.metrics`` is the address.
            trace: Path of a trace to write; see :meth:`run`.

        Returns:
            The running graph.

        Raises:
            GraphError: The graph is not valid, or it cannot be resumed; the error lists all problems.
            OSError: Memory for the channels is short, the page or the metrics cannot be served, or the trace
                cannot be written.
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
        with terminate_as_interrupt():
            return self._start(graph, chosen, memory, resume, page, metrics, trace)

    def _start(
        self,
        graph: Blueprint,
        seed: int,
        memory: int | None,
        resume: str | os.PathLike[str] | None,
        page: bool,
        metrics: int | str | None,
        trace: str | os.PathLike[str] | None,
    ) -> Run:
        run, deferral = None, DeferralBlock()
        try:
            with (
                interrupts_deferred() as deferral,
                _metrics_port(metrics) as port,
                contextlib.ExitStack() as undo,
            ):
                most = budget() if memory is None else whole("run", "memory", memory, 1)
                recording = None if resume is None else ResumeFile(graph, resume)
                if recording is not None:
                    undo.callback(recording.close)
                traced = None if trace is None else RunTrace(trace)
                if traced is not None:
                    undo.callback(traced.close)
                finished = None if recording is None else recording.finished
                planned = plan(graph, seed, most, finished, samples_items=page or traced is not None)
                run = self._begin(planned, recording, traced)
                undo.pop_all()
                graph._started.update(stage.name for stage in graph.stages)
                if page:
                    run._open_page()
                if port is not None:
                    run._serve_metrics(port)
        except KeyboardInterrupt as interrupt:
            if run is not None:
                run._interruption.end(signal_of(interrupt), again=deferral.deferred > 1)
            raise
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
        """Run the graph until it has ended, and return its results.

        The first Ctrl-C or SIGTERM stops the sources and lets the stages finish the items in flight. The
        second one aborts the run.

        Args:
            seed: Random seed for all workers; see :meth:`start`.
            memory: Maximum number of bytes in all channels; see :meth:`start`.
            progress: Show the progress on a terminal, in a notebook or as plain lines. If the
                source has a length, this includes totals and the remaining time.
            resume: Path of a file that records which source items have left the graph (default: no file). It
                is created if it does not exist. If the program dies, the next run with this path skips these
                items. It processes all others, so sinks may process some items twice. The results contain
                only the items that this run has processed. The sources must yield the same items in the same
                order in each run; new items may follow.
            page: Serve a live page of the run on this machine, and print its address to standard error
                (default: False).
            metrics: Port on which the run serves its metrics; see :meth:`start`.
            trace: Path of a file that ends in ``.json`` or ``.json.gz`` (default: no trace). The run replaces
                this file with a trace, which https://ui.perfetto.dev opens. The trace shows what each worker
                does, the items in the channels, and a few sampled items on their way through the graph.

        Returns:
            The results by stream.

        Raises:
            GraphError: The graph is not valid, or a stage does not support ``resume``. The file is used by
                another run, belongs to another graph or has other contents. Nothing was started.
            OSError: The trace cannot be written. Nothing was started.
            RunError: A stage failed, or the disk is full.
            ValueError: ``trace`` does not end in ``.json`` or ``.json.gz``.
            Interrupted: Ctrl-C or SIGTERM ended the run. The exception is a ``KeyboardInterrupt`` with the
                finished results.

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
        leave_if_unguarded(graph)  # before the progress is displayed
        with (
            terminate_as_interrupt(),
            self._watching() if progress else contextlib.nullcontext() as view,
            contextlib.ExitStack() as subscription,
        ):
            run, deferral = None, DeferralBlock()
            try:
                with interrupts_deferred() as deferral:
                    run = self.start(
                        seed=seed, memory=memory, resume=resume, page=page, metrics=metrics, trace=trace
                    )
                    for out in run._ports.inputs.values():
                        out.close()  # the caller does not get the handle, so no items can be put
                    if view is not None:
                        subscription.enter_context(run.subscribe(stats=view.show, every=SHOWN_EVERY_S))
                if page:
                    print(f"page: {run.page}", file=sys.stderr)
                return run.wait()
            except KeyboardInterrupt as interrupt:
                if run is not None and not isinstance(interrupt, Interrupted):
                    run._interruption.end(signal_of(interrupt), again=deferral.deferred > 1)
                raise


def _metrics_port(metrics: int | str | None) -> contextlib.AbstractContextManager[Any]:
    """Return the open port for metrics, or ``None``. It is closed if the block raises."""
    if metrics is None:
        return contextlib.nullcontext()
    # looked up here, because the module imports this package
    return pkgutil.resolve_name("flowchan.viz.insight.metrics_port:MetricsPort")(metrics)  # type: ignore[no-any-return]
