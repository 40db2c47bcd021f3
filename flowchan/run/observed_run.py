"""Methods that only observe a run: state, statistics, reports and probes."""

from __future__ import annotations

import os
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flowchan.items.arguments import finite_seconds, pause, refuses_misspelt, seconds
from flowchan.items.tracebacks import methods_end_at_caller
from flowchan.run.interruption import Interruption
from flowchan.run.observe.feed import Subscription
from flowchan.run.observe.measure import state_of
from flowchan.run.observe.report import render
from flowchan.run.policy.decisions import AbortRequested
from flowchan.run.policy.explain import explain
from flowchan.run.policy.health import Health
from flowchan.run.policy.stats import RunState, RunStats
from flowchan.run.readiness import health, wait_until_ready
from flowchan.run.results import Results
from flowchan.run.supervisor import Supervisor
from flowchan.transport.interrupts import signal_of, terminate_as_interrupt


@methods_end_at_caller
class ObservedRun(ABC):
    """Base class of :class:`~flowchan.Run` with the methods that only observe the run."""

    _supervisor: Supervisor
    _interruption: Interruption
    _page: Any = None

    @abstractmethod
    def wait(self, timeout: float | None = None) -> Results: ...

    @property
    def state(self) -> RunState:
        """Return the run's state: "running", "stopping", "done", "failed", "stopped" or "aborted"."""
        return state_of(self._supervisor.state)

    @refuses_misspelt("stats")
    def stats(self, *, window: float | None = None) -> RunStats:
        """Return the current statistics of the run.

        Args:
            window: Number of most recent seconds to which the rates, the shares of time and the cause of the
                bottleneck refer (default: the whole run). The ``window`` of the result is the actual length.
                It may be up to half a second longer, or shorter if the run started less than that ago.

        Returns:
            Statistics of the stages, the channels and the hosts.

        Raises:
            TypeError: ``window`` is not a number.
            ValueError: ``window`` is negative.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> graph.source(range(3)).map(str, name="show").sink(len)
            >>> run = graph.start()
            >>> results = run.wait()
            >>> [(stage.name, stage.items_in) for stage in run.stats().stages]
            [('source', 0), ('show', 3), ('len', 3)]
        """
        return self._supervisor.stats(seconds("stats", "window", window))

    @refuses_misspelt("subscribe")
    def subscribe(
        self,
        *,
        stats: Callable[[RunStats], object] | None = None,
        events: Callable[[Any], object] | None = None,
        every: float = 1.0,
    ) -> Subscription:
        """Call functions with the statistics and events of the run.

        All subscribers of the run are called on the same thread. A subscriber must not wait for the run. If a
        subscriber raises, it is not called again, and the run continues.

        Args:
            stats: Function that is called with the result of :meth:`stats`: immediately, then every ``every``
                seconds, and once after the run has ended.
            events: Function that is called with each event of the run. Events are workers that start, begin
                work, end, fail or die, and retries, stops and aborts.
            every: Seconds between calls of ``stats``.

        Returns:
            The subscription. Close it, or leave its ``with`` block, to stop the calls.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> graph.source(range(3)).sink(str)
            >>> states = []
            >>> with graph.start() as run, run.subscribe(stats=lambda stats: states.append(stats.state)):
            ...     results = run.wait()
            >>> states[-1]
            'done'
        """
        return self._supervisor.feed.subscribe(
            stats=stats, events=events, every=finite_seconds("subscribe", "every", every)
        )

    def report(self) -> str:
        """Return a report of the run as text.

        Returns:
            The bottleneck, tables of the stages and channels, and the number of items of each stage.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph("words")
            >>> graph.source(["a", "bb"]).sink(len)
            >>> run = graph.start()
            >>> results = run.wait()
            >>> print(run.report())
            graph 'words': done after ...
        """
        return render(self.stats())

    def explain(self) -> str:
        """Explain what each stage is waiting for.

        Returns:
            Text with one line for each stage. If a stage is waiting, its line gives the channel, the time
            so far, and the state of the stage at the channel's other end.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> items = graph.input()
            >>> items.sink(print)
            >>> with graph.start() as run:
            ...     text = run.explain()
        """
        return explain(self.stats())

    @refuses_misspelt("ready")
    def ready(self, timeout: float | None = None) -> bool:
        """Wait until all workers of all stages have built their callables.

        Args:
            timeout: Seconds to wait; 0 does not wait (default: no limit).

        Returns:
            True if all workers can take items. False if some can't take items after ``timeout`` seconds, or
            if the run was stopped or has ended.

        Raises:
            RunError: A stage failed.
            Interrupted: The run was ended by Ctrl-C or SIGTERM; the error holds the results.

        Example:
            >>> from flowchan import Graph
            >>> class Model:
            ...     def __init__(self) -> None:
            ...         self.weights = 2  # loads for a minute
            ...     def __call__(self, number: int) -> int:
            ...         return self.weights * number
            >>> graph = Graph()
            >>> numbers = graph.input()
            >>> numbers.map(Model).sink(print)
            >>> with graph.start() as run:
            ...     run.ready(timeout=60)
            True
        """
        limit = pause("ready", "timeout", timeout)
        with terminate_as_interrupt():
            try:
                ready = wait_until_ready(self._supervisor, limit)
            except KeyboardInterrupt as interrupt:
                self._interruption.end(signal_of(interrupt))
        if self._supervisor.ended.is_set() and self._interruption.failure() is not None:
            self.wait()
        return ready

    def health(self) -> Health:
        """Return the current health of the run: whether it is ready, its stages, and its waiting requests.

        Returns:
            The health, for a service manager's probes.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> graph.input().sink(print, name="show")
            >>> with graph.start() as run:
            ...     failed = run.health().failed
            >>> failed, run.health().ready, run.health().stages
            (False, False, {'show': 'ended'})
        """
        return health(self._supervisor)

    @property
    def page(self) -> str | None:
        """Return the address of the run's live page, or ``None`` if it was started without ``page=True``.

        Only programs on this machine that know the address can open the page, and only until the run has
        ended.

        Returns:
            The URL, which contains a random token.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> graph.source(range(3)).sink(str)
            >>> with graph.start(page=True) as run:
            ...     print(run.page)
            http://127.0.0.1:...
        """
        return None if self._page is None else str(self._page.address)

    @refuses_misspelt("save_page")
    def save_page(self, path: str | os.PathLike[str]) -> None:
        """Save the run's live page as one HTML file, which a browser shows without a server.

        The file shows the current state of the run, or the final state after the run has ended.

        Args:
            path: Path of the file, for example ``"report.html"``. An existing file is replaced.

        Raises:
            RuntimeError: The run was started without ``page=True``.
            OSError: The file cannot be written.

        Example:
            >>> import os, tempfile
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> graph.source(range(3)).sink(str)
            >>> with graph.start(page=True) as run:
            ...     pass
            >>> path = os.path.join(tempfile.mkdtemp(), "report.html")
            >>> run.save_page(path)
            >>> os.path.exists(path)
            True
        """
        if self._page is None:
            raise RuntimeError("run.save_page: the run has no page; start it with page=True")
        self._page.save(Path(path))

    def _open_page(self) -> None:
        """Serve the page until the run has ended. If that is impossible, end the run and raise the error."""
        # looked up here, because the module imports this package
        open_page = pkgutil.resolve_name("flowchan.viz.insight.page:RunPage")
        try:
            self._page = open_page(self._supervisor.plan.graph, self._supervisor.feed)
        except BaseException:
            self._supervisor.ask(AbortRequested())
            self._supervisor.wait()
            raise
