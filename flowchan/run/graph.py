"""The graph that users write: a declaration that can be checked and run."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

from flowchan.arguments import whole
from flowchan.check import check, raise_for
from flowchan.graph import Blueprint
from flowchan.run.handle import Results, Run, wait_interrupted
from flowchan.run.plan import plan
from flowchan.stage import Problem


class Graph(Blueprint):
    """Stages joined by channels. Declare with :meth:`source`, :meth:`input`, :meth:`stage` and the verbs of the streams
    they return; then :meth:`run` it, or :meth:`start` it and take part while it runs."""

    def check(self) -> tuple[Problem, ...]:
        """Everything that is wrong with the declaration, with the lines it stands on; empty when nothing is. Runs
        nothing."""
        return check(self)

    def start(self, *, seed: int | None = None) -> Run:
        """Checks the graph and starts it. Raises ``GraphError`` with everything that is wrong with it, and ``OSError``
        when there is no memory for its channels. With the same ``seed`` the workers draw the same random numbers again;
        a run without one chooses its own, which its report names."""
        chosen = int.from_bytes(os.urandom(6)) if seed is None else whole("run", "seed", seed, 0)
        raise_for(self)
        run = None
        try:
            with _interrupts_held():
                run = Run(plan(self, chosen))
        except KeyboardInterrupt:
            if run is not None:
                run.abort()
                run.wait()
            raise
        return run

    def run(self, *, seed: int | None = None) -> Results:
        """Runs the graph to its end and gives the results by stream; ``seed`` as for :meth:`start`. Raises
        ``GraphError`` before anything starts, and ``RunError`` when a stage failed. The first Ctrl-C or SIGTERM stops
        the sources and lets what is in flight finish, the second breaks off; then ``KeyboardInterrupt`` is raised."""
        with _terminate_as_interrupt():
            run = None
            try:
                with _interrupts_held():
                    run = self.start(seed=seed)
                for out in run._plan.inputs.values():
                    out.close()  # nobody has the handle to put anything
                return run.wait()
            except KeyboardInterrupt:
                if run is not None:
                    wait_interrupted(run)
                raise


@contextlib.contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """Within it SIGTERM means what Ctrl-C means, unless the program has its own handler or this is no main thread."""
    usual = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Within it nothing is interrupted half-way: Ctrl-C and SIGTERM count when it is left."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[Any, ...]] = []
    handlers: dict[signal.Signals, Any] = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(number)
        if callable(handler):
            handlers[number] = handler
    for number in handlers:
        signal.signal(number, lambda *arguments: came.append(arguments))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for came_number, frame in came[:1]:
            handlers[signal.Signals(came_number)](came_number, frame)
