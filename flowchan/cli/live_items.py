"""Show the items of a channel of another program's run, for ``flowchan peek``."""

from __future__ import annotations

import contextlib

import click

from flowchan.cli.exit_codes import DONE, FAILED
from flowchan.cli.view_client import ViewedRun, ViewError, viewed_runs
from flowchan.items.item_texts import cut
from flowchan.items.text import number_of, printable


def show_items(chosen: str, channel: str, count: int, width: int) -> int:
    """Print the next ``count`` items of a channel, and return the exit code.

    Args:
        chosen: Process ID of a program, or name of a run.
        channel: Name of the channel.
        count: Number of items.
        width: Width of the lines, in characters.

    Returns:
        0 if the items were shown or the channel has ended; otherwise 1.
    """
    with contextlib.ExitStack() as ends:
        runs = viewed_runs(chosen)
        for run in runs:
            ends.callback(run.close)
        try:
            shown = _show(_only(runs, chosen), channel, count, width)
        except ViewError as error:
            click.echo(f"flowchan: {error}", err=True)
            return FAILED
    if shown < count:
        click.echo(f"flowchan: channel {channel!r} has ended after {number_of(shown, 'item')}", err=True)
    return DONE


def _only(runs: list[ViewedRun], chosen: str) -> ViewedRun:
    if not runs:
        raise ViewError(f"no run of process {chosen} was found; a run appears within a second of its start")
    if len(runs) > 1:
        names = ", ".join(run.name for run in runs)
        raise ViewError(f"process {chosen} has the runs {names}; pass one of these names instead of {chosen}")
    return runs[0]


def _show(run: ViewedRun, channel: str, count: int, width: int) -> int:
    graph, shown = run.hello()["graph"], 0
    for message in run.items(channel, count):
        if message["event"] == "channel":
            inside, leased = number_of(message["inside"], "item"), message["leased"]
            click.echo(f"channel {channel!r} in graph {graph!r}: {inside} inside, {leased} taken by readers")
            continue
        begin = f"{message['number']:>8}  {'taken ' if message['taken'] else 'inside'}  "
        click.echo(begin + cut(printable(message["text"]), max(20, width - len(begin))))
        shown += 1
    return shown
