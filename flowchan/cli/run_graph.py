"""Run a graph for the commands ``run``, ``record`` and ``replay``: progress, signals, report and failures."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import click

from flowchan.cli.exit_codes import DONE, FAILED, INTERRUPTED, TERMINATED, print_failures

if TYPE_CHECKING:
    from flowchan.cli.json_lines import JsonLines
    from flowchan.errors import RunError
    from flowchan.viz.live.terminal import LiveView

REFRESH = 0.25
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)


def run_graph(load: Callable[[], Any], as_json: bool = False, debug: bool = False, **options: Any) -> int:
    """Run the graph that ``load`` returns, print its report and results, and return the exit code.

    ``options`` are the options of ``Graph.start``.
    """
    from flowchan.cli.json_lines import JsonLines
    from flowchan.cli.result_lines import result_lines
    from flowchan.errors import RunError
    from flowchan.run.observe.report import render
    from flowchan.viz.live.terminal import LiveView

    with (
        Interrupts() as interrupts,
        _logging(),
        JsonLines() if as_json else contextlib.nullcontext() as lines,
    ):
        graph = load()
        interrupts.hold = True
        failure: RunError | None = None
        results: Any = {}
        try:
            with (
                LiveView() if lines is None else contextlib.nullcontext(lines) as view,
                graph.start(**options) as running,
                running.subscribe(stats=view.show, every=REFRESH) if lines is None else lines.follow(running),
            ):
                for name in ("page", "metrics"):
                    if address := getattr(running, name):
                        view.print_line(f"{name}: {address}")
                results = _follow(running, view, interrupts, lines)
        except RunError as error:
            failure = error
        if lines is not None:
            lines.end(running.stats(), results, failure)
        else:
            click.echo(render(running.stats(), width()))
            for line in result_lines(results):
                click.echo(line)
    if failure is not None:
        print_failures(failure, debug)
    if interrupts.count:
        return TERMINATED if interrupts.first == signal.SIGTERM else INTERRUPTED
    return DONE if failure is None else FAILED


def width() -> int:
    """Return the width of the terminal. If standard output is not a terminal, return a very large number."""
    shown = sys.stdout is not None and sys.stdout.isatty()  # stdout is None in a program that closed it
    return shutil.get_terminal_size().columns if shown else 10**6


@contextlib.contextmanager
def _logging() -> Iterator[None]:
    """Show flowchan's warnings on standard error, unless the user's file configures logging."""
    import logging

    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("flowchan: %(message)s"))
    handler.addFilter(lambda record: not logging.root.handlers)
    logger = logging.getLogger("flowchan")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class Interrupts:
    r"""Handles Ctrl-C and SIGTERM while the command runs.

    While the file is being loaded, these signals raise ``KeyboardInterrupt``. After ``hold`` has been set,
    the signals are only counted for :func:`_follow`, but a third signal still raises. SIGQUIT (Ctrl-\) prints
    the channel for which each stage waits.
    """

    def __init__(self) -> None:
        self.hold = False
        self.count = 0
        self.first = 0  # number of the first signal, if any
        self.stop_requested = False

    def __enter__(self) -> Interrupts:
        self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGQUIT:
            self.stop_requested = True
            return
        from flowchan.transport.interrupts import Termination

        self.count += 1
        self.first = self.first or number
        if not self.hold or self.count > 2:
            raise Termination if number == signal.SIGTERM else KeyboardInterrupt


def _follow(running: Any, view: LiveView | JsonLines, interrupts: Interrupts, lines: JsonLines | None) -> Any:
    """Wait for the run to end, and return its results. Pass interrupts on to the run in the meantime."""
    handled = 0
    while True:
        if lines is not None:
            lines.write()
        if interrupts.count > handled:
            handled = interrupts.count
            _interrupt(running, view, handled, interrupts.first)
        if interrupts.stop_requested:
            interrupts.stop_requested = False
            view.print_line(running.explain())
        with contextlib.suppress(TimeoutError):
            return running.wait(timeout=REFRESH)


def _interrupt(running: Any, view: LiveView | JsonLines, times: int, number: int) -> None:
    if times == 1:
        key = "SIGTERM" if number == signal.SIGTERM else "Ctrl-C"
        view.print_line(f"stopping: finishing the items in flight; press {key} again to discard them")
        running.stop()
    else:
        view.print_line("run ended: items in flight were discarded")
        running.abort()
