"""Test that views show the remaining time and the recent cause, with scripted statistics."""

from __future__ import annotations

import io
import sys
import types
from typing import Any

import pytest

from flowchan import Graph
from flowchan.run.policy.stats import Cause, EdgeStats, RunState, RunStats, StageStats
from flowchan.viz.live.lines import PLAIN_EVERY
from flowchan.viz.live.model import Progress, headline, hints, times
from flowchan.viz.live.notebook import Notebook
from flowchan.viz.live.terminal import LiveView

TOTAL = 10_200


def slow_at_the_end() -> Graph:
    graph = Graph("slow at the end")
    graph.source(range(TOTAL), name="numbers").sink(abs, name="save")
    return graph


def done_at(now: float) -> int:
    """Return the number of items done: 1,000 per second, and then 200 slow items in 80 s."""
    return min(TOTAL, int(1000 * now if now < 10 else 10_000 + 2.5 * (now - 10)))


def stats_at(now: float, state: RunState = "running") -> RunStats:
    done = done_at(now)
    recent = (done - done_at(now - min(now, 5))) / max(min(now, 5), 0.1)
    empty: Any = (0,) * 7
    numbers = StageStats("numbers", "source", "thread", 1, 1, 0, TOTAL, *empty[:5], 0.0, 0.0, 0.0, 0.0)
    save = StageStats("save", "sink", "thread", 1, 1, done, done, *empty[:5], recent, 1.0, 0.0, 0.0)
    edge = EdgeStats("numbers", "numbers", "save", "threads", 0, 64, done, recent)
    cause = Cause("cores", None, "workers use 2.0 of 2 cores")
    return RunStats("slow at the end", state, now, (numbers, save), (edge,), None, window=5.0, cause=cause)


def test_progress_bar_shows_remaining_time_of_slow_items() -> None:
    """75 s are left, but the average rate since the start would give 0.3 s."""
    progress = Progress(slow_at_the_end())
    for tenth in range(151):
        (bar,) = progress.bars(stats_at(tenth / 10))
    assert bar.left is not None
    assert 60 <= bar.left <= 100
    assert headline(bar).endswith("2.5/s") or headline(bar).endswith("2.4/s")
    minutes, seconds = map(int, times(bar, stats_at(15)).split(", ")[1].split()[0].split(":"))
    assert 60 <= 60 * minutes + seconds <= 100


def test_ended_run_has_no_remaining_time() -> None:
    progress = Progress(slow_at_the_end())
    for second in range(15):
        progress.bars(stats_at(second))
    (bar,) = progress.bars(stats_at(90, "done"))
    assert bar.left is None
    assert times(bar, stats_at(90, "done")) == "1:30"


def test_plain_lines_show_remaining_time_and_cause() -> None:
    now = 0.0
    stream = io.StringIO()
    with LiveView(stream, clock=lambda: now, graph=slow_at_the_end()) as view:
        while now <= 16:
            view.show(stats_at(now))
            now += PLAIN_EVERY / 50
    last = stream.getvalue().splitlines()[-1]
    assert last.startswith("15 s running: save 10,01")
    assert " left" in last
    assert last.endswith("| waits for the cores")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_shows_cause_below_progress_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    with LiveView(terminal, graph=slow_at_the_end()) as view:
        for tenth in range(151):
            view.show(stats_at(tenth / 10))
    assert "waits for the cores" in terminal.getvalue().rpartition(" left")[2]


def test_progress_views_show_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "2 more workers for 'save' would give 1.9 × the rate"
    monkeypatch.setenv("TERM", "xterm")
    for module in ("model", "terminal"):
        monkeypatch.setattr(f"flowchan.viz.live.{module}.advice", lambda stats: text)
    assert hints(stats_at(15)) == ["waits for the cores", f"advice: {text}"]
    assert hints(stats_at(15, "done")) == []
    for graph in (None, slow_at_the_end()):
        terminal = Terminal()
        with LiveView(terminal, graph=graph) as view:
            view.show(stats_at(15))
        assert f"advice: {text}" in terminal.getvalue()


def test_notebook_shows_remaining_time_and_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    fake = types.ModuleType("IPython.display")
    fake.display = lambda both, **_: shown.append(both["text/html"])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", fake)
    monkeypatch.setattr("flowchan.viz.live.notebook.PICTURES_EVERY", 0.0)
    notebook = Notebook(slow_at_the_end())
    for tenth in range(151):
        notebook.show(stats_at(tenth / 10))
    assert "<div>waits for the cores</div>" in shown[-1]
    assert "0:15, 1:" in shown[-1]
    assert " left</div>" in shown[-1]
