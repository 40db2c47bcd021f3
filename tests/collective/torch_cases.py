"""One rank of a torch.distributed program that runs every case and prints the results.

Arguments: the backend or "over hosts", the rank, the size, and the file for the store.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch_module_cases  # noqa: F401
from torch.distributed import get_rank as rank
from torch.distributed import get_world_size as size
from torch_case_table import CASES, FOLDER, LACKS, case, random_tensor, random_tensor_of

import flowchan.collective.torch.backend  # noqa: F401
from flowchan.collective.rendezvous import forming


@case
def all_reduce() -> Any:
    found = []
    for length in (1, 1000, 300_000):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
            dist.all_reduce(x := random_tensor(length), op)
            found.append(x)
    dist.all_reduce(x := torch.arange(5) + rank(), dist.ReduceOp.BOR)
    return [*found, x]


@case
def all_reduce_async() -> Any:
    many = [random_tensor(50_000, seed=i) for i in range(8)]
    works = [dist.all_reduce(x, async_op=True) for x in many]
    for work in works:
        work.wait()
    assert all(work.is_completed() for work in works)
    return many


@case
def not_in_one_piece() -> Any:
    x = random_tensor(30, 40)
    dist.all_reduce(part := x.t())
    return x, part


@case
def broadcast_and_reduce() -> Any:
    dist.broadcast(a := random_tensor(70_000), 1)
    dist.reduce(b := random_tensor(1000), 1)
    return a, b if rank() == 1 else None


@case
def all_gather() -> Any:
    parts = [random_tensor_of(r, 10 + r) for r in range(size())]
    if dist.get_backend() != "gloo":  # gloo does not support uneven sizes
        parts = [torch.empty(10 + r) for r in range(size())]
        dist.all_gather(parts, random_tensor(10 + rank()))
    whole = torch.empty(size() * 100_000)
    dist.all_gather_into_tensor(whole, random_tensor(100_000))
    return parts, whole


@case
def coalesced() -> Any:
    """Gather one tensor per rank, so that swapped indexes would show in the results."""
    given = [random_tensor(5, seed=number) for number in range(size())]
    found = [[torch.empty(5) for _ in given] for _ in range(size())]
    dist.all_gather_coalesced(found, given)
    dist.all_reduce_coalesced(given)
    return found, given


@case
def reduce_scatter() -> Any:
    dist.reduce_scatter(a := torch.empty(10), list(random_tensor(10 * size()).split(10)))
    dist.reduce_scatter_tensor(b := torch.empty(50_000), random_tensor(50_000 * size()))
    return a, b


@case
def gather_and_scatter() -> Any:
    root = rank() == 1
    parts = [torch.empty(7) for _ in range(size())] if root else None
    dist.gather(random_tensor(7), parts, dst=1)
    dist.scatter(x := torch.empty(9), list(random_tensor(size(), 9)) if root else None, src=1)
    return parts, x


@case
def all_to_all() -> Any:
    dist.all_to_all_single(a := torch.empty(6 * size()), random_tensor(6 * size()))
    sends = [rank() + to + 1 for to in range(size())]
    comes = [source + rank() + 1 for source in range(size())]
    dist.all_to_all_single(b := torch.empty(sum(comes), 3), random_tensor(sum(sends), 3), comes, sends)
    if dist.get_backend() == "gloo":
        return a, b, [random_tensor_of(r, 4 * size())[4 * rank() : 4 * rank() + 4] for r in range(size())]
    out = [torch.empty(4) for _ in range(size())]
    dist.all_to_all(out, list(random_tensor(4 * size()).split(4)))
    return a, b, out


@case
def messages() -> Any:
    right, left = (rank() + 1) % size(), (rank() - 1) % size()
    x = torch.empty(90_000)
    operations = [dist.P2POp(dist.irecv, x, left), dist.P2POp(dist.isend, random_tensor(90_000), right)]
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
    gathered: list[Any] | None = [None] * size() if rank() == 1 else None
    dist.gather_object({"length": "y" * rank()}, gathered, dst=1)
    sent: list[Any] = [("to", 1), {"text": "z" * 1000}] if rank() == 0 else [None, None]
    if rank() == 0:
        dist.send_object_list(sent, dst=1)
    elif rank() == 1:
        dist.recv_object_list(sent, src=0)
    return json.dumps([found, shared, out, gathered, sent])


@case
def groups() -> Any:
    pairs = [dist.new_group([r]) for r in range(size())]
    dist.all_reduce(a := random_tensor(5), group=pairs[rank()])
    whole = dist.new_group(list(range(size())))
    dist.all_reduce(b := random_tensor(5), group=whole)
    dist.barrier(group=whole)
    return a, b


@case
def functional_collectives() -> Any:
    group = dist.group.WORLD
    return (
        functional.all_reduce(random_tensor(1000), "sum", group) + 0,
        functional.all_gather_tensor(random_tensor(6, 2), 0, group) + 0,
        functional.reduce_scatter_tensor(random_tensor(6 * size(), 2), "sum", 0, group) + 0,
        functional.broadcast(random_tensor(10), 1, group) + 0,
    )


@case
def one_tensor_in_place_of_lists() -> Any:
    group: Any = dist.distributed_c10d._get_default_group()
    group.allreduce(a := random_tensor(5)).wait()
    group.allreduce(b := random_tensor(5), dist.ReduceOp.MAX).wait()
    group.broadcast(c := random_tensor(5), 1).wait()
    group.reduce(d := random_tensor(5), 1, dist.ReduceOp.MIN).wait()
    parts = [torch.empty(5) for _ in range(size())]
    group.allgather(parts, random_tensor(5)).wait()
    group.gather(
        e := [torch.empty(5) for _ in range(size() if rank() == 1 else 0)], random_tensor(5), 1
    ).wait()
    group.scatter(f := torch.empty(5), list(random_tensor(size(), 5)) if rank() == 1 else [], 1).wait()
    group.reduce_scatter(g := torch.empty(5), list(random_tensor(size(), 5))).wait()
    return a, b, c, d if rank() == 1 else None, parts, e, f, g


@case
def receive_from_any_source() -> Any:
    if rank():
        dist.send(random_tensor(3), 0)
        dist.send(random_tensor(4), 0, tag=7)
        return None
    x, y = torch.empty(3), torch.empty(4)
    return dist.recv(x), dist.recv(y, tag=7), x, y


@case
def receive_from_any_source_while_receiving_from_one() -> Any:
    """Each receive gets the messages with its tag in order, even if the other receive has read them."""
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
        content = hashlib.sha256(value.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
        return f"{value.dtype}{list(value.shape)} {content}"
    return [text(one) for one in value] if isinstance(value, list | tuple) else str(value)


def main(backend: str, number: str, count: str, store: str) -> None:
    torch.set_num_threads(1)
    FOLDER.append(store)
    if backend == "over hosts":
        backend, forming.this_host = "flowchan", lambda: f"host {number}"
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
