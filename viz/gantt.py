"""Draw a timeline as SVG, with a row for each worker and time from left to right.

Each event is a box with a tooltip that shows the details. If the box is wide enough, it contains a label.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from xml.etree import ElementTree

INK, FAINT, LINE, DEATH = "#22272e", "#5b6570", "#d9dee4", "#c53030"

# Lengths in pixels.
RIGHT = 92.0  # space to the right of the boxes, for a worker's share of busy time
TOP, BOTTOM = 106.0, 46.0
FONT = 12.0
LETTER = 0.62  # mean width of a letter or digit, relative to the font size


class Box(NamedTuple):
    """Event from ``begin`` to ``end``, in seconds."""

    begin: float
    end: float
    colour: str
    title: str
    label: str = ""
    label_colour: str = "#ffffff"


class Mark(NamedTuple):
    """Moment, in seconds, that a line marks."""

    at: float
    title: str


class Row(NamedTuple):
    """Events of a worker as boxes, with a name and details on the left and a note on the right."""

    name: str
    detail: str
    boxes: Sequence[Box]
    note: str
    marks: Sequence[Mark] = ()


@dataclass(frozen=True)
class Gantt:
    """Content of a timeline's picture: its rows, texts, colours and sizes.

    Attributes:
        title: Text above the picture.
        summary: Line below the title.
        legend: Colours and their meanings.
        remark: Text after the legend.
        rows: Rows from top to bottom.
        seconds: Length of the timeline, which starts at 0.
        width: Width of the area with the boxes, in pixels.
        left: Width of the area with the names, in pixels.
        row: Height of a row, in pixels.
        unit: Unit of the axis.
        marks: Moments with a line across all rows.
    """

    title: str
    summary: str
    legend: Sequence[tuple[str, str]]
    rows: Sequence[Row]
    seconds: float
    width: float
    remark: str = ""
    left: float = 132.0
    row: float = 44.0
    unit: str = "ms"
    marks: Sequence[Mark] = ()

    def svg(self) -> str:
        """Return the picture as SVG text."""
        return _Drawing(self).text()


UNITS = {"ms": 1000.0, "s": 1.0}


class _Drawing:
    """SVG elements of one picture, with lengths in pixels."""

    def __init__(self, gantt: Gantt) -> None:
        self.gantt = gantt
        self.scale = gantt.width / gantt.seconds if gantt.seconds else 0.0
        self.width = gantt.left + gantt.width + RIGHT
        self.foot = TOP + gantt.row * max(1, len(gantt.rows))  # bottom of the rows, where the axis is drawn
        self.box = gantt.row - 12
        height = self.foot + BOTTOM
        size = {
            "width": px(self.width),
            "height": px(height),
            "viewBox": f"0 0 {px(self.width)} {px(height)}",
        }
        font = {"font-family": "Helvetica, Arial, sans-serif", "font-size": px(FONT), "fill": INK}
        self.root = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **size, **font})
        self._rect(0, 0, self.width, height, "#ffffff")

    def text(self) -> str:
        self._head()
        self._axis()
        self._marks()
        for number, row in enumerate(self.gantt.rows):
            self._row(TOP + number * self.gantt.row + (self.gantt.row - self.box) / 2, row)
        ElementTree.indent(self.root)
        return ElementTree.tostring(self.root, encoding="unicode") + "\n"

    def _at(self, seconds: float) -> float:
        return self.gantt.left + seconds * self.scale

    def _head(self) -> None:
        """Draw the title, the summary, and a legend of the colours."""
        self._write(20, 28, short(self.gantt.title, self.width - 40, 16), size=16, weight="bold")
        self._write(20, 48, self.gantt.summary, fill=FAINT)
        x = 20.0
        for colour, words in self.gantt.legend:
            self._rect(x, 60, 12, 12, colour)
            self._write(x + 17, 70, words, fill=FAINT)
            x += 17 + long(words) + 18
        if self.gantt.remark:
            self._write(x, 70, self.gantt.remark, fill=FAINT)

    def _axis(self) -> None:
        """Draw the axis below the rows, with a faint vertical line at each label."""
        per_second = UNITS[self.gantt.unit]
        end = self.gantt.seconds * per_second
        distance = _tick_distance(end, self.gantt.width)
        for count in range(int(end / distance + 1e-6) + 1 if distance else 1):
            x = self._at(count * distance / per_second)
            self._line(x, TOP - 6, x, self.foot, LINE)
            self._write(x, self.foot + 16, f"{count * distance:.10g}", anchor="middle", fill=FAINT)
        middle = self.gantt.left + self.gantt.width / 2
        self._write(middle, self.foot + 36, f"time in {self.gantt.unit}", anchor="middle", fill=FAINT)

    def _marks(self) -> None:
        """Draw the marks that cross all rows, and label those that have room."""
        free = self.gantt.left
        for at, name in self.gantt.marks:
            x = self._at(at)
            self._line(x, TOP - 20, x, self.foot, FAINT, dashes="3 3")
            if x >= free and x + 4 + long(name) <= self.width:
                self._write(x + 4, TOP - 10, name, fill=FAINT)
                free = x + 4 + long(name)

    def _row(self, top: float, row: Row) -> None:
        """Draw a worker's boxes, with the worker's name on the left and its note on the right."""
        left, middle = self.gantt.left, top + self.box / 2
        room = left - 20
        if row.detail:
            self._write(left - 14, top + 14, short(row.name, room), anchor="end")
            self._write(left - 14, top + 28, short(row.detail, room), anchor="end", fill=FAINT, size=11)
        else:
            self._write(left - 14, middle + 4, short(row.name, room), anchor="end")
        self._line(left, middle, left + self.gantt.width, middle, LINE)
        for box in row.boxes:
            self._box(box, top)
        for at, title in row.marks:
            line = self._line(self._at(at), top - 3, self._at(at), top + self.box + 3, DEATH)
            line.set("stroke-width", "2")
            ElementTree.SubElement(line, "title").text = title
        self._write(left + self.gantt.width + 12, middle + 4, row.note, fill=FAINT)

    def _box(self, box: Box, top: float) -> None:
        x, wide = self._at(box.begin), (box.end - box.begin) * self.scale
        drawn = self._rect(x, top, wide, self.box, box.colour)
        if wide > 4:  # a border would hide narrower boxes
            drawn.set("stroke", "#ffffff")
        ElementTree.SubElement(drawn, "title").text = box.title
        if box.label and wide >= long(box.label) + 4:
            self._write(
                x + wide / 2, top + self.box / 2 + 4, box.label, anchor="middle", fill=box.label_colour
            )

    def _rect(self, x: float, y: float, width: float, height: float, fill: str) -> ElementTree.Element:
        size = {"x": px(x), "y": px(y), "width": px(width), "height": px(height)}
        return ElementTree.SubElement(self.root, "rect", {**size, "fill": fill})

    def _line(
        self, x: float, y: float, x2: float, y2: float, stroke: str, dashes: str = "none"
    ) -> ElementTree.Element:
        ends = {"x1": px(x), "y1": px(y), "x2": px(x2), "y2": px(y2)}
        return ElementTree.SubElement(
            self.root, "line", {**ends, "stroke": stroke, "stroke-dasharray": dashes}
        )

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
            "font-size": px(size),
            "font-weight": weight,
            "pointer-events": "none",
        }
        ElementTree.SubElement(self.root, "text", {"x": px(x), "y": px(y), **look}).text = words


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


def duration(seconds: float) -> str:
    """Format a duration in milliseconds."""
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds * 1000:.0f} ms"


def px(length: float) -> str:
    """Format a length in pixels."""
    return f"{length:.2f}".rstrip("0").rstrip(".")


def long(words: str, size: float = FONT) -> float:
    """Estimate the width of a text in pixels."""
    return len(words) * LETTER * size


def short(words: str, room: float, size: float = FONT) -> str:
    """Shorten a text to fit into ``room`` pixels."""
    fit = int(room / (LETTER * size))
    return words if len(words) <= fit else f"{words[: fit - 1]}…"
