"""Test that worker processes start even while another thread of the program reads standard input."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys
from pathlib import Path
from flowchan import Graph

def strip(line: str) -> str:
    flag = Path(sys.argv[1])
    if line == "die\\n" and not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return f"{line.strip()} {sys.stdin.read()!r}"

if __name__ == "__main__":
    if sys.argv[2] == "replaced":
        sys.stdin = open(0, encoding="utf-8", closefd=False)
    graph = Graph("lines")
    lines = graph.source(sys.stdin, name="stdin").map(strip, on="process", name="strip").collect()
    with graph.start() as run:
        for line in run.iter(lines):
            print(line, flush=True)
            run.scale("strip", 2)
"""


@pytest.fixture(params=["original", "replaced"])
def arguments(tmp_path, request) -> list[str]:
    (tmp_path / "program.py").write_text(PROGRAM)
    return [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "flag"), request.param]


def test_dead_worker_is_replaced_while_source_reads_stdin(arguments: list[str]) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(arguments, **pipes) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        for line in ("a", "die", "b", "c"):
            program.stdin.write(line + "\n")
            program.stdin.flush()
            assert program.stdout.readline() == f"{line} ''\n"  # the workers' own stdin is empty
        program.stdin.close()
    assert program.returncode == 0
