"""Draw the timeline of a run from its trace: what each worker did, and when it died.

A trace file is a JSON array of events in Chrome's format. In a trace, each stage is a process, and each
worker is a thread of that process. If the program was killed, the end of the array is missing.

A row has at most about two boxes for each pixel of its width. If a worker has more events, each pixel shows
the activity that took most of the pixel's time.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowchan.viz.gantt import Box, Gantt, Mark, Row, duration, long

COLOURS = {
    "busy": "#2e6cb8",
    "starting": "#8064aa",
    "waits for input": "#dbe4ee",
    "waits for room": "#e9b872",
    "waits for its turn": "#9fc5a8",
}
"""Colours of worker events, by event name; other events are not drawn."""
DEATH = "died"
"""Name of the events that are drawn as red lines."""
WIDTH = 1000.0
"""Width of the area with the boxes, in pixels."""
LEFT_LEAST, LEFT_MOST = 90.0, 320.0
"""Minimum and maximum width of the area with the names, in pixels."""
ROW = 30.0
LONG_S = 10.0
"""Timelines longer than this many seconds have an axis in seconds instead of milliseconds."""


@dataclass
class _TracedWorker:
    """Events of one worker, with times in seconds."""

    order: tuple[int, int]
    name: str = ""
    spans: list[tuple[float, float, str]] = field(default_factory=list)
    deaths: list[Mark] = field(default_factory=list)


def timeline(path: str | os.PathLike[str]) -> str:
    """Draw a run's timeline as SVG from a trace file.

    Each worker has a row. The row shows when the worker was starting, busy, or waiting for input, for room in
    a channel or for earlier items. Red lines mark deaths. Point at a box to see its times.

    Args:
        path: Path of a JSON trace file (``.json`` or ``.json.gz``) that a run has written.

    Returns:
        The SVG text.

    Raises:
        ValueError: The file is not a trace of a run.
        OSError: The file cannot be read.

    Example:
        >>> import json, tempfile
        >>> from flowchan.viz import timeline
        >>> events = [
        ...     {"ph": "M", "name": "process_name", "pid": 2, "tid": 0, "args": {"name": "decode"}},
        ...     {"ph": "M", "name": "thread_name", "pid": 2, "tid": 10, "args": {"name": "worker 1"}},
        ...     {"ph": "X", "name": "busy", "pid": 2, "tid": 10, "ts": 0, "dur": 1500},
        ... ]
        >>> with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        ...     json.dump(events, file)
        ...     file.flush()
        ...     picture = timeline(file.name)
        >>> "decode, worker 1" in picture
        True
    """
    events = _events(Path(path))
    workers = sorted(_workers(events), key=lambda worker: worker.order)
    if not workers:
        raise ValueError(f"timeline: {str(path)!r} must be the trace of a run, but it has no worker events")
    zero = min(begin for worker in workers for begin, _, _ in worker.spans)
    seconds = max(end for worker in workers for _, end, _ in worker.spans) - zero
    rows = [_row(worker, zero, seconds) for worker in workers]
    used = {name for worker in workers for _, _, name in worker.spans}
    widest = max(long(row.name) for row in rows) + 20
    return Gantt(
        title=_title(events),
        summary=f"{duration(seconds) if seconds < LONG_S else f'{seconds:.1f} s'}, {_number(len(rows))}",
        legend=[(colour, name) for name, colour in COLOURS.items() if name in used],
        remark="red line: death" if any(row.marks for row in rows) else "",
        rows=rows,
        seconds=seconds,
        width=WIDTH,
        left=min(max(LEFT_LEAST, widest), LEFT_MOST),
        row=ROW,
        unit="ms" if seconds < LONG_S else "s",
    ).svg()


def _events(path: Path) -> list[dict[str, Any]]:
    try:
        text = _decompressed(path) if path.suffix == ".gz" else path.read_bytes()
        return _parsed(text.decode(errors="replace"))
    except (ValueError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"timeline: {str(path)!r} must be a trace in JSON: {error}") from None


def _decompressed(path: Path) -> bytes:
    """Decompress a gzip file. Unlike ``gzip.decompress``, accept a file whose last member is incomplete."""
    pieces: list[bytes] = []
    with gzip.open(path) as file, contextlib.suppress(EOFError):
        while piece := file.read1(1 << 20):
            pieces.append(piece)
    return b"".join(pieces)


def _parsed(text: str) -> list[dict[str, Any]]:
    """Return the events, even if the program was killed before it wrote the end of the JSON array."""
    try:
        found = json.loads(text)
    except ValueError:
        first, *lines = text.splitlines() or [""]
        if first != "[":
            raise
        found = [json.loads(line.rstrip().rstrip(",")) for line in lines[:-1]]  # the last line is cut off
    if isinstance(found, dict):
        found = found.get("traceEvents")
    if not isinstance(found, list) or not all(isinstance(event, dict) for event in found):
        raise ValueError("the value is not a list of events")
    return found


def _workers(events: Sequence[dict[str, Any]]) -> Iterator[_TracedWorker]:
    """Yield the workers that have events to draw."""
    names: dict[tuple[int, int], str] = {}
    places: dict[tuple[int, int], int] = {}
    found: dict[tuple[int, int], _TracedWorker] = {}
    for event in events:
        kind, key = event.get("ph"), (event.get("pid", 0), event.get("tid", 0))
        name, args = event.get("name", ""), event.get("args", {})
        if kind == "M" and name in ("process_name", "thread_name"):
            names[key if name == "thread_name" else (key[0], -1)] = args["name"]
        elif kind == "M" and name == "thread_sort_index":
            places[key] = args["sort_index"]
        elif (kind == "X" and name in COLOURS) or (kind == "i" and name == DEATH):
            worker = found.setdefault(key, _TracedWorker(key))
            begin = event["ts"] / 1e6
            if kind == "X":
                worker.spans.append((begin, begin + event["dur"] / 1e6, name))
            else:
                worker.deaths.append(Mark(begin, f"{name} {args.get('text', '')}".rstrip()))
    for key, worker in found.items():
        if worker.spans:
            worker.order = key[0], places.get(key, key[1])
            worker.name = f"{names.get((key[0], -1), key[0])}, {names.get(key, key[1])}"
            yield worker


def _title(events: Sequence[dict[str, Any]]) -> str:
    """Return the name of the run, which is the name of the process with the smallest number."""
    processes = {
        event["pid"]: str(event["args"]["name"])
        for event in events
        if event.get("ph") == "M" and event.get("name") == "process_name"
    }
    return processes[min(processes)] if processes else "run"


def _row(worker: _TracedWorker, zero: float, seconds: float) -> Row:
    spans = sorted((begin - zero, end - zero, name) for begin, end, name in worker.spans)
    busy = sum(end - begin for begin, end, name in spans if name == "busy")
    if len(spans) > 2 * WIDTH:
        spans = _coarse(spans, seconds / WIDTH)
    boxes = [
        Box(begin, end, COLOURS[name], f"{name}: {duration(end - begin)}, beginning at {duration(begin)}")
        for begin, end, name in spans
    ]
    marks = [Mark(at - zero, title) for at, title in worker.deaths]
    return Row(worker.name, "", boxes, f"{busy / seconds if seconds else 0:.0%} busy", marks)


def _coarse(spans: Sequence[tuple[float, float, str]], pixel: float) -> list[tuple[float, float, str]]:
    """Return one span for each pixel, with the activity that took most of the pixel's time.

    Adjacent spans with the same activity are merged.
    """
    times: dict[int, dict[str, float]] = {}
    for begin, end, name in spans:
        for place in range(int(begin / pixel), int(end / pixel) + 1):
            part = min(end, (place + 1) * pixel) - max(begin, place * pixel)
            if part > 0:
                own = times.setdefault(place, {})
                own[name] = own.get(name, 0.0) + part
    coarse: list[tuple[float, float, str]] = []
    for place, own in sorted(times.items()):
        name = max(own, key=own.__getitem__)
        begin = place * pixel
        if coarse and coarse[-1][2] == name and coarse[-1][1] > begin - pixel / 2:
            begin = coarse.pop()[0]
        coarse.append((begin, (place + 1) * pixel, name))
    return coarse


def _number(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"
