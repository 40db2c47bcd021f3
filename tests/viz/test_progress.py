"""Test the progress of a run: known totals, and the bars that show them."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from support.scripts import script, start
from support.terminals import on_terminal
from support.worker_latch import Gate

from flowchan import Graph, Interrupted, RunError, RunStats, Stream
from flowchan.run.crew import process_start
from flowchan.viz import live
from flowchan.viz.live import lines, terminal
from flowchan.viz.live.model import bars
from flowchan.viz.live.terminal import LiveView

GRAPHS: dict[str, tuple[Callable[[Graph], Any], list[tuple[str, int | None]]]] = {
    "a map": (lambda graph: numbers(graph).map(abs).sink(held, name="end"), [("end", 100)]),
    "batches": (lambda graph: numbers(graph).batch(8).sink(held, name="end"), [("end", 13)]),
    "batches by time": (
        lambda graph: numbers(graph).batch(8, timeout=1.0, capacity=1).sink(held),
        [("batch", 100)],
    ),
    "a take": (lambda graph: numbers(graph).take(7).sink(held, name="end"), [("end", 7)]),
    "a zip": (
        lambda graph: numbers(graph).zip(graph.source([1, 2])).sink(held, name="end"),
        [("end", 2)],
    ),
    "a merge": (
        lambda graph: graph.merge(numbers(graph), graph.source([1, 2])).sink(held, name="end"),
        [("end", 102)],
    ),
    "a tee": (
        lambda graph: [one.sink(held, name=f"end {n}") for n, one in enumerate(numbers(graph).tee(2))],
        [("end 0", 100), ("end 1", 100)],
    ),
    "a filter": (
        lambda graph: numbers(graph).filter(lambda n: True, name="sieve").sink(held),
        [("sieve", 100)],
    ),
    "a collect of items that nobody can count": (
        lambda graph: graph.source(lambda: iter(range(100))).map(held).collect().sink(len, name="end"),
        [("collect", None)],
    ),
    "an allreduce": (
        lambda graph: (
            numbers(graph).map(lambda n: held(n) or n, workers=4, name="parts").allreduce().sink(held)
        ),
        [("parts", 100)],
    ),
    "a callable": (lambda graph: graph.source(itertools.count).sink(held, name="end"), [("end", None)]),
    "a filled input": (lambda graph: graph.input().sink(held, name="end"), [("end", None)]),
}
gate: Any = None


def numbers(graph: Graph) -> Stream:
    return graph.source(range(100))


def held(_: Any) -> None:
    gate.wait()


@pytest.mark.parametrize("name", GRAPHS)
def test_bar_total_comes_from_the_nearest_known_total(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    declare, expected = GRAPHS[name]
    monkeypatch.setitem(globals(), "gate", Gate())
    graph = Graph("far")
    declare(graph)
    with graph.start() as run:
        found = bars(graph, run.stats())
        gate.open()
        run.abort()
    assert [(bar.stage, bar.total) for bar in found] == expected


def test_totals_of_ended_stages_are_exact() -> None:
    graph = Graph("far")
    odd = graph.source(range(100)).filter(lambda number: number % 2 == 1)
    odd.sink(abs, name="end")
    with graph.start() as run:
        run.wait()
    (bar,) = bars(graph, run.stats())
    assert (bar.stage, bar.done, bar.total) == ("end", 50, 50)


def test_bar_totals_exclude_items_that_failed_earlier() -> None:
    graph = Graph("far")
    halves = graph.source([4, 0, 2]).map(lambda number: 8 // number)
    halves.sink(abs, name="end")
    halves.errors.sink(lambda failed: None, name="bad")
    with graph.start() as run:
        run.wait()
    assert [(bar.stage, bar.done, bar.total) for bar in bars(graph, run.stats())] == [
        ("end", 2, 2),
        ("bad", 1, 1),
    ]


def test_failed_run_is_not_shown_as_done() -> None:
    graph = Graph("far")
    graph.source(range(100)).map(lambda number: 1 // (number - 7)).sink(abs, name="end")
    graph.source(lambda: iter(range(100))).filter(bool, name="sieve").sink(abs, name="other end")
    run = graph.start()
    with pytest.raises(RunError):
        run.wait()
    end, other = bars(graph, run.stats())
    assert (end.stage, end.total) == ("end", 99)
    assert end.done < 99
    assert (other.stage, other.total) == ("other end", None)


class Seen:
    """Progress view that records when it shows a run that is stopping."""

    def __init__(self) -> None:
        self.stopping = threading.Event()

    def show(self, stats: RunStats) -> None:
        if stats.state == "stopping":
            self.stopping.set()


def test_items_in_flight_after_ctrl_c_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen()
    monkeypatch.setattr(live, "watching", lambda graph: contextlib.nullcontext(seen))

    def pressed(number: int) -> int:
        if number == 0:
            os.kill(os.getpid(), signal.SIGINT)
            seen.stopping.wait()
        return number

    graph = Graph("far")
    last = graph.source(itertools.count).map(pressed).reduce(max)
    with pytest.raises(Interrupted) as caught:
        graph.run(progress=True)
    assert caught.value.results[last] > 0


PROGRAM = """
    import multiprocessing, os, sys
    from flowchan import Graph

    def work(number):
        if number == 50:
            print("said by a worker, through the bars:", os.ttyname(1) == terminal)
        return number

    if __name__ == "__main__":
        multiprocessing.set_start_method(sys.argv[1])
        terminal = os.ttyname(1)
        graph = Graph("far")
        result = graph.source(range(100)).map(work, on="process").collect(name="end")
        print(sum(graph.run(progress=True)[result]))
