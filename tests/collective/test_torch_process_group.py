"""Test other features that torch's users expect of a process group: limits, errors and events."""

from __future__ import annotations

import subprocess
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("torch")
from support.preloaded_programs import Template

START = """
import sys, warnings
from datetime import timedelta
import torch, torch.distributed as dist
import flowchan.collective.torch.backend
rank, store, size = int(sys.argv[1]), "file://" + sys.argv[2], int(sys.argv[3])

def init(**options):
    dist.init_process_group("flowchan", init_method=store, rank=rank, world_size=size, **options)

def failed(call):
    try:
        call()
    except RuntimeError as error:
        print(type(error).__name__, error)
    else:
        print("no error")
"""


def lines_of_ranks(programs: Template, store: Path, program: str, size: int = 2) -> list[list[str]]:
    """Return the lines that each rank of a program has printed."""
    ranks = [
        programs.popen(
            *("-c", START + textwrap.dedent(program), rank, store, size), stdout=subprocess.PIPE, text=True
        )
        for rank in range(size)
    ]
    return [rank.communicate(timeout=100)[0].splitlines() for rank in ranks]


DDP = """
    from torch.profiler import ProfilerActivity, profile

    init()
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH, bias=False))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(6):
            net(torch.ones(2, WIDTH)).sum().backward()
        dist.barrier()
    events = [event for event in profiler.events() if event.name.startswith("flowchan:")]
    reductions = [event for event in events if event.name == "flowchan:all_reduce"]
    print(len(reductions), all(event.cpu_time > 0 for event in reductions))
    print("flowchan:broadcast" in {event.name for event in events}, events[-1].name)
"""


@pytest.mark.parametrize("width", [10, 300])
def test_profiler_records_each_allreduce_of_ddp(width: int, torch_programs: Template, tmp_path: Path) -> None:
    """A small operation runs in the calling thread, and a large operation runs in another thread."""
    found = lines_of_ranks(torch_programs, tmp_path / "store", DDP.replace("WIDTH", str(width)))
    for lines in found:
        assert [line for line in lines if "USDT" not in line] == ["6 True", "True flowchan:barrier"]


def test_profiler_records_operations_and_messages(torch_programs: Template, tmp_path: Path) -> None:
    program = """
        from torch.profiler import profile

        init()
        x, parts = torch.ones(2), [torch.ones(2) for _ in range(size)]
        with profile() as profiler:
            dist.all_reduce(x)
            dist.broadcast(x, 0)
            dist.reduce(x, 0)
            dist.all_gather(parts, x)
            dist.gather(x, parts if rank == 0 else None)
            dist.scatter(x, parts if rank == 0 else None)
            dist.reduce_scatter(x, parts)
            dist.all_to_all(parts, [x.clone(), x.clone()])
            dist.recv(x, 0) if rank else dist.send(x, 1)
        events = [event.name for event in profiler.events() if event.name.startswith("flowchan:")]
        print(*[name.removeprefix("flowchan:") for name in events])
    """
    found = lines_of_ranks(torch_programs, tmp_path / "store", program)
    common = "all_reduce broadcast reduce all_gather gather scatter reduce_scatter all_to_all"
    assert [lines[-1] for lines in found] == [f"{common} send", f"{common} recv"]


def test_timeout_of_the_process_group_limits_operations(torch_programs: Template, tmp_path: Path) -> None:
    program = """
        init(timeout=timedelta(seconds=60))
        short = dist.new_group(timeout=timedelta(seconds=0.2))
        if rank == 0:
            failed(lambda: dist.barrier(short))
            failed(lambda: dist.recv(torch.ones(1), 1, short))
            large = torch.ones(100_000)
            failed(dist.all_reduce(large, group=dist.new_group([0, 1], timeout=timedelta(seconds=0.2)),
                                   async_op=True).wait)
        else:
            dist.new_group([0, 1], timeout=timedelta(seconds=0.2))
        dist.barrier()
    """
    lines, _ = lines_of_ranks(torch_programs, tmp_path / "store", program)
    start = "OperationTimeout [flowchan] Timed out (timeout=0.2 s): "
    assert len(lines) == 3
    assert all(line.startswith(start) for line in lines), lines
    assert "barrier of a group of 2 timed out: rank 1 (process" in lines[0]
    assert "receive: no message from rank 1 arrived in time" in lines[1]
    assert "allreduce of a group of 2 timed out: rank 1 (process" in lines[2]


