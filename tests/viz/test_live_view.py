"""The live view of a run."""

from __future__ import annotations

import errno
import io
import itertools

import pytest

from flowchan import Graph
from flowchan.viz.terminal import LiveView


class Stream(io.StringIO):
    """Takes so many writes, and no more."""

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
def test_a_view_that_fails_ends_no_run(terminal: bool) -> None:
    graph = Graph("shown")
    numbers = graph.source(range(3)).map(abs).collect()
    stream = Stream(terminal, takes=10**6)
    with LiveView(stream, itertools.count(0, 10).__next__) as view, graph.start() as run:
        view.show(run.stats())
        assert "source" in stream.getvalue()
        stream.left = 0
        shown = stream.getvalue()
        view.show(run.stats())
        view.say("one more line")
        view.show(run.stats())
        assert stream.getvalue() == shown
        assert run.wait()[numbers] == [0, 1, 2]
