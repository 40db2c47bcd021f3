"""Test ``flowchan run``: its output and its exit codes.

A successful run exits with 0, a failed run with 1, and a run that Ctrl-C interrupts with 130. If the graph or
the command line is wrong, the exit code is 2.
"""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from flowchan.cli.commands import main

HEAD = "from flowchan import Graph\ngraph = Graph('numbers')\n"
WORKS = HEAD + "graph.source(range(1000)).map(abs, name='same').sink(lambda item: None, name='last')\n"
FAILS = HEAD + "graph.source([4, 2, 0]).map(lambda n: 8 // n, name='halve').sink(lambda item: None)\n"
UNREAD = HEAD + "graph.source([4, 2, 0]).map(abs)\n"
ENDLESS = (
    "import itertools, sys\n"
    + HEAD
    + "def tell(item):\n    if item == 100:\n        print('going', flush=True)\n"
    "graph.source(itertools.count).sink(tell)\n"
)
FUNCTION = (
    "from flowchan import Graph\ndef made(n: str) -> Graph:\n    graph = Graph('made')\n"
    "    graph.source(range(int(n))).sink(lambda item: None, name='last')\n    return graph\n"
)


def run(tmp_path: Path, text: str, *args: str) -> Result:
    (tmp_path / "case.py").write_text(text)
    return CliRunner().invoke(main, ["run", str(tmp_path / "case.py"), *args])


def command(tmp_path: Path, text: str) -> list[str]:
    (tmp_path / "case.py").write_text(text)
    return [
        sys.executable,
        "-c",
        "from flowchan.cli.commands import main; main()",
        "run",
        str(tmp_path / "case.py"),
    ]


def test_successful_run_prints_report_and_exits_0(tmp_path: Path) -> None:
    result = run(tmp_path, WORKS)
    assert result.exit_code == 0, result.output
    assert "graph 'numbers': done after" in result.output
    assert "bottleneck: " in result.output
    assert "same    1,000 = 1,000 out" in result.output


def test_failed_run_names_stage_and_error_and_exits_1(tmp_path: Path) -> None:
    result = run(tmp_path, FAILS)
    assert result.exit_code == 1
    assert "stage 'halve' failed on item 0" in result.output
    assert "ZeroDivisionError" in result.output


def test_run_command_rejects_a_graph_with_an_input(tmp_path: Path) -> None:
    result = run(tmp_path, HEAD + "graph.input('questions').sink(lambda item: None)\n")
    assert result.exit_code == 2
    assert "so only the program that fills this input can run the graph; use python" in result.output


def test_run_of_invalid_graph_lists_problems_and_exits_2(tmp_path: Path) -> None:
    result = run(tmp_path, UNREAD)
    assert result.exit_code == 2
    assert "case.py:3: stage 'abs':" in result.output


def test_arguments_after_double_dash_reach_the_function(tmp_path: Path) -> None:
    result = run(tmp_path, FUNCTION, "--", "7")
    assert result.exit_code == 0, result.output
    assert "7 = 7 out" in result.output


def test_resumed_run_skips_finished_items_and_refuses_other_graphs(tmp_path: Path) -> None:
    path = str(tmp_path / "progress")
    assert "same    1,000 = 1,000 out" in run(tmp_path, WORKS, "--resume", path).output
    second = run(tmp_path, WORKS, "--resume", path)
    assert second.exit_code == 0, second.output
    assert "same    0 = 0 out" in second.output
    refused = run(tmp_path, FAILS, "--resume", path)
    assert refused.exit_code == 2
    assert "belongs to a graph with different stage names" in refused.output


def test_page_option_prints_page_address_on_standard_error(tmp_path: Path) -> None:
    result = run(tmp_path, WORKS, "--page")
    assert result.exit_code == 0, result.output
    assert re.search(r"^page: http://127\.0\.0\.1:\d+/[\w-]{24}/$", result.stderr, re.MULTILINE)
    assert "page:" not in result.stdout


def test_trace_option_writes_a_trace_and_checks_its_path(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    result = run(tmp_path, WORKS, "--trace", str(path))
    assert result.exit_code == 0, result.output
    assert {"process_name", "starting"} <= {event["name"] for event in json.loads(path.read_text())}
    for wrong, reason in [
        (tmp_path / "out.txt", "must end in .json or .json.gz"),
        (tmp_path / "missing" / "out.json", "must exist"),
    ]:
        refused = run(tmp_path, WORKS, "--trace", str(wrong))
        assert refused.exit_code == 2
        assert reason in " ".join(refused.output.replace("│", " ").split())


def test_debug_shows_the_traceback_of_a_failed_item(tmp_path: Path) -> None:
    result = run(tmp_path, FAILS, "--debug")
    assert result.exit_code == 1
    assert "Traceback" in result.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_finishes_and_exits_with_the_signals_exit_status(tmp_path: Path, number: int) -> None:
    """Check that clause R5 also applies to the command."""
    with subprocess.Popen(
        command(tmp_path, ENDLESS), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "going\n"
        process.send_signal(number)
        out, err = process.communicate()
    assert process.returncode == 128 + number, err
    assert err.count("stopping") == 1
    assert ("SIGTERM again" in err) == (number == signal.SIGTERM)
    assert "stopped after" in out
    assert "Traceback" not in err


def test_sigquit_prints_which_stages_are_waiting(tmp_path: Path) -> None:
    with subprocess.Popen(
        command(tmp_path, ENDLESS), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "going\n"
        process.send_signal(signal.SIGQUIT)
        line = process.stderr.readline()
        while line and "(running for" not in line:
            line = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert line.startswith("graph 'numbers' (running for")


def test_run_shows_a_live_table_on_a_terminal(tmp_path: Path) -> None:
    """While the graph is running, the table has one row per stage: items, rate, busy, fill."""
    controller, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "30"}
    with subprocess.Popen(
        command(tmp_path, ENDLESS), stdout=subprocess.PIPE, stderr=terminal, text=True, env=environment
    ) as process:
        os.close(terminal)
        assert process.stdout is not None
        process.stdout.readline()
        shown = b""
        while b"count" not in shown or b"tell" not in shown:
            shown += os.read(controller, 4096)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        while process.poll() is None:
            try:
                os.read(controller, 4096)
            except OSError:
                break
    os.close(controller)
    assert process.returncode == 130


def test_report_escapes_characters_missing_in_the_encoding(tmp_path: Path) -> None:
    (tmp_path / "named.py").write_text(
        "from flowchan import Graph\ngraph = Graph('g')\ngraph.source([1]).sink(abs, name='\\u5927')\n"
    )
    result = CliRunner(charset="latin-1").invoke(main, ["run", str(tmp_path / "named.py")])
    assert result.exit_code == 0, result.output
    assert r"\u5927" in result.output
