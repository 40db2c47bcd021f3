"""Test that a pipe inside torch's ``DistributedDataParallel`` or FSDP trains like the plain module.

Unsupported kinds of sharding raise.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.preloaded_programs import Template

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
    generator = torch.Generator().manual_seed(10 + rank)  # each rank has other batches
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
    torch.manual_seed(rank)  # the wrapper copies the parameters of rank 0
    module = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 5))
    plain = copy.deepcopy(module)
    with Sequential(module, parts=2, on=on, chunks=3) as pipe:
        synchronised = []
        for each in (pipe, plain):
            wrapped = DistributedDataParallel(each)
            if each is pipe:
                wrapped.register_comm_hook(synchronised, counted)
            trained(rank, wrapped, torch.optim.Adam(wrapped.parameters(), 0.01))
        for actual, other in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(actual, other, rtol=1e-12, atol=1e-12)
        assert len(synchronised) == 3, synchronised  # once per step, except under no_sync()
    distributed.destroy_process_group()

if __name__ == "__main__":
    multiprocessing.start_processes(work, sys.argv[1:], 2, start_method="fork")  # imports torch once
    print("the same")
"""


@pytest.mark.parametrize("on", ["thread", "process"])
def test_pipe_in_ddp_trains_like_the_plain_module(torch_programs: Template, on: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = torch_programs.run("-W", "ignore", program, tmp_path / "meeting", on)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["the same"]), done.stderr


SHARDED = """
import copy
import sys
import torch
from torch import distributed, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from flowchan.pipelines import Sequential

def trained(rank, model, state):
    generator = torch.Generator().manual_seed(10 + rank)  # each rank has other batches
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(3):
        x, target = torch.randn(8, 6, generator=generator), torch.randint(5, (8,), generator=generator)
        optimizer.zero_grad()
        cross_entropy(model(x), target).backward()
        optimizer.step()
    return state(model)

def whole(model):
    return [one.full_tensor() for one in model.parameters()]

def summoned(model):
    with FullyShardedDataParallel.summon_full_params(model):
        return [one.detach().clone() for one in model.parameters()]

def refused(call, *words):
    try:
        call()
    except TypeError as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(words)

def piped(module, on="thread"):
    return Sequential(nn.Sequential(*module[:3]), [2, 1], on=on, chunks=2)

def works(rank, made, mesh):
    expected = trained(rank, DistributedDataParallel(made()), lambda model: list(model.parameters()))
    module = made()
    with piped(module) as pipe:
        model = nn.Sequential(fully_shard(pipe, mesh=mesh), module[3])
        torch.testing.assert_close(trained(rank, fully_shard(model, mesh=mesh), whole), expected)
    module, cpu = made(), torch.device("cpu")
    with piped(module) as pipe:
        model = FullyShardedDataParallel(nn.Sequential(pipe, module[3]), device_id=cpu, use_orig_params=True)
        torch.testing.assert_close(trained(rank, model, summoned), expected)

def raises(made, mesh):
    module, x, cpu = made(), torch.zeros(4, 6), torch.device("cpu")
    fully_shard(module[0], mesh=mesh)
    refused(lambda: piped(module), "layer '0' must not be sharded separately", "fully_shard(pipe)")
    refused(lambda: Sequential(fully_shard(made(), mesh=mesh)), "module must not be sharded separately")
    with piped(made()) as pipe:
        fully_shard(pipe, mesh=mesh)
        refused(lambda: pipe.trainer(loss=cross_entropy), "step-by-step training", "yourself from pipe(x)")
    with piped(made()) as pipe:
        fully_shard(pipe[0], mesh=mesh)
        refused(lambda: pipe(x), "layer '0' must not be sharded separately")
    with piped(made(), "process") as pipe:
        refused(lambda: fully_shard(pipe, mesh=mesh)(x), "a process of a part", "thread")
    with piped(made(), "process") as pipe:
        wrapped = FullyShardedDataParallel(pipe, device_id=cpu, use_orig_params=True)
        refused(lambda: wrapped(x), "a process of a part", "thread")
    with piped(made()) as pipe:
        refused(lambda: FullyShardedDataParallel(pipe, device_id=cpu)(x), "use_orig_params=True")

def work(rank, file):
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 5))
    mesh = init_device_mesh("cpu", (2,))
    works(rank, lambda: copy.deepcopy(module), mesh)
    raises(lambda: copy.deepcopy(module), mesh)
    distributed.destroy_process_group()

if __name__ == "__main__":
    multiprocessing.start_processes(work, sys.argv[1:], 2, start_method="fork")  # imports torch once
    print("the same")
"""


def test_fsdp_around_a_pipe_matches_and_unsupported_sharding_raises(
    torch_programs: Template, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(SHARDED)
    done = torch_programs.run("-W", "ignore", program, tmp_path / "meeting")
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["the same"]), done.stderr
