"""Test programs with a pipe: all start methods, classes defined in the program, Ctrl-C, and exits."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from support.preloaded_programs import Template

QUIET = ("-W", "ignore:Sequential:RuntimeWarning")
"""The models are so small that a pipe may warn that it is slower than the module."""

PROGRAM = """
import copy
import multiprocessing
import sys
from functools import partial
import torch
from torch import nn
from torch.optim import SGD
from flowchan.pipelines import Sequential

class Double(nn.Module):
    def forward(self, x):
        return 2 * x

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.inner(x))

def train():
    scale = 0.5

    def loss(output, target):
        return scale * nn.functional.cross_entropy(output, target)

    module = nn.Sequential(nn.Linear(300, 300), Block(300), Block(300), nn.Linear(300, 10))
    plain = copy.deepcopy(module)
    optimizer = SGD(plain.parameters(), lr=0.1)
    x, target = torch.randn(512, 300), torch.randint(10, (512,))
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(loss(plain(x), target))
        losses[-1].backward()
        optimizer.step()
    pipe = Sequential(module, 2, on="process", chunks=4)
    with pipe.trainer(loss=loss, optimizer=partial(SGD, lr=0.1)) as training:
        found = [training.step(x, target) for _ in range(3)]
    assert torch.allclose(torch.stack(found), torch.stack(losses), atol=1e-4)
    for actual, other in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(actual, other, atol=1e-4)

def infer():
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
    return pipe

if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    # workers started by spawn import everything themselves
    multiprocessing.set_forkserver_preload(["torch._dynamo", "flowchan.pipelines.sequential"])
    torch.manual_seed(0)
    # starts the threads of torch, which a forked process lacks
    torch.ones(300, 300) @ torch.ones(300, 300)
    train()
    forgotten = infer()
    print("fine")
    left = forgotten.stream(torch.ones(64, 300) for _ in range(10 ** 9))
    next(left)
"""


@pytest.mark.parametrize(
    "method",
    [
        "fork",
        "forkserver",
        # each process imports torch, which takes two seconds
        pytest.param("spawn", marks=pytest.mark.long),
    ],
)
def test_program_trains_and_infers_with_pipes(torch_programs: Template, method: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = torch_programs.run(*QUIET, program, method)
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
def test_ctrl_c_ends_a_stream_but_not_the_pipe(torch_programs: Template, on: str) -> None:
    done = torch_programs.run(*QUIET, "-c", INTERRUPTED, on)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted (4, 3)\n", "")


TRAINS = """
import itertools, sys
from functools import partial
import torch
from torch import nn
from torch.optim import SGD
from flowchan.pipelines import Sequential

def main():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    pipe = Sequential(module, 2, on="process", chunks=4)
    with pipe.trainer(loss=nn.functional.cross_entropy, optimizer=partial(SGD, lr=0.1)) as training:
        for number in itertools.count():
            training.step(torch.randn(16, 8), torch.randint(4, (16,)))
            if number == 3:
                print("going", flush=True)

if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.exit(130)
"""


def test_ctrl_c_ends_a_training_program(torch_programs: Template, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(TRAINS)
    process = torch_programs.popen(
        program,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "going\n", process.communicate()
    # send the signal to the whole process group, like Ctrl-C at a terminal
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, out) == (130, "interrupted\n"), err
    assert err.count("\n") == 1
    assert err.startswith("flowchan: stopping")
