"""Test commands whose standard output is closed, full, or read by no process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flowchan.items.recording import recording_options

GRAPH = "from flowchan import Graph\ngraph = Graph('numbers')\ngraph.source(range(3)).sink(abs)\n"

ARGUMENTS = {
    "run": ["graph.py"],
    "check": ["graph.py"],
    "viz": ["graph.py"],
    "record": ["graph.py", "source"],
    "replay": ["graph.py", "abs", "recorded.rec"],
    "peek": ["recorded.rec"],
}

commands = pytest.mark.parametrize("command", ARGUMENTS)


def ended(command: str, folder: Path, **streams: Any) -> tuple[int, str]:
    """Return the exit code and the errors of ``flowchan command``."""
    (folder / "graph.py").write_text(GRAPH)
    with recording_options(folder / "recorded.rec", "numbers", "source", 3, 1_000).opened() as writer:
        writer.write(7)
    call = "from flowchan.cli.commands import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", call, command, *ARGUMENTS[command]],
        cwd=folder, stderr=subprocess.PIPE, text=True, check=False, **streams,
    )  # fmt: skip
    return done.returncode, done.stderr


@commands
def test_command_ends_quietly_if_its_output_pipe_has_no_reader(command: str, tmp_path: Path) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    try:
        assert ended(command, tmp_path, stdout=writes) == (141, "")
    finally:
        os.close(writes)


@commands
def test_command_reports_that_the_output_device_is_full(command: str, tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        code, said = ended(command, tmp_path, stdout=full)
    assert (code, said) == (1, "flowchan: can't write to standard output: No space left on device\n")


@commands
def test_command_works_if_standard_output_is_closed(command: str, tmp_path: Path) -> None:
    assert ended(command, tmp_path, preexec_fn=lambda: os.close(1)) == (0, "")
