"""A pipe inside of torch's ``DistributedDataParallel`` is trained as the plain module is inside of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import contextlib
import copy
import sys
import torch
from torch import distributed, multiprocessing, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from flowchan.pipelines import Sequential

def counted(state, bucket):
    state.append(bucket.index())
    return allreduce_hook(None, bucket)

def trained(rank, wrapped, optimizer):
    generator = torch.Generator().manual_seed(10 + rank)  # every rank has its own batches
    for step in range(4):
        x = torch.randn(8, 6, generator=generator)
        target = torch.randint(5, (8,), generator=generator)
        optimizer.zero_grad()
        with wrapped.no_sync() if step == 1 else contextlib.nullcontext():
            cross_entropy(wrapped(x), target).backward()
        optimizer.step()

def work(rank, file, on):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(rank)  # the wrapper makes the parameters those of rank 0
    module = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 5))
    plain = copy.deepcopy(module)
    with Sequential(module, parts=2, on=on, chunks=3) as pipe:
        synchronised = []
        for each in (pipe, plain):
            wrapped = DistributedDataParallel(each)
            if each is pipe:
                wrapped.register_comm_hook(synchronised, counted)
            trained(rank, wrapped, torch.optim.Adam(wrapped.parameters(), 0.01))
        for mine, other in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
        assert len(synchronised) == 3, synchronised  # once per step, but for that without
    distributed.destroy_process_group()

if __name__ == "__main__":
    multiprocessing.start_processes(work, sys.argv[1:], 2, start_method="fork")  # torch is imported once
    print("the same")
"""


@pytest.mark.parametrize("on", ["thread", "process"])
def test_two_ranks_learn_what_they_learn_with_the_plain_module(on: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-W", "ignore", program, tmp_path / "meeting", on]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "the same\n"), done.stderr
