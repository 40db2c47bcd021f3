"""Draw the timeline of a pipeline as a picture (SVG), or write it as a trace for Perfetto, without torch.

A timeline is a list of events from a real or simulated run. The picture has one row for each worker, and time
runs from left to right. Each event is a box with a tooltip that shows the details. If the box is wide enough,
it contains the number of the micro-batch.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from flowchan.viz.gantt import INK, Box, Gantt, Mark, Row, duration

Op = Literal["F", "B", "I", "W", "recompute", "update"]

OPS: tuple[Op, ...] = get_args(Op)

NAMES: dict[Op, str] = {
    "F": "forward (F)",
    "B": "backward (B)",
    "I": "backward: inputs (I)",
    "W": "backward: weights (W)",
    "recompute": "forward again",
    "update": "update",
}
COLOURS: dict[Op, tuple[int, int, int]] = {
    "F": (46, 108, 184),
    "B": (198, 92, 22),
    "I": (216, 136, 48),
    "W": (150, 74, 92),
    "recompute": (70, 160, 150),
    "update": (128, 100, 170),
}
REMEMBERED = 100_000
"""Maximum number of events in a pipe's timeline; older ones are dropped."""

NARROWEST, WIDEST = 760.0, 16000.0
"""Minimum and maximum width of the area with the boxes, in pixels."""


class TimelineEvent(NamedTuple):
    """One step of a worker, from ``begin`` to ``end``. Events of the same worker do not overlap.

    Attributes:
        worker: Number of the worker.
        part: Number of the part; ``None`` for an update of all the worker's parts.
        op: ``"F"`` (forward), ``"B"`` (backward) or its halves ``"I"`` (inputs) and ``"W"`` (weights),
            ``"recompute"`` (repeated forward pass), or ``"update"`` (clipping and the optimizer's step).
        step: Number of the batch, from 0.
        chunk: Number of the micro-batch; ``None`` for an update.
        begin: Start in seconds of ``time.monotonic()``, a clock that all processes on a host share.
        end: End in seconds of the same clock.
    """

    worker: int
    part: int | None
    op: Op
    step: int
    chunk: int | None
    begin: float
    end: float

    def __str__(self) -> str:
        """Return a short description, such as ``F3 of part 1, step 0``."""
        name = (
            self.op
            if self.chunk is None
            else f"{self.op}{self.chunk}"
            if len(self.op) == 1
            else f"{self.op} {self.chunk}"
        )
        of = "" if self.part is None else f" of part {self.part}"
        return f"{name}{of}, step {self.step}"


class Timeline:
    """Events of all workers in a pipeline, in order of their start times.

    Args:
        events: Events in any order.
        title: Text above the picture.

    Example:
        pipe.timeline().save("steps.svg")
    """

    def __init__(self, events: Iterable[TimelineEvent], title: str = "pipeline") -> None:
        self.events = sorted(events, key=lambda event: (event.begin, event.worker))
        self.title = title

    @property
    def seconds(self) -> float:
        """Seconds from the start of the first event until the end of the last."""
        return max((event.end for event in self.events), default=0.0) - self._zero

    def busy(self) -> dict[int, float]:
        """Return, for each worker, the fraction of :attr:`seconds` during which it was busy."""
        spent = dict.fromkeys(sorted({event.worker for event in self.events}), 0.0)
        for event in self.events:
            spent[event.worker] += event.end - event.begin
        return {worker: one / self.seconds if self.seconds else 0.0 for worker, one in spent.items()}

    def save(self, path: str | PathLike[str]) -> Path:
        """Write a picture (``.svg``) or a trace (``.json``), and return its path.

        https://ui.perfetto.dev and chrome://tracing open the trace.

        Args:
            path: Path of the file, whose suffix selects the format.

        Returns:
            The path.

        Raises:
            ValueError: The suffix is neither ``.svg`` nor ``.json``.
        """
        file = Path(path)
        writers = {".svg": self.svg, ".json": self.trace}
        if file.suffix not in writers:
            raise ValueError(f"save: path must end in {' or '.join(writers)}, got {str(file)!r}")
        file.write_text(writers[file.suffix](), encoding="utf-8")
        return file

    def svg(self) -> str:
        """Return the picture as SVG text."""
        return _picture(self).svg()

    def trace(self) -> str:
        """Return the events as JSON in the Trace Event Format.

        Each worker is a thread. The events are complete events (``"ph": "X"``), in microseconds since the
        first start.
        """
        found: list[dict[str, Any]] = [_named("process_name", 0, name=self.title)]
        for worker, parts in self.parts().items():
            found.append(_named("thread_name", worker, name=f"worker {worker} ({_parts(parts)})"))
            found.append(_named("thread_sort_index", worker, sort_index=worker))
        for event in self.events:
            # Round both ends to nanoseconds. Otherwise, an event might overlap the next one.
            begin, end = (round((moment - self._zero) * 1e9) for moment in (event.begin, event.end))
            name = event.op if event.chunk is None else f"{event.op} {event.chunk}"
            args = {"part": event.part, "chunk": event.chunk, "step": event.step}
            times = {"ts": begin / 1000, "dur": (end - begin) / 1000}
            found.append(
                {
                    "ph": "X",
                    "name": name,
                    "cat": event.op,
                    "pid": 0,
                    "tid": event.worker,
                    **times,
                    "args": args,
                }
            )
        return json.dumps({"displayTimeUnit": "ms", "traceEvents": found}, indent=1)

    def parts(self) -> dict[int, list[int]]:
        """Return, for each worker, the part numbers that occur in its events."""
        found: dict[int, set[int]] = {worker: set() for worker in self.busy()}
        for event in self.events:
            if event.part is not None:
                found[event.worker].add(event.part)
        return {worker: sorted(parts) for worker, parts in found.items()}

    @property
    def _zero(self) -> float:
        return self.events[0].begin if self.events else 0.0


