"""What can be run: a graph, and a pool for one."""

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
"""Seconds between two looks at a run whose progress is shown."""


class Runnable(ABC):
    """Has a graph that can be started and run."""

    @abstractmethod
    def _blueprint(self) -> Blueprint: ...

    def _begin(self, plan: Plan) -> Run:
        return Run(plan)

    def _watching(self) -> contextlib.AbstractContextManager[Any]:
        """What shows how far a run is. It is built upon runs, so it is found when it is needed."""
        watching = pkgutil.resolve_name("flowchan.viz.live:watching")
        return watching(self._blueprint())  # type: ignore[no-any-return]

    @refuses_misspelt("start")
    def start(self, *, seed: int | None = None, memory: int | None = None) -> Run:
        """Checks the graph and starts it. Raises ``GraphError`` with everything that is wrong with it, and
        ``OSError`` when there is no memory for its channels. With the same ``seed`` the workers draw the same
        random numbers again; a run without one chooses its own, which its report names. ``memory``: how many
        bytes may be inside its channels together, each of which gets the same share; the default is half of
        what the machine or the control group has."""
        graph = self._blueprint()
        chosen = int.from_bytes(os.urandom(6)) if seed is None else whole("run", "seed", seed, 0)
        leave_if_unguarded(graph)
        raise_for(graph)
        run, deferral = None, DeferralBlock()
        try:
            with interrupts_deferred() as deferral:
                most = budget() if memory is None else whole("run", "memory", memory, 1)
                run = self._begin(plan(graph, chosen, most))
                graph._started.update(stage.name for stage in graph.stages)
        except KeyboardInterrupt as interrupt:
            if run is not None:
                run._end_interrupted(signal_of(interrupt), again=deferral.deferred > 1)
            raise
        return run

    @refuses_misspelt("run")
    def run(self, *, seed: int | None = None, memory: int | None = None, progress: bool = False) -> Results:
        """Runs the graph to its end and gives the results by stream; ``seed`` and ``memory`` as for
        :meth:`start`. With ``progress`` it shows how far it is: on a terminal, in a notebook or by plain
        lines, with totals and the remaining time where the source has a length. Raises ``GraphError`` before
        anything starts, and ``RunError`` when a stage failed. The first Ctrl-C or SIGTERM stops the sources
        and lets what is in flight finish, the second breaks off; then ``Interrupted`` is raised, a
        ``KeyboardInterrupt`` that holds what was finished."""
        flag("run", "progress", progress)
        graph = self._blueprint()
        leave_if_unguarded(graph)  # before anything is drawn
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
                        out.close()  # nobody has the handle to put anything
                    if view is not None:
                        subscription.enter_context(run.subscribe(stats=view.show, every=SHOWN_EVERY_S))
                return run.wait()
            except KeyboardInterrupt as interrupt:
                if run is not None and not isinstance(interrupt, Interrupted):
                    run._end_interrupted(signal_of(interrupt), again=deferral.deferred > 1)
                raise
