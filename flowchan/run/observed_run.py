"""Define the methods that observe a run without changing it: state, statistics, reports and probes."""

from __future__ import annotations

import contextlib
import os
import pkgutil
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, overload

from flowchan.channel.addressed import ports_of_end
from flowchan.declare.stream import Stream
from flowchan.errors import Closed
from flowchan.items.arguments import finite_seconds, pause, refuses_misspelt, seconds
from flowchan.items.tracebacks import methods_end_at_caller
from flowchan.run.crew.run_ports import RunPorts
from flowchan.run.interruption import Interruption
from flowchan.run.observe.feed import RECENT_S, Subscription
from flowchan.run.observe.measure import state_of
from flowchan.run.observe.report import render
from flowchan.run.observe.what_if import Prediction
from flowchan.run.policy.decisions import AbortRequested
from flowchan.run.policy.events import Event, WorkerId
from flowchan.run.policy.explain import explain
from flowchan.run.policy.health import Health
from flowchan.run.policy.scaling import ScalingDecision
from flowchan.run.policy.stats import RunState, RunStats
from flowchan.run.readiness import health, wait_until_ready
from flowchan.run.results import Results
from flowchan.run.stacks import stacks
from flowchan.run.supervisor import Supervisor
from flowchan.run.what_if_question import answer
from flowchan.run.worker.item_recorder import follow_at_program
from flowchan.transport.interrupts import signal_of, terminate_as_interrupt


