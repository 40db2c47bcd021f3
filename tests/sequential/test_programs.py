"""A pipe in a program: under fork, forkserver and spawn, with the program's own classes, at Ctrl-C and at the
end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PYTHON = [sys.executable, "-W", "ignore:Sequential:RuntimeWarning"]
"""Models so small that a pipe may warn that it can't win."""

PROGRAM = """
import multiprocessing
import sys
import torch
from torch import nn
from flowchan.pipelines import Sequential

class Double(nn.Module):
    def forward(self, x):
        return 2 * x

def main():
    # torch's threads have begun: none of them is in a forked process
    torch.ones(300, 300) @ torch.ones(300, 300)
    factor = 3
    class Triple(nn.Module):
        def forward(self, x):
            return factor * x

    module = nn.Sequential(nn.Linear(300, 300), Double(), nn.Linear(300, 300), Triple()).eval()
    x = torch.randn(64, 300)
    pipe = Sequential(module, parts=2, on="process")
    with torch.no_grad():
        assert torch.allclose(pipe(x), module(x), atol=1e-4)
        assert all(torch.allclose(y, module(x), atol=1e-4) for y in pipe.stream([x] * 5))
    print("fine")
    return pipe

if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    forgotten = main()
    left = forgotten.stream(torch.ones(64, 300) for _ in range(10 ** 9))
    next(left)
"""


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_program_with_a_pipe(method: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run([*PYTHON, program, method], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


INTERRUPTED = """
import os
import signal
import sys
import torch
from torch import nn
from flowchan.pipelines import Sequential

def batches():
    for number in range(10 ** 9):
        if number == 20:
            os.kill(os.getpid(), signal.SIGINT)
        yield torch.ones(8, 3)

with Sequential([nn.Linear(3, 3), nn.Linear(3, 3)], on=sys.argv[1]) as pipe:
    try:
        for _ in pipe.stream(batches()):
            pass
    except KeyboardInterrupt:
        print("interrupted", tuple(pipe(torch.ones(4, 3)).shape))
"""


@pytest.mark.parametrize("on", ["thread", "process"])
def test_ctrl_c_ends_a_stream_and_the_pipe_goes_on(on: str) -> None:
    done = subprocess.run([*PYTHON, "-c", INTERRUPTED, on], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted (4, 3)\n", "")
