"""Timeline of a pipeline, drawn as a picture (SVG) or written as a trace for Perfetto. It does not use torch.

A timeline is a list of events from a real or simulated run. The picture has one row for each worker, and time
runs from left to right. Each event is a box with a tooltip that shows the details. If the box is wide enough,
it contains the number of the micro-batch.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args
from xml.etree import ElementTree

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

INK, FAINT, LINE = "#22272e", "#5b6570", "#d9dee4"

# Lengths in pixels.
LEFT, RIGHT = 132.0, 92.0  # space left and right of the boxes, for the worker's name and its busy share
TOP, BOTTOM = 106.0, 46.0
ROW, BOX = 44.0, 32.0
NARROWEST, WIDEST = 760.0, 16000.0
FONT = 12.0
LETTER = 0.62  # mean width of a letter or digit, relative to the font size


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
        """Return, for each worker, the share of :attr:`seconds` for which it was busy."""
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
        return _Picture(self).text()

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
            # Both ends are rounded to nanoseconds; otherwise an event might overlap the next one.
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
        """Return, for each worker, the numbers of its parts that occur in the events."""
        found: dict[int, set[int]] = {worker: set() for worker in self.busy()}
        for event in self.events:
            if event.part is not None:
                found[event.worker].add(event.part)
        return {worker: sorted(parts) for worker, parts in found.items()}

    @property
    def _zero(self) -> float:
        return self.events[0].begin if self.events else 0.0


class _Picture:
    """SVG elements of one timeline, with lengths in pixels."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.zero = timeline.events[0].begin if timeline.events else 0.0
        self.parts = timeline.parts()
        self.plot = _width(timeline)
        self.scale = self.plot / timeline.seconds if timeline.seconds else 0.0
        self.width = LEFT + self.plot + RIGHT
        self.foot = TOP + ROW * max(1, len(self.parts))  # bottom of the rows, where the axis is drawn
        self.height = self.foot + BOTTOM
        size = {
            "width": _px(self.width),
            "height": _px(self.height),
            "viewBox": f"0 0 {_px(self.width)} {_px(self.height)}",
        }
        font = {"font-family": "Helvetica, Arial, sans-serif", "font-size": _px(FONT), "fill": INK}
        self.root = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **size, **font})

    def text(self) -> str:
        self._rect(0, 0, self.width, self.height, "#ffffff")
        self._head()
        self._axis()
        self._steps()
        for row, worker in enumerate(self.parts):
            self._row(row, worker)
        ElementTree.indent(self.root)
        return ElementTree.tostring(self.root, encoding="unicode") + "\n"

    def _head(self) -> None:
        """Draw the title, the summary, and a legend of the colours in use."""
        busy = list(self.timeline.busy().values())
        idle = f", workers idle {1 - statistics.fmean(busy):.0%} of it" if busy else ": nothing ran"
        self._write(20, 28, _short(self.timeline.title, self.width - 40, 16), size=16, weight="bold")
        self._write(20, 48, f"{_ms(self.timeline.seconds)}{idle}", fill=FAINT)
        x = 20.0
        used = {event.op for event in self.timeline.events}
        for op in OPS:
            if op in used:
                self._rect(x, 60, 12, 12, _colour(op, 0))
                self._write(x + 17, 70, NAMES[op], fill=FAINT)
                x += 17 + _long(NAMES[op]) + 18
        if any(len(parts) > 1 for parts in self.parts.values()):
            self._write(x, 70, "lighter: a worker's later parts", fill=FAINT)

    def _axis(self) -> None:
        """Draw the axis in milliseconds below the rows, with a faint vertical line at each label."""
        end = self.timeline.seconds * 1000
        distance = _tick_distance(end, self.plot)
        for count in range(int(end / distance + 1e-6) + 1 if distance else 1):
            x = LEFT + count * distance / 1000 * self.scale
            self._line(x, TOP - 6, x, self.foot, LINE)
            self._write(x, self.foot + 16, f"{count * distance:.10g}", anchor="middle", fill=FAINT)
        self._write(LEFT + self.plot / 2, self.foot + 36, "time in ms", anchor="middle", fill=FAINT)

    def _steps(self) -> None:
        """Mark the start of each batch if the timeline has several, and label each mark that has room."""
        begins: dict[int, float] = {}
        for event in self.timeline.events:
            begins.setdefault(event.step, event.begin)
        free = LEFT
        for step, begin in begins.items() if len(begins) > 1 else ():
            x, name = LEFT + (begin - self.zero) * self.scale, f"step {step}"
            self._line(x, TOP - 20, x, self.foot, FAINT, dashes="3 3")
            if x >= free and x + 4 + _long(name) <= self.width:
                self._write(x + 4, TOP - 10, name, fill=FAINT)
                free = x + 4 + _long(name)

    def _row(self, row: int, worker: int) -> None:
        """Draw the events of a worker, with its name on the left and its busy share on the right."""
        top = TOP + row * ROW + (ROW - BOX) / 2
        parts = self.parts[worker]
        self._write(LEFT - 14, top + 14, f"worker {worker}", anchor="end")
        self._write(LEFT - 14, top + 28, _short(_parts(parts), LEFT - 20), anchor="end", fill=FAINT, size=11)
        self._line(LEFT, top + BOX / 2, LEFT + self.plot, top + BOX / 2, LINE)
        for event in self.timeline.events:
            if event.worker == worker:
                self._box(event, top, parts.index(event.part) if event.part is not None else 0)
        self._write(
            LEFT + self.plot + 12, top + BOX / 2 + 4, f"{self.timeline.busy()[worker]:.0%} busy", fill=FAINT
        )

    def _box(self, event: TimelineEvent, top: float, shade: int) -> None:
        x, wide = LEFT + (event.begin - self.zero) * self.scale, (event.end - event.begin) * self.scale
        colour = _colour(event.op, shade)
        box = self._rect(x, top, wide, BOX, colour)
        if wide > 4:  # a border would hide narrower boxes
            box.set("stroke", "#ffffff")
        took = f"{_ms(event.end - event.begin)} from {_ms(event.begin - self.zero)} on"
        ElementTree.SubElement(box, "title").text = f"{event}: {took}"
        name = "" if event.chunk is None else str(event.chunk)
        if name and wide >= _long(name) + 4:
            self._write(
                x + wide / 2, top + BOX / 2 + 4, name, anchor="middle", fill="#ffffff" if shade == 0 else INK
            )

    def _rect(self, x: float, y: float, width: float, height: float, fill: str) -> ElementTree.Element:
        size = {"x": _px(x), "y": _px(y), "width": _px(width), "height": _px(height)}
        return ElementTree.SubElement(self.root, "rect", {**size, "fill": fill})

    def _line(self, x: float, y: float, x2: float, y2: float, stroke: str, dashes: str = "none") -> None:
        ends = {"x1": _px(x), "y1": _px(y), "x2": _px(x2), "y2": _px(y2)}
        ElementTree.SubElement(self.root, "line", {**ends, "stroke": stroke, "stroke-dasharray": dashes})

    def _write(
        self,
        x: float,
        y: float,
        words: str,
        *,
        anchor: str = "start",
        fill: str = INK,
        size: float = FONT,
        weight: str = "normal",
    ) -> None:
        look = {
            "text-anchor": anchor,
            "fill": fill,
            "font-size": _px(size),
            "font-weight": weight,
            "pointer-events": "none",
        }
        ElementTree.SubElement(self.root, "text", {"x": _px(x), "y": _px(y), **look}).text = words


