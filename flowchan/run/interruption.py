"""End a run after Ctrl-C or SIGTERM, and raise ``Interrupted`` with the run's results."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable
from typing import NoReturn, TypeAlias

from flowchan.errors import Interrupted
from flowchan.run.crew.run_ports import RunPorts
from flowchan.run.observe.report import render
from flowchan.run.policy.decisions import AbortRequested, StopRequested
from flowchan.run.policy.plan import Plan
from flowchan.run.results import ResultGathering, Results
from flowchan.run.run_errors import failure_of_run
from flowchan.run.supervisor import Supervisor
from flowchan.transport.interrupts import interrupts_deferred

Outcome: TypeAlias = tuple[Results, str]
"""Results and report of a run."""


class Interruption:
    """Ends a run after Ctrl-C or SIGTERM, and keeps its results for ``Interrupted``.

    Args:
        plan: Plan of the run.
        supervisor: Supervisor of the run.
        ports: Channels and ports of the run.
        gathering: Collects the run's results.
    """

    def __init__(
        self, plan: Plan, supervisor: Supervisor, ports: RunPorts, gathering: ResultGathering
    ) -> None:
        self._plan, self._supervisor, self._ports, self._gathering = plan, supervisor, ports, gathering
        self.results: Results | None = None
        """Results for ``Interrupted``, or None before an interrupt has ended the run."""

    def end(self, number: int, again: bool = False) -> NoReturn:
        """End the run, and raise ``Interrupted`` with the run's results.

        Args:
            number: Number of the signal.
            again: True for a second signal, which aborts the run.

        Raises:
            Interrupted: Always.
        """
        self.finish(number, again)
        assert self.results is not None
        outcome = self.results, render(self._supervisor.stats())
        raise self._error(lambda _: outcome, number) from self.failure()

    def error(self, number: int) -> Interrupted:
        """Return the error to raise after a signal.

        Reading the results of this error ends the run first if it is still active.
        """
        return self._error(self._tell, number)

    def _error(self, tell: Callable[[Interrupted], Outcome], number: int) -> Interrupted:
        how = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
        message = f"the run of graph {self._plan.graph.name!r} was {how}"
        return Interrupted(f"{message}; .results and .report cover the finished items", tell, number)

    def _tell(self, error: Interrupted) -> Outcome:
        if self.results is None:
            self.finish(error.signal)
            error.__cause__ = self.failure()
        assert self.results is not None
        return self.results, render(self._supervisor.stats())

    def finish(self, number: int = signal.SIGINT, again: bool = False) -> None:
        """Stop the run and wait until everything in flight is done.

        A second interrupt aborts the run, and a third stops waiting for it. Each step prints a line.

        Args:
            number: Number of the signal.
            again: True if an earlier signal has already stopped the run. This signal then aborts the run at
                once.
        """
        key = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        supervisor = self._supervisor
        try:
            with interrupts_deferred():
                if supervisor.state.phase == "running" and not again:
                    _print_notice(
                        f"stopping: finishing the items in flight; press {key} again to discard them"
                    )
                supervisor.ask(StopRequested(None, True))
                for out in self._ports.inputs.values():
                    out.close()
                self._gathering.take_in_the_rest()
                self._gathering.begin()
            if again:
                raise KeyboardInterrupt
            supervisor.wait()
            if supervisor.state.aborted:
                _print_notice("aborted: items in flight were discarded")
        except KeyboardInterrupt:
            with contextlib.suppress(KeyboardInterrupt):
                supervisor.ask(AbortRequested())
                _print_notice("aborted: items in flight were discarded")
                supervisor.wait()
        ended = supervisor.ended.is_set()
        self.results = self._gathering.results() if ended else Results(self._plan.graph.name, {})
        supervisor.unreported.clear()

    def failure(self) -> Exception | None:
        """Return the error of a run that has ended, or None if it succeeded."""
        return failure_of_run(self._plan, self._supervisor.state.failures, self._supervisor.crashed)


def _print_notice(text: str) -> None:
    print(f"flowchan: {text}", file=sys.stderr)
