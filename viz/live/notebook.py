"""Show a run in a notebook cell's output: the graph with its stages' activity, and progress bars.

The picture is rendered once, with placeholders. Each update replaces the placeholders.
"""

from __future__ import annotations

import contextlib
import sys
import time
from html import escape
from typing import Any

from flowchan.declare.blueprint import Blueprint
from flowchan.run.observe.report import count, rate, share
from flowchan.run.policy.stats import RunStats, StageStats
from flowchan.viz.dot import INK, LIVE, to_dot
from flowchan.viz.live.model import ACTIVE, Bar, Progress, headline, hints, items_of, problems, times
from flowchan.viz.render import RenderError, render

SLOW = "#b7791f"
PICTURES_EVERY = 0.5
"""Seconds between pictures."""


def in_notebook() -> bool:
    """Return True if this program is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


class Notebook:
    """Output of a notebook cell, which is updated in place."""

    def __init__(self, graph: Blueprint) -> None:
        self._progress = Progress(graph)
        self._shown: Any = None
        self._next = 0.0
        self._picture = ""
        with contextlib.suppress(RenderError):
            drawn = render(to_dot(graph, live=True), "svg").decode()
            # Keep only the svg element, so that it can be part of a page.
            self._picture = drawn[drawn.index("<svg") :]

    def show(self, stats: RunStats) -> None:
        """Update the output if a picture is due."""
        from IPython.display import display

        known = self._progress.bars(stats)
        if stats.state in ACTIVE and time.monotonic() < self._next:
            return
        self._next = time.monotonic() + PICTURES_EVERY
        html = f"<div>{_filled(self._picture, stats)}</div>" if self._picture else ""
        html += "".join(_row(bar, stats) for bar in known)
        for words in filter(None, [*hints(stats), ", ".join(problems(stats))]):
            html += f"<div>{escape(words)}</div>"
        plain = ", ".join(f"{bar.stage} {headline(bar)}" for bar in known)
        both = {"text/html": html, "text/plain": plain}
        if self._shown is None:
            self._shown = display(both, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._shown.update(both, raw=True)


def _row(bar: Bar, stats: RunStats) -> str:
    full = "" if bar.total is None else f' value="{bar.done}" max="{max(bar.total, 1)}"'
    words = f"{escape(bar.stage)} <progress{full}></progress> {headline(bar)}"
    return f"<div>{words}, {times(bar, stats)}</div>"


def _filled(picture: str, stats: RunStats) -> str:
    """Return the SVG picture, filled with the current statistics of the run."""
    for number, stage in enumerate(stats.stages):
        # The text is dark, because the picture is light even on a dark page.
        color = SLOW if stage.name == stats.bottleneck else INK
        does = _does(stage)
        # Padding spaces are half as wide as other characters, so this number of spaces centres the text.
        padding = " " * (len(LIVE.format(0)) - len(does))
        words = f'<tspan fill="{color}">{padding}{escape(does)}</tspan>'
        picture = picture.replace(LIVE.format(number), words)
    return picture


def _does(stage: StageStats) -> str:
    does = "starting" if stage.state == "starting" else f"busy {share(stage.busy)}"
    words = [f"{count(items_of(stage))} at {rate(stage.rate)}", does]
    if wrong := stage.failed + stage.members_failed:
        words.append(f"{count(wrong)} failed")
    return ", ".join(words)