def _width(timeline: Timeline) -> float:
    """Return a row width within limits that lets a box of median length show its number."""
    spans = [
        event.end - event.begin
        for event in timeline.events
        if event.chunk is not None and event.end > event.begin
    ]
    usual = statistics.median(spans) if spans else 0.0
    return min(max(NARROWEST, 20 * timeline.seconds / usual), WIDEST) if usual else NARROWEST


def _tick_distance(end: float, plot: float) -> float:
    """Return the distance between the labels on an axis from 0 to ``end``.

    The distance is 1, 2 or 5 times a power of ten, and at least 70 pixels.
    """
    if not end:
        return 0.0
    least = end * 70 / plot
    power: float = 10.0 ** math.floor(math.log10(least))
    return next(
        distance for distance in (power, 2 * power, 5 * power, 10 * power) if distance >= least * (1 - 1e-9)
    )


def _colour(op: Op, shade: int) -> str:
    """Return the colour of ``op``; it is lighter for a worker's later parts."""
    kept = 0.62**shade
    return "#" + "".join(f"{round(255 - kept * (255 - one)):02x}" for one in COLOURS[op])


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds * 1000:.0f} ms"


def _px(length: float) -> str:
    return f"{length:.2f}".rstrip("0").rstrip(".")


def _long(words: str, size: float = FONT) -> float:
    return len(words) * LETTER * size


def _short(words: str, room: float, size: float = FONT) -> str:
    """Shorten ``words`` to fit into ``room`` pixels."""
    fit = int(room / (LETTER * size))
    return words if len(words) <= fit else f"{words[: fit - 1]}…"


def _parts(parts: list[int]) -> str:
    return f"part{'s' if len(parts) != 1 else ''} {', '.join(map(str, parts)) or 'none'}"


def _named(what: str, tid: int, **args: Any) -> dict[str, Any]:
    """Return a metadata event for a trace, which names or sorts a process or thread."""
    return {"ph": "M", "name": what, "pid": 0, "tid": tid, "args": args}