"""


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_output_appears_above_bars_on_a_terminal(method: str, tmp_path: Path) -> None:
    lines, code = on_terminal([sys.executable, str(script(tmp_path, PROGRAM)), method], tmp_path)
    assert code == 0, lines
    assert "said by a worker, through the bars: False" in lines, lines
    assert any(line.startswith("end ") and "100/100" in line for line in lines)
    assert "4950" in lines, lines
    assert max(map(len, lines)) <= 80


AGAIN = """
    import multiprocessing
    from flowchan import Graph

    def work(number):
        print("said", number, flush=True)
        return number

    def run(numbers, progress):
        graph = Graph("far")
        result = graph.source(numbers).map(work, on="process").collect()
        return graph.run(progress=progress)[result]

    if __name__ == "__main__":
        multiprocessing.set_start_method("forkserver")
        print(run([1, 2], True) + run([3], False))
"""


def test_forkserver_workers_can_print_after_bars_have_ended(tmp_path: Path) -> None:
    """The server must not keep the pseudoterminal that is used while bars are shown."""
    lines, code = on_terminal([sys.executable, str(script(tmp_path, AGAIN))], tmp_path)
    assert code == 0, lines
    assert {"said 3", "[1, 2, 3]"} <= set(lines)


POOLED = """
    import multiprocessing, os, sys
    from flowchan import Graph

    def work(number):
        if number == 50:
            print("said by a worker, on the terminal itself:", os.ttyname(1) == terminal)
        return number

    if __name__ == "__main__":
        multiprocessing.set_start_method(sys.argv[1])
        terminal = os.ttyname(1)
        graph = Graph("far")
        result = graph.source(range(100)).map(work, on="process", name="work").collect(name="end")
        with graph.pool() as pool:
            for progress in (False, True, True, False):
                print(progress, sum(pool.run(progress=progress)[result]), flush=True)
"""


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_pool_workers_print_above_bars_of_each_run(method: str, tmp_path: Path) -> None:
    """The workers start before the bars are shown, and continue to print after the bars have ended."""
    lines, code = on_terminal([sys.executable, str(script(tmp_path, POOLED)), method], tmp_path)
    assert code == 0, lines
    captions = [line for line in lines if line.startswith("said")]
    assert captions == [
        f"said by a worker, on the terminal itself: {there}" for there in (True, False, False, True)
    ]
    assert [line for line in lines if line.endswith(" 4950")] == [
        "False 4950",
        *["True 4950"] * 2,
        "False 4950",
    ]


UNGUARDED = """
    import multiprocessing
    from flowchan import Graph

    graph = Graph("unguarded")
    graph.source(range(3)).sink(abs, on="process")
    if __name__ == "__main__":
        process = multiprocessing.get_context("spawn").Process(target=print)
        process.start()
        process.join()
    else:
        graph.run(progress=True)
