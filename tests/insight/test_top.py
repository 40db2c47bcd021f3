"""Test ``flowchan top``, which shows a run of another program."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.scripts import script, start
from support.terminals import on_terminal
from support.waiting import wait_until

from flowchan.cli import top as cli_top
from flowchan.cli import view_client
from flowchan.cli.view_client import run_names

TOP = [sys.executable, "-c", "from flowchan.cli.commands import main; main()", "top"]

PROGRAM = """
import itertools, os, sys, threading
from flowchan import Graph

def slowly(number):
    threading.Event().wait(0.001)
    return number

def source():
    for number in itertools.count():
        if os.path.exists("seen"):
            return
        yield number

def declared(name):
    graph = Graph(name)
    graph.source(source, name="numbers").map(slowly, name="decode", on="process").sink(str, name="end")
    return graph

if __name__ == "__main__":
    with contextlib.ExitStack() as block:
        for name in sys.argv[1:]:
            block.enter_context(declared(name).start())
        print("started", flush=True)
    print("done", flush=True)
""".replace("import itertools", "import contextlib, itertools")


def names_of(pid: int) -> set[str]:
    """Return the names of the runs of a program that have a socket."""
    return {name for name in run_names() if name.startswith(f"{pid}-")}


@contextlib.contextmanager
def running(folder: Path, *graphs: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program whose runs end when the folder contains a file named "seen"."""
    with start(script(folder, PROGRAM), *graphs, cwd=folder) as process:
        try:
            wait_until(lambda: len(names_of(process.pid)) == len(graphs) or process.poll() is not None)
            yield process
        finally:
            (folder / "seen").touch()
            process.communicate()


def top(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TOP, *arguments], capture_output=True, text=True)


def test_top_shows_the_run_of_a_program_until_it_ends(tmp_path: Path) -> None:
    with running(tmp_path, "shown") as process:
        lines, code = on_terminal([*TOP, str(process.pid)], tmp_path, then="shown · running · ")
        assert process.wait() == 0
    assert code == 0, lines
    assert any("decode" in line and "%" in line for line in lines), lines  # a table row
    (report,) = [line for line in lines if line.startswith("graph 'shown': ")]
    assert report.startswith("graph 'shown': done after")
    assert not names_of(process.pid)


def test_interrupt_closes_top_but_does_not_stop_run(tmp_path: Path) -> None:
    with running(tmp_path, "goes_on") as process:
        lines, code = on_terminal([*TOP, str(process.pid)], tmp_path, until=["goes_on · running · "])
        assert code == 130
        assert "flowchan: the view is closed; the run continues" in lines
        assert not any("graph 'goes_on'" in line for line in lines)
        assert process.poll() is None
        (tmp_path / "seen").touch()
        out, err = process.communicate()
    assert (process.returncode, out, err) == (0, "started\ndone\n", "")


def test_top_lists_runs_and_shows_selected_run(tmp_path: Path) -> None:
    with running(tmp_path, "first", "second") as process:
        listed = top()
        assert listed.returncode == 0, listed.stderr
        rows = [line.split() for line in listed.stdout.splitlines()]
        names = {row[1]: row[0] for row in rows if row and row[0].startswith(f"{process.pid}-")}
        assert set(names) == {"first", "second"}
        assert "script.py" in listed.stdout
        assert top(str(process.pid)).stdout.count(f"{process.pid}-") == 2
        lines, code = on_terminal([*TOP, names["second"]], tmp_path, then="second · running · ")
    assert code == 0
    assert any(line.startswith("graph 'second': done") for line in lines)


def test_list_names_runs_of_suspended_programs(tmp_path: Path) -> None:
    with running(tmp_path, "first", "second") as process:
        process.send_signal(signal.SIGSTOP)
        try:
            listed = top()
        finally:
            process.send_signal(signal.SIGCONT)
    assert listed.returncode == 0, listed.stderr
    for number in (1, 2):
        (row,) = [line for line in listed.stdout.splitlines() if line.startswith(f"{process.pid}-{number} ")]
        assert "no answer" in row


def test_top_reports_that_no_run_was_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = top("999999")
    assert unknown.returncode == 1
    assert unknown.stderr.startswith("flowchan: no run of process 999999 was found")
    monkeypatch.setattr(view_client, "run_names", set)  # without other programs of this user
    assert cli_top.top(None, 80) == 1
    assert capsys.readouterr().err.startswith("flowchan: no run of this user was found")


def test_top_reports_that_the_program_was_killed(tmp_path: Path) -> None:
    with (
        running(tmp_path, "killed") as process,
        subprocess.Popen(
            [*TOP, str(process.pid)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as viewer,
    ):
        assert viewer.stderr is not None
        line = viewer.stderr.readline()  # a plain status line of the run
        assert "running: " in line
        process.send_signal(signal.SIGKILL)
        out, err = viewer.communicate()
    assert (viewer.returncode, out) == (1, "")
    assert err.splitlines()[-1] == f"flowchan: the program of run {process.pid}-1 exited before the run ended"
    assert not names_of(process.pid)
