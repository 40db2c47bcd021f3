"""A graph's picture with what its stages do, drawn once: what changes is written over words that keep the
room for it."""

from __future__ import annotations

from html import escape

from flowchan.declare.blueprint import Blueprint
from flowchan.run.report import count, rate, share
from flowchan.run.stats import RunStats, StageStats
from flowchan.viz.dot import INK, LIVE, to_dot
from flowchan.viz.render import render
from flowchan.viz.terminal import items_of

SLOW = "#b7791f"


class LivePicture:
    """Of one graph. Raises ``RenderError`` where nothing here draws."""

    def __init__(self, graph: Blueprint) -> None:
        drawn = render(to_dot(graph, live=True), "svg").decode()
        self._drawn = drawn[drawn.index("<svg") :]  # it stands within a page

    def at(self, stats: RunStats) -> str:
        """The picture, as SVG, of the run at that moment."""
        picture = self._drawn
        for number, stage in enumerate(stats.stages):
            color = SLOW if stage.name == stats.bottleneck else INK  # the ground is light in a dark page too
            does = _does(stage)
            room = " " * (len(LIVE.format(0)) - len(does))  # a space is half as wide, so this is the middle
            words = f'<tspan fill="{color}">{room}{escape(does)}</tspan>'
            picture = picture.replace(LIVE.format(number), words)
        return picture


def _does(stage: StageStats) -> str:
    words = [f"{count(items_of(stage))} at {rate(stage.rate)}", f"busy {share(stage.busy)}"]
    if wrong := stage.failed + stage.members_failed:
        words.append(f"{count(wrong)} failed")
    return ", ".join(words)
