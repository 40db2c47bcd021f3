"""Test the live view of a run."""

from __future__ import annotations

import errno
import io
import itertools
from typing import Any

import pytest

from flowchan import Graph
from flowchan.viz.live.terminal import LiveView


class Stream(io.StringIO):
    """Stream that accepts a limited number of writes."""

    def __init__(self, terminal: bool, takes: int) -> None:
        super().__init__()
        self.terminal, self.left = terminal, takes

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, "no space left")
        return super().write(text)


@pytest.mark.parametrize("terminal", [False, True])
def test_failing_live_view_does_not_end_the_run(terminal: bool) -> None:
    graph = Graph("shown")
    numbers = graph.source(range(3)).map(abs).collect()
    stream = Stream(terminal, takes=10**6)
    with LiveView(stream, itertools.count(0, 10).__next__) as view, graph.start() as run:
        view.show(run.stats())
        assert "source" in stream.getvalue()
        stream.left = 0
        shown = stream.getvalue()
        view.show(run.stats())
        view.print_line("one more line")
        view.show(run.stats())
        assert stream.getvalue() == shown
        assert run.wait()[numbers] == [0, 1, 2]


@pytest.mark.parametrize("terminal", [False, True])
def test_plain_lines_replace_a_failing_live_view(terminal: bool, caplog: Any) -> None:
    graph = Graph("shown")
    graph.source(range(3)).map(abs).sink(abs)
    stream = Stream(terminal, takes=10**6)
    with LiveView(stream, itertools.count(0, 10).__next__) as view, graph.start() as run:
        view.show(run.stats())
        for _ in range(2):
            stream.left = 0
            view.show(run.stats())
        stream.left = 10**6
        before = len(stream.getvalue())
        view.print_line("stopping: Ctrl-C again breaks off")
        view.show(run.stats())
        captions, shown = stream.getvalue()[before:].splitlines()[:2]
        run.wait()
    assert captions == "stopping: Ctrl-C again breaks off"
    assert "source" in shown
    told = [record.getMessage() for record in caplog.records if record.name == "flowchan.viz"]
    assert told == ["the live view could not be shown: OSError: [Errno 28] no space left"]


@pytest.mark.parametrize(("kind", "drawn"), [("xterm", True), ("dumb", False)])
def test_dumb_terminal_shows_plain_lines(kind: str, drawn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", kind)
    graph = Graph("shown")
    graph.source(range(3)).map(abs).sink(abs)
    stream = Stream(terminal=True, takes=10**6)
    with LiveView(stream, itertools.count(0, 10).__next__) as view, graph.start() as run:
        view.show(run.stats())
        assert ("─" in stream.getvalue()) is drawn
        assert "source" in stream.getvalue()