def _picture(timeline: Timeline) -> Gantt:
    """Return the picture of a timeline, with one row for each worker."""
    busy, parts = timeline.busy(), timeline.parts()
    idle = ": nothing ran"
    if busy:
        idle = f", workers idle {1 - statistics.fmean(busy.values()):.0%} of the time"
    used = {event.op for event in timeline.events}
    begins: dict[int, float] = {}
    for event in timeline.events:
        begins.setdefault(event.step, event.begin)
    zero = timeline._zero
    steps = [Mark(begin - zero, f"step {step}") for step, begin in begins.items()]
    boxes: dict[int, list[Box]] = {worker: [] for worker in parts}
    for event in timeline.events:
        own = parts[event.worker]
        boxes[event.worker].append(_box(event, zero, own.index(event.part) if event.part is not None else 0))
    several = any(len(one) > 1 for one in parts.values())
    return Gantt(
        title=timeline.title,
        summary=f"{duration(timeline.seconds)}{idle}",
        legend=[(_colour(op, 0), NAMES[op]) for op in OPS if op in used],
        remark="lighter: a worker's later parts" if several else "",
        rows=[
            Row(f"worker {worker}", _parts(own), boxes[worker], f"{busy[worker]:.0%} busy")
            for worker, own in parts.items()
        ],
        seconds=timeline.seconds,
        width=_width(timeline),
        marks=steps if len(steps) > 1 else [],
    )


def _box(event: TimelineEvent, zero: float, shade: int) -> Box:
    took = f"{duration(event.end - event.begin)}, beginning at {duration(event.begin - zero)}"
    label = "" if event.chunk is None else str(event.chunk)
    return Box(
        event.begin - zero,
        event.end - zero,
        _colour(event.op, shade),
        f"{event}: {took}",
        label,
        "#ffffff" if shade == 0 else INK,
    )


def _width(timeline: Timeline) -> float:
    """Return a row width within limits that lets a box of median length show its number."""
    spans = [
        event.end - event.begin
        for event in timeline.events
        if event.chunk is not None and event.end > event.begin
    ]
    usual = statistics.median(spans) if spans else 0.0
    return min(max(NARROWEST, 20 * timeline.seconds / usual), WIDEST) if usual else NARROWEST


def _colour(op: Op, shade: int) -> str:
    """Return the colour of ``op``, lighter for a worker's later parts."""
    kept = 0.62**shade
    return "#" + "".join(f"{round(255 - kept * (255 - one)):02x}" for one in COLOURS[op])


def _parts(parts: list[int]) -> str:
    return f"part{'s' if len(parts) != 1 else ''} {', '.join(map(str, parts)) or 'none'}"


def _named(what: str, tid: int, **args: Any) -> dict[str, Any]:
    """Return a metadata event for a trace, which names or sorts a process or thread."""
    return {"ph": "M", "name": what, "pid": 0, "tid": tid, "args": args}
