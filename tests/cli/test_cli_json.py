"""Test ``flowchan run --json``: the events on standard output, the exit codes, and standard error."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from flowchan.cli.json_lines import plain
from flowchan.run.observe.stats_json import SCHEMA, from_json

HEAD = "import os, sys\nfrom flowchan import Graph\nprint('loaded')\ngraph = Graph('numbers')\n"


def command(folder: Path, text: str) -> list[str]:
    (folder / "case.py").write_text(HEAD + text)
    main = "from flowchan.cli.commands import main; main()"
    return [sys.executable, "-c", main, "run", "--json", str(folder / "case.py")]


def run(folder: Path, text: str) -> tuple[list[dict[str, Any]], int, str]:
    """Return the events, the exit code and standard error of ``flowchan run --json``."""
    ended = subprocess.run(command(folder, text), capture_output=True, text=True)
    return [json.loads(line) for line in ended.stdout.splitlines()], ended.returncode, ended.stderr


PRINTS = """
def speak(number):
    print("said by Python")
    os.write(1, b"written to the descriptor\\n")
    os.system("echo said by a child")
    return number

graph.source(range(3)).map(speak, on="process").map(speak).collect(name="all")
"""


def test_json_output_has_start_stats_and_end_events(tmp_path: Path) -> None:
    events, code, _ = run(tmp_path, PRINTS)
    assert code == 0
    kinds = [event["event"] for event in events]
    assert kinds[0] == "start"
    assert kinds[-1] == "end"
    assert set(kinds[1:-1]) == {"stats"}
    assert (events[0]["schema"], events[0]["graph"]) == (SCHEMA, "numbers")
    assert events[-1]["state"] == "done"
    assert events[-1]["results"] == {"all": [0, 1, 2]}
    times = [event["time"] for event in events]
    assert times == sorted(times)


def test_json_stats_can_be_read_as_run_stats(tmp_path: Path) -> None:
    events, _, _ = run(tmp_path, PRINTS)
    last = from_json(events[-1]["stats"])
    assert (last.graph, last.state, last.seed) == ("numbers", "done", events[0]["seed"])
    assert [stage.items_in for stage in last.stages if stage.kind == "collect"] == [3]


def test_program_output_goes_to_standard_error(tmp_path: Path) -> None:
    _, _, err = run(tmp_path, PRINTS)
    for text in ("said by Python", "written to the descriptor", "said by a child"):
        assert err.count(text) == 6, text
    assert err.count("loaded") >= 1


def test_failed_item_and_worker_exit_produce_failure_events(tmp_path: Path) -> None:
    text = """
def check(number):
    if number == 1:
        raise ValueError("one")
    return number

def work(number):
    if number == 2:
        os._exit(7)
    return number

def count():
    while not os.path.exists("go"):
        time.sleep(0.01)
    return range(3)

import time
checked = graph.source(count, name="count").map(check, name="check")
checked.errors.sink(lambda failed: None, name="bad")
worked = checked.map(work, name="work", on="process", max_deaths=1)
worked.errors.sink(lambda failed: None, name="worse")
worked.collect(name="all")
"""
    with subprocess.Popen(
        command(tmp_path, text), stdout=subprocess.PIPE, text=True, cwd=tmp_path
    ) as process:
        assert process.stdout is not None
        events = [json.loads(process.stdout.readline())]
        # Let the stages start only now: a failure before the first event would be counted but not reported.
        (tmp_path / "go").touch()
        events += map(json.loads, process.communicate()[0].splitlines())
    code = process.returncode
    found = {(event["kind"], event["stage"]): event for event in events if event["event"] == "failure"}
    assert code == 0
    assert "ValueError: one" in found["item", "check"]["text"]
    assert "exited with code 7" in found["death", "work"]["text"]
    assert found["death", "work"]["worker"] == 1
    assert events[-1]["results"] == {"all": [0]}


def test_failed_run_emits_traceback_in_failure_event_and_exits_1(tmp_path: Path) -> None:
    text = "graph.source([4, 2, 0]).map(lambda n: 8 // n, name='halve').collect()\n"
    events, code, err = run(tmp_path, text)
    assert code == 1
    (failure,) = [event for event in events if event["event"] == "failure"]
    assert (failure["kind"], failure["stage"], failure["item"]) == ("stage", "halve", "0")
    assert "ZeroDivisionError" in failure["traceback"]
    assert (events[-1]["event"], events[-1]["state"], events[-1]["results"]) == ("end", "failed", {})
    # standard error still gets the readable message, as without --json
    assert "ZeroDivisionError" in err


def test_invalid_graph_prints_no_json_and_exits_2(tmp_path: Path) -> None:
    events, code, err = run(tmp_path, "graph.source([1]).map(abs)\n")
    assert (events, code) == ([], 2)
    assert "case.py:5: stage 'abs':" in err


def test_interrupted_run_writes_end_event_and_exits_130(tmp_path: Path) -> None:
    text = """
import itertools
graph.source(itertools.count).map(abs).reduce(lambda count, _: count + 1, 0, name="total")
"""
    with subprocess.Popen(
        command(tmp_path, text), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        events = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    events += map(json.loads, out.splitlines())
    assert process.returncode == 130
    assert "stopping: finishing the items in flight" in err
    assert events[-1]["state"] == "stopped"
    assert events[-1]["results"]["total"] > 0


def test_run_is_aborted_when_reader_of_output_closes_pipe(tmp_path: Path) -> None:
    text = "import itertools\ngraph.source(itertools.count).sink(abs)\n"
    with subprocess.Popen(
        command(tmp_path, text), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["event"] == "start"
        process.stdout.close()
        assert process.stderr is not None
        err = process.stderr.read()
    assert process.returncode == 141, err
    assert "Traceback" not in err


def test_results_without_json_equivalent_become_strings() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert plain({"a": (1, 2.5, None, True), "b": math.inf}) == {"a": [1, 2.5, None, True], "b": "inf"}
    assert plain({1: 2}) == "{1: 2}"
    assert plain(2**64) == str(2**64)
    assert plain({1}) == "{1}"
    assert plain(b"x" * 1000) == f"b'{'x' * 195}..."
    assert plain(endless) == "[[...]]"
    assert json.dumps(plain([float("nan")]), allow_nan=False) == '["nan"]'
