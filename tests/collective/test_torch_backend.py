"""Test that torch.distributed programs get the same bits with the ``flowchan`` backend as with gloo."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from support.preloaded_programs import Template
from torch_cases import CASES, LACKS

from flowchan.collective.rendezvous import forming
from flowchan.collective.rendezvous.store import meet_by_store

PROGRAM = Path(__file__).with_name("torch_cases.py")

pytestmark = pytest.mark.timeout(600)  # the first test runs all cases with both backends


def answers(programs: Template, backend: str, store: Path) -> list[Any]:
    ranks = [
        programs.popen(
            *(PROGRAM, backend, rank, 2, store),
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    found = [rank.communicate(timeout=500) for rank in ranks]
    for rank, (_, errors) in zip(ranks, found, strict=True):
        assert rank.returncode == 0, errors
    # torch 2.8's gloo also prints lines
    return [json.loads(output.splitlines()[-1]) for output, _ in found]


@pytest.fixture(scope="module")
def found(torch_programs: Template, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Return the results with gloo, with flowchan, and with flowchan on one simulated host per rank."""
    folder = tmp_path_factory.mktemp("stores")
    backends = ("flowchan", "over hosts", "gloo")
    return {backend: answers(torch_programs, backend, folder / backend) for backend in backends}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", ["flowchan", "over hosts"])
def test_results_match_gloo(found: dict[str, list[Any]], backend: str, name: str) -> None:
    if found["gloo"][0][name] == LACKS:
        pytest.skip("this torch's gloo does not support the case: install a newer torch")
    # torch 2.7's gloo computes the sum where FSDP2 requests the mean
    as_in_gloo = "ddp" if name == "fsdp2" else name
    for rank in range(2):
        assert found[backend][rank][name] == found["gloo"][rank][as_in_gloo]


DEATH = """
import os, signal, sys
import torch, torch.distributed as dist
import flowchan.collective.torch.backend
from torch import nn
dist.init_process_group("flowchan", init_method="file://" + sys.argv[2], rank=int(sys.argv[1]), world_size=2)
net = nn.parallel.DistributedDataParallel(nn.Linear(100, 1000))
try:
    for step in range(10**9):
        if dist.get_rank() == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        net(torch.ones(4, 100)).sum().backward()
except Exception as error:
    print(step, "rank 1" in str(error) and "died" in str(error), flush=True)
"""


