"""One rank of a program on torch.distributed: every case by the backend that is named, and what came out of
it as text. Arguments: backend, or "over hosts", rank, size, a file for the store."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import flowchan.collective.torch_backend  # noqa: F401
from flowchan.collective import gathering

Case = Callable[[], Any]
CASES: dict[str, Case] = {}


LACKS = "this backend lacks it"


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def mine(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * seed + dist.get_rank()))


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


@case
def all_reduce() -> Any:
    found = []
    for length in (1, 1000, 300_000):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
            dist.all_reduce(x := mine(length), op)
            found.append(x)
    dist.all_reduce(x := torch.arange(5) + rank(), dist.ReduceOp.BOR)
    return [*found, x]


@case
def all_reduce_async() -> Any:
    many = [mine(50_000, seed=i) for i in range(8)]
    works = [dist.all_reduce(x, async_op=True) for x in many]
    for work in works:
        work.wait()
    assert all(work.is_completed() for work in works)
    return many


@case
def not_in_one_piece() -> Any:
    x = mine(30, 40)
    dist.all_reduce(part := x.t())
    return x, part


@case
def broadcast_and_reduce() -> Any:
    dist.broadcast(a := mine(70_000), 1)
    dist.reduce(b := mine(1000), 1)
    return a, b if rank() == 1 else None


@case
def all_gather() -> Any:
    parts = [mine_of(r, 10 + r) for r in range(size())]
    if dist.get_backend() != "gloo":  # which has no uneven one
        parts = [torch.empty(10 + r) for r in range(size())]
        dist.all_gather(parts, mine(10 + rank()))
    whole = torch.empty(size() * 100_000)
    dist.all_gather_into_tensor(whole, mine(100_000))
    return parts, whole


@case
def reduce_scatter() -> Any:
    dist.reduce_scatter(a := torch.empty(10), list(mine(10 * size()).split(10)))
    dist.reduce_scatter_tensor(b := torch.empty(50_000), mine(50_000 * size()))
    return a, b


@case
def gather_and_scatter() -> Any:
    root = rank() == 1
    parts = [torch.empty(7) for _ in range(size())] if root else None
    dist.gather(mine(7), parts, dst=1)
    dist.scatter(x := torch.empty(9), list(mine(size(), 9)) if root else None, src=1)
    return parts, x


@case
def all_to_all() -> Any:
    dist.all_to_all_single(a := torch.empty(6 * size()), mine(6 * size()))
    sends = [rank() + to + 1 for to in range(size())]
    comes = [source + rank() + 1 for source in range(size())]
    dist.all_to_all_single(b := torch.empty(sum(comes), 3), mine(sum(sends), 3), comes, sends)
    if dist.get_backend() == "gloo":
        return a, b, [mine_of(r, 4 * size())[4 * rank() : 4 * rank() + 4] for r in range(size())]
    out = [torch.empty(4) for _ in range(size())]
    dist.all_to_all(out, list(mine(4 * size()).split(4)))
    return a, b, out


def mine_of(other: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(other))


@case
def messages() -> Any:
    right, left = (rank() + 1) % size(), (rank() - 1) % size()
    x = torch.empty(90_000)
    operations = [dist.P2POp(dist.irecv, x, left), dist.P2POp(dist.isend, mine(90_000), right)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    y = torch.empty(3)
    if rank() == 0:
        dist.send(torch.ones(3), 1)
    elif rank() == 1:
        dist.recv(y, 0)
    return x, y if rank() == 1 else None


@case
def objects() -> Any:
    found: list[Any] = [None] * size()
    dist.all_gather_object(found, {"rank": rank(), "text": "x" * 1000 * rank()})
    shared = [{"from": rank()}, rank()]
    dist.broadcast_object_list(shared, 1)
    out: list[Any] = [None]
    dist.scatter_object_list(out, [f"part {r}" for r in range(size())], 0)
    return json.dumps([found, shared, out])


@case
def groups() -> Any:
    pairs = [dist.new_group([r]) for r in range(size())]
    dist.all_reduce(a := mine(5), group=pairs[rank()])
    whole = dist.new_group(list(range(size())))
    dist.all_reduce(b := mine(5), group=whole)
    dist.barrier(group=whole)
    return a, b


@case
def functional_collectives() -> Any:
    group = dist.group.WORLD
    return (
        functional.all_reduce(mine(1000), "sum", group) + 0,
        functional.all_gather_tensor(mine(6, 2), 0, group) + 0,
        functional.reduce_scatter_tensor(mine(6 * size(), 2), "sum", 0, group) + 0,
        functional.broadcast(mine(10), 1, group) + 0,
    )


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.BatchNorm1d(300), nn.Linear(300, 5))


def trained(net: Any, steps: int = 4) -> Any:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(mine(16, 20, seed=step)), mine(16, 5, seed=step + 50))
        loss.backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


@case
def ddp() -> Any:
    return trained(DistributedDataParallel(model()))


@case
def ddp_in_small_buckets() -> Any:
    return trained(DistributedDataParallel(model(), bucket_cap_mb=0.01, gradient_as_bucket_view=True))


@case
def ddp_static_graph() -> Any:
    return trained(DistributedDataParallel(model(), static_graph=True))


@case
def ddp_unused_parameters() -> Any:
    return trained(DistributedDataParallel(model(), find_unused_parameters=True))


@case
def ddp_no_sync() -> Any:
    net = DistributedDataParallel(model())
    with net.no_sync():
        net(mine(16, 20)).sum().backward()
    net(mine(16, 20, seed=1)).sum().backward()
    return [p.grad for p in net.parameters()]


@case
def ddp_join_with_uneven_inputs() -> Any:
    net = DistributedDataParallel(nn.Linear(20, 5))
    with net.join():
        for step in range(3 + rank()):
            net(mine(4, 20, seed=step)).sum().backward()
    return [p.grad for p in net.parameters()]


def fsdp2() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = model()
    fully_shard(net, mesh=init_device_mesh("cpu", (size(),)))
    return [p.full_tensor() for p in trained(net)]  # type: ignore[attr-defined]


if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 6):  # before, it wanted CUDA
    case(fsdp2)


@case
def tensor_parallel() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
    mesh = init_device_mesh("cpu", (size(),))
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return net(mine_of(0, 8, 20)).detach()


@case
def receive_from_anybody() -> Any:
    if rank():
        dist.send(mine(3), 0)
        dist.send(mine(4), 0, tag=7)
        return None
    x, y = torch.empty(3), torch.empty(4)
    return dist.recv(x), dist.recv(y, tag=7), x, y


@case
def receive_from_anybody_while_one_member_is_waited_for() -> Any:
    """Each gets what has its tag, in order, whoever of the two has received it."""
    tags = [7, 8, 8, 7, 7, 7, 8, 7, 8, 8] * 5
    if rank():
        for number, tag in enumerate(tags):
            if rank() == 1:
                dist.send(torch.tensor([float(number)]), 0, tag=tag)
        return None
    found = [torch.empty(1) for _ in tags]
    sources = {7: 1, 8: None}
    works = [dist.irecv(x, sources[tag], tag=tag) for x, tag in zip(found, tags, strict=True)]
    for work in works:
        work.wait()
    return [x.item() for x in found]


def text(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        content = hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()[:16]
        return f"{value.dtype}{list(value.shape)} {content}"
    return [text(one) for one in value] if isinstance(value, list | tuple) else str(value)


def main(backend: str, number: str, count: str, store: str) -> None:
    torch.set_num_threads(1)
    if backend == "over hosts":
        backend, gathering.this_host = "flowchan", lambda: f"host {number}"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=int(number), world_size=int(count))
    found = {}
    for name, function in CASES.items():
        print(name, file=sys.stderr, flush=True)
        try:
            found[name] = text(function())
        except RuntimeError as error:
            if "does not support" not in str(error):
                raise
            found[name] = LACKS
    dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
