"""Show and replay recordings, for ``flowchan peek`` and ``flowchan replay``."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from flowchan import Graph, Recording
from flowchan.cli.loading import LoadError, find_in
from flowchan.declare.blueprint import Blueprint
from flowchan.declare.stream import streams_of
from flowchan.declare.values import Origin, Stage
from flowchan.items.item_texts import WIDEST, cut, text_of
from flowchan.items.text import number_of

SOURCE = "recorded items"


def open_recording(path: str) -> Recording:
    """Open a recording, or raise ``LoadError`` if the file cannot be read."""
    find_in(os.getcwd())  # the items may have classes from modules in this folder
    try:
        return Recording(path)
    except OSError as error:
        raise LoadError(f"can't read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise LoadError(str(error)) from error


# --- flowchan peek ---


def summary(path: str) -> str:
    """Describe a recording in one line. If the recording lacks items of the channel, add the reason."""
    recording = open_recording(path)
    line = (
        f"{path}: {number_of(len(recording), 'item')} of channel {recording.channel!r} in graph "
        f"{recording.graph!r}, {Path(path).stat().st_size:,} bytes"
    )
    if not recording.complete:
        line += "\nthe file is incomplete: its program was killed or is still running, or its disk was full"
    if recording.stopped:
        line += f"\nthe recording ended before the channel did: {recording.stopped}"
    return line


def peek(path: str, count: int, width: int) -> bool:
    """Print the first ``count`` items of a recording, and return whether all could be unpickled."""
    recording = open_recording(path)
    click.echo(summary(path))
    shown = min(count, len(recording))
    failed = 0
    for number in range(shown):
        begin = f"{number:>{len(str(shown - 1)) + 2}}  "
        try:
            text = text_of(recording[number])
        except Exception as error:  # user code that the item's pickle calls may raise anything
            text, failed = f"<can't be unpickled: {type(error).__name__}: {error}>", failed + 1
        click.echo(begin + cut(text, max(20, min(width, WIDEST) - len(begin))))
    if shown < len(recording):
        click.echo(f"… {len(recording) - shown:,} more; -n {len(recording)} shows all")
    return not failed


# --- flowchan replay ---


def replayed(graph: Blueprint, name: str, path: str, number: int | None) -> Graph:
    """Return a graph that feeds recorded items to one stage of ``graph`` and collects its outputs.

    Args:
        graph: Graph that contains the stage.
        name: Name of the stage.
        path: Path of the recording.
        number: Number of the only item to feed; ``None`` for all items.

    Returns:
        The graph.

    Raises:
        LoadError: The graph has no such stage, the stage cannot be replayed, or the recording or the item
            cannot be read.
    """
    stages = _stages_of(graph, name)
    alone = Graph(graph.name)
    alone._broadcasts = graph._broadcasts
    alone.source(_items(path, number), name=SOURCE)
    origin = Origin(SOURCE, "out")
    for stage in stages:
        outputs = tuple(dataclasses.replace(output, channel_per_worker=False) for output in stage.outputs)
        alone._add(
            dataclasses.replace(
                stage, inputs=(origin,), outputs=outputs, feedback=frozenset(), may_get_requests=False
            )
        )
        origin = Origin(stage.name, "out")
    (*_, last) = stages
    ends = () if last.operator.result else streams_of(alone, last)
    # If only one item is replayed, nothing reads the errors. A failure then ends the run and shows its
    # traceback.
    reads_errors = number is None and any(edge.errors and edge.writer == name for edge in graph.edges)
    for stream in (*ends, *([ends[0].errors] if ends and reads_errors else [])):
        stream.collect(name=f"output of {stream.name}")
    return alone


def _stages_of(graph: Blueprint, name: str) -> list[Stage]:
    """Return the stage to replay, and before it the stage, if any, that assigns items to its workers."""
    try:
        stage = graph.stage_named(name)
    except KeyError as error:
        raise LoadError(error.args[0]) from None
    if len(stage.inputs) != 1 or stage.operator.routes or stage.service:
        raise LoadError(
            f"replay: stage must have exactly one input that recorded items can fill, got {name!r}, a "
            f"{stage.kind} with {number_of(len(stage.inputs), 'input')}"
        )
    if not stage.per_worker:
        return [stage]
    writer = graph.stage_named(stage.inputs[0].stage)
    if writer.operator.routes:
        return [writer, stage]
    raise LoadError(
        f"replay: stage must have workers that share one input, but stage {writer.name!r} chooses a worker "
        f"of {name!r} for each item"
    )


def _items(path: str, number: int | None) -> Iterable[Any]:
    recording = open_recording(path)
    if number is None:
        if not recording.complete:
            click.echo(f"flowchan: {summary(path)}", err=True)
        return recording
    try:
        return [recording[number]]
    except (IndexError, ValueError) as error:
        raise LoadError(str(error)) from error
