"""Test commands whose standard output is closed, full, or read by no process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
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

EXPECTED = {
    "no reader": (141, ""),
    "full": (1, "flowchan: can't write to standard output: No space left on device\n"),
    "closed": (0, ""),
}
"""Exit code and errors of a command, by the state of its standard output."""


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


@contextlib.contextmanager
def streams(output: str) -> Iterator[dict[str, Any]]:
    """Provide the options of ``subprocess.run`` for a program whose standard output is in this state."""
    if output == "closed":
        yield {"preexec_fn": lambda: os.close(1)}
        return
    if output == "full":
        writes = os.open("/dev/full", os.O_WRONLY)
    else:
        reads, writes = os.pipe()
        os.close(reads)
    try:
        yield {"stdout": writes}
    finally:
        os.close(writes)


@pytest.mark.each_value
@pytest.mark.parametrize("output", EXPECTED)
@pytest.mark.parametrize("command", ARGUMENTS)
def test_command_that_loses_its_output_ends_as_documented(command: str, output: str, tmp_path: Path) -> None:
    with streams(output) as lost:
        assert ended(command, tmp_path, **lost) == EXPECTED[output]