@methods_end_at_caller
class ObservedRun(ABC):
    """Base class of :class:`~flowchan.Run` with the methods that do not change the run."""

    _supervisor: Supervisor
    _interruption: Interruption
    _page: Any = None
    _metrics: Any = None

    @abstractmethod
    def wait(self, timeout: float | None = None) -> Results: ...

    @property
    def state(self) -> RunState:
        """Return the state of the run: "running", "stopping", "done", "failed", "stopped" or "aborted"."""
        return state_of(self._supervisor.state)

    @refuses_misspelt("stats")
    def stats(self, *, window: float | None = None) -> RunStats:
        """Return the current statistics of the run.

        Args:
            window: Length in seconds of the most recent period that rates, shares of time and the
                bottleneck's cause cover (default: the whole run). The result's ``window`` is the actual
                length. It may be up to half a second longer. In a run that has just started, it is shorter.

        Returns:
            Statistics of the stages, channels and hosts.

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
        window: float | None = RECENT_S,
    ) -> Subscription:
        """Call functions with statistics and events of the run.

        One thread calls all subscribers of the run. A subscriber must not wait for the run. If a subscriber
        raises, it is not called again, but the run continues.

        Args:
            stats: Called with the result of :meth:`stats`: immediately, then every ``every`` seconds, and
                once after the run has ended.
            events: Called with each event of the run. Events report workers that start, begin work, end, fail
                or die. Events also report retries, stops, aborts and each :class:`~flowchan.ScalingDecision`.
            every: Seconds between calls to ``stats`` (default: 1).
            window: Length in seconds of the most recent period that rates, shares of time and the
                bottleneck's cause cover. Default: 5; ``None`` selects the whole run. After the end of the
                run, values always cover the whole run.

        Returns:
            The subscription. To stop the calls, close it or leave its ``with`` block.

        Raises:
            TypeError: ``every`` or ``window`` is not a number.
            ValueError: ``every`` or ``window`` is not positive.

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
            stats=stats,
            events=events,
            every=finite_seconds("subscribe", "every", every),
            window=seconds("subscribe", "window", window),
        )

    @refuses_misspelt("report")
    def report(self, *, window: float | None = RECENT_S) -> str:
        """Return a report of the run as text.

        Args:
            window: Length in seconds of the most recent period that rates, shares of time and the
                bottleneck cover. Default: 5; ``None`` selects the whole run. After the end of the run, values
                always cover the whole run.

        Returns:
            The bottleneck, tables of stages and channels, and the item counts of each stage.

        Raises:
            TypeError: ``window`` is not a number.
            ValueError: ``window`` is not positive.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph("words")
            >>> graph.source(["a", "bb"]).sink(len)
            >>> run = graph.start()
            >>> results = run.wait()
            >>> print(run.report())
            graph 'words': done after ...
        """
        recent = seconds("report", "window", window)
        return render(self._supervisor.stats(None if self._supervisor.ended.is_set() else recent))

    @overload
    def what_if(self, *, window: float = 5.0) -> list[Prediction]: ...

    @overload
    def what_if(
        self,
        stage: Stream[Any] | str,
        *,
        workers: int | None = None,
        faster: float | None = None,
        window: float = 5.0,
    ) -> Prediction: ...

    @refuses_misspelt("what_if")
    def what_if(
        self,
        stage: Stream[Any] | str | None = None,
        *,
        workers: int | None = None,
        faster: float | None = None,
        window: float = 5.0,
    ) -> Prediction | list[Prediction]:
        """Predict the rate that the run would have after a change to one stage. The run does not change.

        The prediction uses the work times, CPU times and item counts in a window;
        ``flowchan.run.observe.throughput`` describes the model. After the run has ended, the window covers
        its last seconds.

        Args:
            stage: Stage to change: its name, or one of its streams. Without a stage, compare two changes to
                every stage: one more worker (if possible) and doubled speed.
            workers: Number of workers to add (default: 0). A negative number removes workers.
            faster: Factor by which the stage becomes faster (default: 1), for example with a cache or a
                faster library.
            window: Length of the most recent period on which the prediction is based, in seconds (default:
                5).

        Returns:
            The prediction; without ``stage``, a list of predictions, the largest predicted rate first.

        Raises:
            KeyError: The graph has no such stage.
            ValueError: The stage's number of workers cannot change, or would fall below 1. The error is also
                raised if only one of ``stage`` and a change (``workers`` or ``faster``) was given.
            RuntimeError: In the window, no item passed through the stage, or no item left the graph.

        Example:
            >>> import time
            >>> from flowchan import Graph
            >>> def fetch(number):
            ...     time.sleep(0.002)
            >>> graph = Graph()
            >>> graph.source(range(100)).sink(fetch)
            >>> run = graph.start()
            >>> results = run.wait()
            >>> found = run.what_if("fetch", workers=+1)
            >>> found.change, found.limited_by, round(found.gain)
            ('one more worker', 'fetch', 2)
        """
        length = finite_seconds("run.what_if", "window", window)
        return answer(self._supervisor.plan.graph, self.stats(window=length), stage, workers, faster)

    def explain(self) -> str:
        """Explain why stages are waiting.

        Returns:
            One line of text per stage. For a waiting stage, the line names the channel, the length of the
            wait, and the state of the stage at the other end.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> items = graph.input()
            >>> items.sink(print)
            >>> with graph.start() as run:
            ...     text = run.explain()
        """
        return explain(self.stats())

    @refuses_misspelt("stacks")
    def stacks(self, stage: Stream[Any] | str | None = None) -> dict[str, str]:
        """Return the current Python stacks of the running workers.

        This works even while C code holds the GIL. Worker processes write their stacks on the signal
        ``SIGRTMIN+7``. If a process does not answer within 3 seconds, ``py-spy`` reads its stacks, provided
        that it is on the ``PATH``. The signal interrupts some system calls in C code, so do not call this
        method continuously.

        Args:
            stage: Name of a stage, or one of its streams (default: all stages).

        Returns:
            Stacks as text, by worker name, such as ``"decode 2"``. As in a traceback, the most recent call
            comes last. The text for a coroutine includes everything that it awaits. If a stack is unknown,
            the text is one line with the reason. Workers that have ended are omitted.

        Raises:
            KeyError: The graph has no such stage.

        Example:
            >>> from flowchan import Channel, Graph
            >>> gate = Channel()
            >>> graph = Graph()
            >>> numbers = graph.input()
            >>> numbers.sink(lambda number: gate.get(), name="wait")
            >>> with graph.start() as run:
            ...     run[numbers].put(1)
            ...     while not run.stats().stages[1].in_hand:
            ...         pass
            ...     print(run.stacks("wait")["wait 1"])
            ...     gate.put(None)
              File ...
        """
        return stacks(self._supervisor, stage)

    @refuses_misspelt("ready")
    def ready(self, timeout: float | None = None) -> bool:
        """Wait until all workers of all stages have built their callables.

        Args:
            timeout: Seconds to wait; with 0, return at once (default: no limit).

        Returns:
            True if all workers can take items. False if some workers still cannot after ``timeout`` seconds,
            or if the run was stopped or has ended.

        Raises:
            RunError: A stage failed.
            Interrupted: Ctrl-C or SIGTERM ended the run. The error contains the results.

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
        """Return the health of the run: readiness, state of each stage and number of waiting requests.

        Returns:
            The health, for the probes of a service manager.

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

    def decisions(self) -> list[ScalingDecision]:
        """Return the decisions that changed the number of workers of ``workers="auto"`` stages, in order.

        Each decision is also logged at level INFO.

        Returns:
            The decisions so far.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> graph.source(range(3)).map(str, workers="auto").sink(len)
            >>> run = graph.start()
            >>> results = run.wait()
            >>> run.decisions()  # the run was too short
            []
        """
        return list(self._supervisor.scaler.decisions)

    @property
    def page(self) -> str | None:
        """Return the address of the run's live page; ``None`` if the run was started without ``page=True``.

        Only programs on this machine that know the address can open the page, and only during the run.

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
        """Save the run's live page as one HTML file that a browser shows without a server.

        During the run, the file shows the current state; afterwards, it shows the final state.

        Args:
            path: Path of the file, for example ``"report.html"``. An existing file is overwritten.

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
        self._page.save(path)

    def _open_page(self) -> None:
        """Serve the page until the run ends. If the page cannot be served, end the run and raise."""
        # Import the page late, because its module imports this package.
        open_page = pkgutil.resolve_name("flowchan.viz.insight.page:RunPage")
        with self._ended_on_error():
            self._page = open_page(self._supervisor.plan.graph, self._supervisor)

    @property
    def metrics(self) -> str | None:
        """Return the address of the run's metrics; ``None`` if the run was started without ``metrics=``.

        Returns:
            URL from which Prometheus can read the metrics during the run.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> graph.source(range(3)).sink(str)
            >>> with graph.start(metrics=0) as run:
            ...     print(run.metrics)
            http://127.0.0.1:.../metrics
        """
        return None if self._metrics is None else str(self._metrics.address)

    def _serve_metrics(self, port: Any) -> None:
        """Serve metrics on an open port until the run ends. If that fails, end the run and raise."""
        self._metrics = port
        self._supervisor.feed.at_end(port.close)
        with self._ended_on_error():
            port.serve(self._supervisor.stats)

    @contextlib.contextmanager
    def _ended_on_error(self) -> Iterator[None]:
        """Abort the run if the block raises an exception."""
        try:
            yield
        except BaseException:
            self._supervisor.ask(AbortRequested())
            self._supervisor.wait()
            raise


def follow_items_at_program(supervisor: Supervisor, ports: RunPorts) -> None:
    """Track sampled items at the ports through which the program itself puts items and takes results."""
    report = weakref.WeakMethod(supervisor.report)

    def tell(event: Event) -> None:
        if (method := report()) is None:
            raise Closed("the run has ended")
        method(event)

    for place, stage in enumerate(ports.plan.graph.stages):
        if stage.name in ports.inputs:
            follow_at_program(place, WorkerId(stage.name, 0), ports_of_end(ports.inputs[stage.name]), tell)
    for worker in ports.plan.workers:
        if worker.gathers:
            follow_at_program(0, worker.id, [ports.gathering_port(worker.id)], tell)
