"""Show the runs of other programs on this machine, for ``flowchan top``."""

from __future__ import annotations

import contextlib
import itertools
import time

import click

from flowchan.cli.view_client import NoAnswer, ViewedRun, ViewError, viewed_runs
from flowchan.items.text import printable
from flowchan.run.observe.report import render, table
from flowchan.run.policy.stats import RunStats
from flowchan.transport.interrupts import signal_of
from flowchan.viz.live.terminal import LiveView

LIST_WITHIN_S = 3.0
"""Time limit in seconds for the answers of all programs in a list."""


def top(chosen: str | None, width: int) -> int:
    """Show a run until it ends, and then print its report. If several runs match, only list them.

    Args:
        chosen: Process ID of a program, or name of a run from the list (default: the only run).
        width: Width of the report and the list, in characters.

    Returns:
        The exit code.
    """
    with contextlib.ExitStack() as ends:
        runs = viewed_runs(chosen)
        for run in runs:
            ends.callback(run.close)
        try:
            if not runs:
                of = "this user" if chosen is None else f"process {chosen}"
                raise ViewError(f"no run of {of} was found; a run appears within a second of its start")
            if len(runs) == 1:
                _show(runs[0], width)
            else:
                click.echo(_list(runs, width))
        except ViewError as error:
            click.echo(f"flowchan: {error}", err=True)
            return 1
        except KeyboardInterrupt as interrupt:
            click.echo("flowchan: the view is closed; the run continues", err=True)
            return 128 + signal_of(interrupt)
    return 0


def _show(run: ViewedRun, width: int) -> None:
    run.hello()
    last: RunStats | None = None
    with LiveView() as view:
        for last in run.statistics():
            view.show(last)
    if last is not None:
        click.echo(render(last, width))


def _list(runs: list[ViewedRun], width: int) -> str:
    rows, limit = [["run", "graph", "state", "seconds", "program"]], time.monotonic() + LIST_WITHIN_S
    for run in runs:
        about = [run.name, "", "no answer", "", "it may be suspended"]
        try:
            run.answers_by(limit)
            hello = run.hello()
            for stats in itertools.islice(run.statistics(), 1):
                about = [run.name, stats.graph, stats.state, f"{stats.elapsed:.0f}", hello["program"]]
        except NoAnswer:
            pass
        except ViewError:  # the run ended in the meantime
            continue
        rows.append([printable(text) for text in about])
    head, *body = rows
    return table(head, body, left={0, 1, 2, 4}, width=width) + "\n\nflowchan top RUN shows one of them"
