"""Rank of benchmarks/collectives.py, which runs the requested operations and reports their times.

Arguments: the kind of rank, and the address of the socket to connect to.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

Operation = Callable[[], Any]
LINKED = "flowchan over hosts"
BACKEND = "flowchan in DDP"


class Flowchan:
    def __init__(self) -> None:
        self.group = self.made()
        self.size, self.barrier = self.group.size, self.group.barrier

    def made(self) -> Any:
        from flowchan import collective

        return collective.group()

    def prepare(self, operation: str, x: Any, whole: Any) -> Operation:
        g = self.group
        parts, room = np.split(whole, self.size), np.split(np.empty_like(whole), self.size)
        if operation == "training step":
            return self.training(len(x))
        return {
            "allreduce": lambda: g.allreduce(x),
            "broadcast": lambda: g.broadcast(x),
            "allgather": lambda: g.allgather(parts[g.rank], out=room),
            "reduce_scatter": lambda: g.reduce_scatter(whole, out=room[0]),
            "alltoall": lambda: g.alltoall(parts, out=room),
            "objects": lambda: g.allgather({"content": x.tobytes(), "number": 1}),
            "barrier": lambda: g.barrier(),
        }[operation]

    def training(self, elements: int) -> Operation:
        """Create a training step that averages its gradients with ``Gradients``."""
        from flowchan.collective.training.gradients import Gradients

        net = dense(elements)
        gradients = Gradients(net, self.group)
        return step(net, gradients.wait)


class Linked(Flowchan):
    """Rank that acts as if it were alone on a host. Loopback connects it to the other ranks."""

    def made(self) -> Any:
        from flowchan.collective.rendezvous.address import meet_at

        at, rank = f"127.0.0.1:{os.environ['MASTER_PORT']}", int(os.environ["RANK"])
        return meet_at(at, bytes(16), rank, int(os.environ["WORLD_SIZE"]), 60, host=str(rank))


class Mpi:
    def __init__(self) -> None:
        from mpi4py import MPI

        self.mpi, self.world = MPI, MPI.COMM_WORLD
        self.size, self.barrier = self.world.size, self.world.Barrier

    def prepare(self, operation: str, x: Any, whole: Any) -> Operation:
        c, part, room = self.world, np.split(whole, self.size)[0], np.empty_like(whole)
        return {
            "allreduce": lambda: c.Allreduce(self.mpi.IN_PLACE, x),
            "broadcast": lambda: c.Bcast(x),
            "allgather": lambda: c.Allgather(part, room),
            "reduce_scatter": lambda: c.Reduce_scatter_block(whole, part.copy()),
            "alltoall": lambda: c.Alltoall(whole, room),
            "objects": lambda: c.allgather({"content": x.tobytes(), "number": 1}),
            "barrier": lambda: c.Barrier(),
        }[operation]


def dense(elements: int) -> Any:
    import torch

    torch.set_num_threads(1)
    return torch.nn.Linear(elements // 256, 256, bias=False)


def step(net: Any, wait: Operation) -> Operation:
    import torch

    x = torch.ones(8, next(net.parameters()).shape[1])

    def run() -> None:
        net(x).sum().backward()
        wait()

    return run


class Gloo:
    def backend(self) -> str:
        return "gloo"

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group(self.backend())
        self.torch, self.dist = torch, dist
        self.size, self.barrier = dist.get_world_size(), dist.barrier

    def prepare(self, operation: str, x: Any, whole: Any) -> Operation:
        d, torch = self.dist, self.torch
        t, w = torch.from_numpy(x), torch.from_numpy(whole)
        part, room = w[: len(whole) // self.size].clone(), torch.empty_like(w)
        found: list[Any] = [None] * self.size
        if operation == "training step":
            return self.training(len(x))
        return {
            "allreduce": lambda: d.all_reduce(t),
            "broadcast": lambda: d.broadcast(t, 0),
            "allgather": lambda: d.all_gather_into_tensor(room, part),
            "reduce_scatter": lambda: d.reduce_scatter_tensor(part, w),
            "alltoall": lambda: d.all_to_all_single(room, w),
            "objects": lambda: d.all_gather_object(found, {"content": x.tobytes(), "number": 1}),
            "barrier": lambda: d.barrier(),
        }[operation]

    def training(self, elements: int) -> Operation:
        """Create a training step that averages its gradients with DistributedDataParallel."""
        net = self.torch.nn.parallel.DistributedDataParallel(dense(elements))
        return step(net, lambda: None)


class Backend(Gloo):
    """Rank that uses torch.distributed with the flowchan backend."""

    def backend(self) -> str:
        import flowchan.collective.torch.backend  # noqa: F401

        return "flowchan"


def main(kind: str, address: str) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # newer versions of torch rename these functions
    sides: dict[str, type[Flowchan | Mpi | Gloo]] = {
        "flowchan": Flowchan,
        LINKED: Linked,
        BACKEND: Backend,
        "gloo": Gloo,
    }
    side = sides.get(kind, Mpi)()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(f"\0{address}")
        with sock.makefile("rw") as file:
            for line in file:
                operation, size, count = json.loads(line)
                x = np.ones(max(1, size // 4), np.float32)
                whole = np.ones(max(1, len(x) // side.size) * side.size, np.float32)
                do = side.prepare(operation, x, whole)
                do()
                side.barrier()
                began = time.perf_counter()
                for _ in range(count):
                    do()
                file.write(f"{time.perf_counter() - began}\n")
                file.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