def test_death_in_ddp_raises_on_the_other_rank(torch_programs: Template, tmp_path: Path) -> None:
    """Other backends leave the other rank hanging."""
    ranks = [
        torch_programs.popen("-c", DEATH, rank, tmp_path / "store", stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    assert ranks[0].communicate(timeout=100)[0] == b"3 True\n"
    assert ranks[1].wait(timeout=100) == -signal.SIGKILL
    assert ranks[1].stdout is not None
    ranks[1].stdout.close()


@pytest.mark.parametrize("hosts", [1, 2])
def test_groups_remove_their_keys_from_the_store(hosts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If keys remained, the next group in the same store would read the last group's values.

    All groups that torchrun starts share one store.
    """
    store, ranks = torch.distributed.HashStore(), {}
    monkeypatch.setattr(forming, "this_host", lambda: f"host {ranks[threading.get_ident()] % hosts}")

    def member(rank: int) -> Any:
        ranks[threading.get_ident()] = rank
        with meet_by_store(store, rank, 2, 60) as g:
            return g.allreduce(1)

    for _ in range(3):
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(member, range(2))) == [2, 2]
        assert store.num_keys() == 0


MISTAKE = """
import sys
import torch, torch.distributed as dist
import flowchan.collective.torch.backend
rank = int(sys.argv[1])
dist.init_process_group("flowchan", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
if rank == 0:
    works = dist.irecv(torch.ones(2), 1), dist.all_reduce(torch.ones(300_000), async_op=True)
    raise ValueError("a mistake")
try:
    dist.recv(torch.ones(2), 0)
except Exception as error:
    print(error)
"""


def test_failed_rank_does_not_wait_for_started_operations(torch_programs: Template, tmp_path: Path) -> None:
    """The other rank waits for the failed rank, so a wait for the other rank's operations would never end."""
    ranks = [
        torch_programs.popen(
            *("-c", MISTAKE, rank, tmp_path / "store"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    (_, errors), (message, _) = (rank.communicate(timeout=100) for rank in ranks)
    assert "ValueError: a mistake" in errors
    assert "rank 0 has left" in message
    assert [rank.returncode for rank in ranks] == [1, 0]


OTHER_PROGRAM = """
import sys
import torch, torch.distributed as dist
import flowchan.collective.torch.backend
dist.init_process_group(sys.argv[1], store=dist.HashStore(), rank=0, world_size=1)
for call in (lambda: dist.all_reduce(torch.ones(2)), dist.barrier):
    try:
        call()
        print("done")
    except ValueError as error:
        print(error)
"""


@pytest.mark.parametrize("named", ["cpu:flowchan,cuda:gloo", "cuda:gloo,cpu:flowchan"])
def test_second_backend_raises(torch_programs: Template, named: str) -> None:
    """torch alone would silently ignore the second backend."""
    program = torch_programs.popen("-c", OTHER_PROGRAM, named, stdout=subprocess.PIPE, text=True)
    lines = program.communicate(timeout=100)[0].splitlines()
    assert len(lines) >= 2
    for line in lines[-2:]:  # torch 2.8's gloo first prints other lines
        assert f'the backend must be just "flowchan", got "{named}"' in line


@pytest.mark.parametrize("named", ["flowchan", "cpu:flowchan", "cpu:flowchan,cuda:nccl"])
def test_nccl_as_second_backend_is_accepted(torch_programs: Template, named: str) -> None:
    program = torch_programs.popen("-c", OTHER_PROGRAM, named, stdout=subprocess.PIPE, text=True)
    assert program.communicate(timeout=100)[0] == "done\ndone\n"


ODD = """
import torch, torch.distributed as dist
import flowchan.collective.torch.backend
dist.init_process_group("flowchan", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(3)
for call in (
    lambda: dist.all_gather([x, x], x),
    lambda: dist.gather(x, [x, x]),
    lambda: dist.scatter(x, [x, x]),
    lambda: dist.reduce_scatter(x, [x, x]),
    lambda: dist.all_to_all([x, x], [x, x]),
    lambda: dist.all_to_all([x], [x, x]),
    lambda: dist.all_gather_into_tensor(torch.empty(6), x),
    lambda: dist.reduce_scatter_tensor(x, torch.ones(6)),
    lambda: dist.broadcast(torch.eye(2).to_sparse(), 0),
):
    try:
        print("no error", call())
    except (ValueError, TypeError) as error:
        print(error)
"""


def test_wrong_list_lengths_and_sparse_tensors_raise(
    torch_programs: Template,
) -> None:
    program = torch_programs.popen("-W", "ignore", "-c", ODD, stdout=subprocess.PIPE, text=True)
    assert program.communicate(timeout=100)[0].splitlines() == [
        "allgather: out must have one part for each of the 1 members, got 2",
        "gather: out must have one part for each of the 1 members, got 2",
        "scatter: xs must have one part for each of the 1 members, got 2",
        "reduce_scatter: input_list must have one part for each of the 1 members, got 2",
        "alltoall: xs must have one part for each of the 1 members, got 2",
        "alltoall: xs must have one part for each of the 1 members, got 2",
        "allgather: out must have room for exactly the 12 bytes from rank 0, got room for 24",
        "reduce_scatter: out must have 6 elements of the input's type, got float32[3]",
        "x must be a dense tensor, got float32[2, 2] with layout sparse_coo; convert it, for example "
        "with .to_dense()",
    ]


DIFFER = """
import sys
import torch, torch.distributed as dist
import flowchan.collective.torch.backend
rank = int(sys.argv[1])
dist.init_process_group("flowchan", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
x, whole = torch.ones(2), [torch.ones(2)] * 2
for calls in (
    (lambda: dist.reduce(x, 0), lambda: dist.reduce_scatter(x, whole)),
    (lambda: dist.gather(x, whole if not rank else None, 0), lambda: dist.gather(x, whole, 1)),
    (lambda: dist.all_gather(whole, x), lambda: dist.all_gather([x.int(), x.int()], x.int())),
    (lambda: dist.all_to_all_single(x, x.clone()), lambda: dist.all_to_all_single(x.int(), x.int())),
    (lambda: dist.all_gather_into_tensor(torch.empty(4, dtype=torch.int32), x),) * 2,
    (lambda: dist.all_gather_coalesced([[x], [x]], [x, x]),) * 2,
):
    try:
        calls[rank]()
    except Exception as error:
        print(str(error).rpartition(" do not match: ")[2])
dist.barrier()
dist.destroy_process_group()
"""


def test_mismatched_torch_calls_raise_on_both_ranks(torch_programs: Template, tmp_path: Path) -> None:
    ranks = [
        torch_programs.popen(
            *("-W", "ignore", "-c", DIFFER, rank, tmp_path / "store"), stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    message = [rank.communicate(timeout=100)[0].splitlines() for rank in ranks]
    assert message[0] == message[1]
    assert message[0] == [
        "rank 0 called reduce(float32[2], 0, 'sum'); rank 1 called reduce_scatter(float32[2], 'sum')",
        "rank 0 called gather([float32[2], float32[0]], 0); "
        "rank 1 called gather([float32[0], float32[2]], 1)",
        "rank 0 called allgather(float32[2]); rank 1 called allgather(int32[2])",
        "rank 0 called alltoall([float32[1], float32[1]]); rank 1 called alltoall([int32[1], int32[1]])",
        "allgather: inputs and outputs must have the same element type, got float32 and int32; convert one "
        "of them",
        "allgather_coalesced: output_tensor_lists[0] must have a tensor for each of the 2 inputs, got 1",
    ]


ON_A_DEVICE = """
import torch, torch.distributed as dist
import flowchan.collective.torch.backend
from flowchan.collective import array_access as arrays
dist.init_process_group("flowchan", store=dist.HashStore(), rank=0, world_size=1)
arrays.finish = lambda x: print("finished", x.device)
try:
    dist.all_reduce(torch.ones(1 << 16, device="meta"))
except TypeError as error:
    print(error)
"""


def test_thread_waits_for_the_device_of_a_tensor(torch_programs: Template) -> None:
    """Groups do not support this device, so the program ends with an error that says so."""
    program = torch_programs.popen("-c", ON_A_DEVICE, stdout=subprocess.PIPE, text=True)
    first, second = program.communicate(timeout=100)[0].splitlines()
    assert first == "finished meta"
    assert "float32[65536] on meta; a meta tensor has no contents" in second