def test_default_timeout_of_torch_limits_no_operation(torch_programs: Template, tmp_path: Path) -> None:
    """torch does not report whether the program set this timeout, so flowchan ignores the default."""
    program = """
        init()
        print(dist.group.WORLD._limit)
        dist.destroy_process_group()
        store += " again"
        init(timeout=timedelta(minutes=29))
        print(dist.group.WORLD._limit)
    """
    (lines,) = lines_of_ranks(torch_programs, tmp_path / "store", program, 1)
    assert lines == ["None", "1740.0"]


ABSENT = """
    init()
    limit = timedelta(seconds=60 if rank else 0.3)
    dist.monitored_barrier(timeout=timedelta(seconds=60))
    receive = dist.irecv(x := torch.zeros(1), 0) if rank == 2 else None  # must not get a barrier's message
    if rank in (0, 2):
        failed(lambda: dist.monitored_barrier(timeout=limit, wait_all_ranks=ALL))
    dist.all_reduce(ranks := torch.ones(1))  # the group can still be used
    if rank == 0:
        dist.send(torch.tensor([7.0]), 2)
    if rank in (1, 3):
        failed(lambda: dist.monitored_barrier(timeout=limit))
    dist.monitored_barrier(timeout=timedelta(seconds=60))
    if receive:
        receive.wait()
        print(x.item(), ranks.item())
"""


@pytest.mark.any_value
@pytest.mark.parametrize("every", [False, True])
def test_monitored_barrier_names_absent_ranks_on_all_ranks(
    every: bool, torch_programs: Template, tmp_path: Path
) -> None:
    program = ABSENT.replace("ALL", str(every))
    found = lines_of_ranks(torch_programs, tmp_path / "store", program, 4)
    absent = f"{'Ranks 1, 3' if every else 'Rank 1'} failed to pass monitoredBarrier in 300 ms"
    assert found[0] == [f"DistBackendError [Rank 0]: {absent}"]
    for rank in (1, 2, 3):
        assert found[rank][0] == (
            f"DistBackendError Rank {rank} successfully reached monitoredBarrier, but received errors while "
            f"waiting for send/recv from rank 0: {absent}"
        )
    assert found[2][1:] == ["7.0 4.0"]


def test_monitored_barrier_of_other_backends_is_unchanged(torch_programs: Template, tmp_path: Path) -> None:
    program = """
        init()
        gloo = dist.new_group(backend="gloo")
        dist.monitored_barrier(gloo, timedelta(seconds=60))
        part = dist.new_group([0])
        dist.monitored_barrier(part, 60.0)
        dist.group.WORLD.monitored_barrier()
        print("passed")
    """
    found = lines_of_ranks(torch_programs, tmp_path / "store", program)
    assert [lines[-1] for lines in found] == ["passed", "passed"]


def test_allreduce_sums_sparse_tensors(torch_programs: Template, tmp_path: Path) -> None:
    program = """
        init()
        warnings.simplefilter("ignore")
        at = torch.tensor([[0, 2 + rank, 0]])  # two values at one index, and an index of this rank
        x = torch.sparse_coo_tensor(at, torch.tensor([1.0, 2.0, 3.0]) + rank, (5,))
        dist.all_reduce(x)
        print(x.to_dense().tolist())
        table = torch.nn.Embedding(4, 1, sparse=True)
        torch.nn.init.ones_(table.weight)
        net = torch.nn.parallel.DistributedDataParallel(table)
        net(torch.tensor([rank, 3])).sum().backward()
        print(table.weight.grad.to_dense().flatten().tolist())
        try:
            dist.all_reduce(x, dist.ReduceOp.MAX)
        except ValueError as error:
            print(error)
    """
    found = lines_of_ranks(torch_programs, tmp_path / "store", program)
    message = "all_reduce: the reduction of sparse tensors must be sum, got max"
    assert found == [["[10.0, 0.0, 2.0, 3.0, 0.0]", "[0.5, 0.5, 0.0, 1.0]", message]] * 2
