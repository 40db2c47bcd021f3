"""Test ``flowchan run`` on a terminal: a live table that fits, with the program's output above."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from support.terminals import on_terminal

from flowchan import Graph
from flowchan.cli.result_lines import result_lines

PRINTS = """
import itertools, logging, os, subprocess, sys, threading
from flowchan import Graph

def speak(number):
    if number == 10:
        print("said by a process")
        subprocess.run(["echo", "said by what a process starts"])
        print("half a line, ", end="", flush=True)
        os.write(2, b"and the other half\\n")
        logging.getLogger("mine").warning("logged by a process")
    if number == 11:
        os._exit(7)
    return number

def tell(number):
    if number == 10:
        print("said by a thread")
    threading.Event().wait(0.001)

graph = Graph("loud")
numbers = graph.source(itertools.count)
numbers = numbers.map(speak, on="process", name="a_stage_with_a_rather_long_name", max_deaths=2)
numbers.errors.sink(lambda failed: None, name="bad")
numbers.sink(tell)
"""
SAID = [
    "said by a process",
    "said by what a process starts",
    "half a line, and the other half",
    "logged by a process",
    "said by a thread",
]


def seen(folder: Path, text: str, until: Sequence[str] = (), then: str = "") -> tuple[list[str], int]:
    """Return the lines that ``flowchan run`` displays for this file."""
    (folder / "case.py").write_text(text)
    command = [sys.executable, "-c", "from flowchan.cli.commands import main; main()", "run", "case.py"]
    return on_terminal(command, folder, until, then)


def test_output_appears_above_a_table_that_fits_the_terminal(tmp_path: Path) -> None:
    written, code = seen(tmp_path, PRINTS, until=(*SAID, "restarts:", "wait out", "failed:", "! last:"))
    assert code == 130
    for text in SAID:
        assert sum(line.strip() == text for line in written) == 1, text
    ours = [line for line in written if not line.startswith("flowchan:")]  # log lines are not cut
    assert max(map(len, ours)) <= 80
    assert any(line.endswith("/64") for line in ours), "the last column is cut"
    assert any("exited with code 7" in line for line in written)
    assert any("loud · running · " in line for line in written)


def test_stopped_run_is_shown_as_stopping_until_it_ends(tmp_path: Path) -> None:
    text = """
import itertools, os, threading
from flowchan import Graph

def hold(number):
    print("has begun", flush=True)
    while not os.path.exists("seen"):
        threading.Event().wait(0.01)

graph = Graph("held")
graph.source(itertools.count).sink(hold)
"""
    written, code = seen(tmp_path, text, until=["has begun"], then="held · stopping · ")
    assert code == 130
    states = [line.split(" · ")[1] for line in written if line.startswith("held · ")]
    assert "stopping" in states
    assert set(states[states.index("stopping") :]) - {"stopped"} == {
        "stopping"
    }  # the run's end prints the last line
    assert any(line.startswith("stopping: finishing the items in flight") for line in written), written


def test_results_are_printed_at_the_end_of_the_run(tmp_path: Path) -> None:
    text = """
from flowchan import Graph
graph = Graph("sums")
low, high = graph.source(range(100)).tee(2)
low.reduce(lambda total, number: total + number, name="total")
high.collect(name="all")
"""
    found, code = seen(tmp_path, text)
    assert code == 0
    after = found[found.index("results") :]
    assert after[1] == "  total: 4950"
    assert after[2].startswith("  all: 100 items, [0, 1, 2, 3")
    assert len(after[2]) == 80


def test_result_lines_count_list_items_and_text_characters() -> None:
    graph = Graph("r")
    one, many = graph.source([]).tee(2)
    lines = list(result_lines({one.collect(name="one"): ["x" * 100], many.collect(name="text"): "y" * 1000}))
    assert [line.partition(", ")[0] for line in lines[1:]] == ["  one: 1 item", "  text: 1,000 characters"]