"""


def test_unguarded_script_is_reported_with_bars(tmp_path: Path) -> None:
    """The script starts another process.

    The message of that process must not be written to the pseudoterminal.
    """
    lines, code = on_terminal([sys.executable, str(script(tmp_path, UNGUARDED))], tmp_path)
    assert code == 0, lines
    assert any('put this code under `if __name__ == "__main__":`' in line for line in lines), lines


def test_default_fork_server_starts_before_bars(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python 3.14 and later use a fork server if the program does not choose a start method."""
    started: list[bool] = []
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none=False: None)
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["forkserver", "spawn", "fork"])
    monkeypatch.setattr(process_start, "_share_imports", lambda: None)
    monkeypatch.setattr(forkserver, "ensure_running", lambda: started.append(True))
    process_start.start_server()
    assert started


class Gone(io.StringIO):
    """Standard error stream whose reader has exited."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_failing_display_does_not_hide_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "PLAIN_EVERY", 0.0)
    monkeypatch.setattr(sys, "stderr", Gone())
    graph = Graph("far")
    graph.source([0]).sink(lambda number: 1 / number, name="end")
    with pytest.raises(RunError, match="graph 'far' failed"):
        graph.run(progress=True)


def test_progress_without_terminal_prints_plain_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lines, "PLAIN_EVERY", 0.0)
    graph = Graph("far")
    graph.source(range(10)).sink(abs, name="end")
    graph.run(progress=True)
    assert re.search(r"^\d+ s done: end 10/10 .*/s$", capsys.readouterr().err, re.MULTILINE)


def test_only_one_of_several_runs_draws_on_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other runs print lines."""
    monkeypatch.setattr(lines, "PLAIN_EVERY", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    graph = Graph("second")
    graph.source(range(10)).sink(abs, name="end")
    with contextlib.ExitStack() as ends:
        assert terminal.claim(sys.stderr, ends)
        graph.run(progress=True)
        with LiveView() as view:
            view.show(graph.start().stats())
    written = capsys.readouterr().err
    assert re.search(r"^\d+ s done: end 10/10 .*/s$", written, re.MULTILINE)
    assert "\x1b" not in written


def test_progress_rejects_values_other_than_bool() -> None:
    with pytest.raises(TypeError, match="run: progress must be True or False, got 'yes'"):
        Graph("far").run(progress="yes")  # type: ignore[arg-type]


CELLS = [
    "from flowchan import Graph\ngraph = Graph('far')\n"
    "graph.source(range(100)).map(abs).sink(lambda item: None, name='end')",
    "graph.run(progress=True)",
    "graph",
]
NOTEBOOK = """
    import json, sys
    import nbclient, nbformat

    cells = [nbformat.v4.new_code_cell(cell) for cell in json.load(open(sys.argv[1]))]
    client = nbclient.NotebookClient(nbformat.v4.new_notebook(cells=cells), timeout=60, kernel_name="python3")
    print(json.dumps([cell.outputs for cell in client.execute().cells]))
"""


def test_notebook_shows_picture_with_activity_and_bars(tmp_path: Path) -> None:
    for needed in ("nbclient", "ipykernel"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed: pip install {needed}")
    (tmp_path / "cells.json").write_text(json.dumps(CELLS))
    with start(script(tmp_path, NOTEBOOK), tmp_path / "cells.json") as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    _, (shown, _), (graph,) = json.loads(out)
    assert '<progress value="100" max="100">' in shown["data"]["text/html"]
    assert re.search(r"<svg .*> *100 at [\d,]+/s, busy \d+ %</tspan>", shown["data"]["text/html"], re.DOTALL)
    assert "end 100/100" in shown["data"]["text/plain"]
    assert "<svg" in graph["data"]["image/svg+xml"]
