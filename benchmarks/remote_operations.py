"""Programs of the benchmark ``remote_tensors``: each measures one system in a new process.

``python -m benchmarks.remote_operations SYSTEM COUNT`` prints the results as JSON, which maps the name of
each measurement to seconds. Only the programs that measure flowchan import flowchan, because Monarch may need
another Python.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import torch

Figures = dict[str, float]
Operation = Callable[[Any, Any], Any]

SIDE = 64
"""Number of rows and of columns of the tensors in measurements of single operations."""
OPERATIONS: dict[str, Operation] = {
    "add": lambda a, b: a + b,
    "mm": lambda a, b: a @ b,
    "view": lambda a, _: a.view(SIDE * SIDE),
    "add_": lambda a, b: a.add_(b),
    "a + 1.5": lambda a, _: a + 1.5,
}
COPIES_MB = (4, 64)
PAGE = 1024
"""Number of float32 values in a page of memory."""
REPETITIONS = 7


# --- clocks ---


def _descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *_descendants(int(child))]
    return found


def _clocks(workers: list[int]) -> tuple[float, float, float]:
    """Return the CPU seconds of this thread, of this process, and of the worker processes."""
    # The argument is the id of another process's CPU clock; see clock_getcpuclockid(3).
    theirs = sum(time.clock_gettime((~pid << 3) | 2) for pid in workers)
    return time.thread_time(), time.process_time(), theirs


def _cpu_per_call(
    count: int, run: Callable[[Operation, int], object], operations: dict[str, Operation]
) -> Figures:
    """Return the CPU seconds per call, for each operation and each clock.

    ``run(operation, n)`` issues an operation n times, and waits until all n calls have finished.
    """
    workers = _descendants(os.getpid())
    figures = {}
    for name, operation in operations.items():
        run(operation, max(10, count // 10))
        samples = []
        for _ in range(REPETITIONS):
            before = _clocks(workers)
            run(operation, count)
            samples.append([now - then for now, then in zip(_clocks(workers), before, strict=True)])
        for kind, spent in zip(("thread", "process", "worker"), zip(*samples, strict=True), strict=True):
            figures[f"{name}: {kind}"] = statistics.median(spent) / count
    return figures


def _per_call(count: int, call: Callable[[], object], clock: Callable[[], float]) -> float:
    """Return the seconds per call on a clock, as the median of several repetitions."""
    call()
    samples = []
    for _ in range(REPETITIONS):
        began = clock()
        for _ in repeat(None, count):
            call()
        samples.append((clock() - began) / count)
    return statistics.median(samples)


# --- flowchan ---


@contextmanager
def _nodes(count: int) -> Iterator[Any]:
    from flowchan.pipelines import RemoteNodes

    with RemoteNodes(count) as nodes:
        yield nodes


def flowchan(count: int) -> Figures:
    """Issue operations on a node."""
    with _nodes(1) as nodes:
        a, b = (torch.ones(SIDE, SIDE).to(nodes[0]) for _ in range(2))

        def run(operation: Operation, times: int) -> None:
            for _ in repeat(None, times):
                operation(a, b)
            nodes.sync()

        with torch.no_grad():
            return _cpu_per_call(count, run, OPERATIONS)


def flowchan_in_python(count: int) -> Figures:
    """Issue operations on a node without the native part."""
    import flowchan_torch.native

    flowchan_torch.native.load = lambda source=None: None
    return flowchan(count)


def local(count: int) -> Figures:
    """Run the operations in this process."""
    a, b = torch.ones(SIDE, SIDE), torch.ones(SIDE, SIDE)

    def run(operation: Operation, times: int) -> None:
        for _ in repeat(None, times):
            operation(a, b)

    with torch.no_grad():
        return _cpu_per_call(count, run, OPERATIONS)


def waits(count: int) -> Figures:
    """Wait for a node: for a value, for a small tensor, and for all commands."""
    with _nodes(1) as nodes:
        value, small = torch.ones((), device=nodes[0]), torch.ones(4, 4, device=nodes[0])
        calls: dict[str, Callable[[], object]] = {
            "item()": value.item,
            "cpu() of 4 x 4 values": small.cpu,
            "sync()": nodes.sync,
        }
        return {name: _per_call(count, call, time.perf_counter) for name, call in calls.items()}


def copies(count: int) -> Figures:
    """Copy tensors to a node, from a node and between nodes. Each copy is read once per page."""
    figures = {}
    with _nodes(2) as nodes:
        for size in COPIES_MB:
            given, out = torch.ones(size << 18), torch.ones(size << 18)
            there = given.to(nodes[0])
            calls: dict[str, Callable[[], Any]] = {
                "memcpy": partial(out.copy_, given),
                "to a node": partial(given.to, nodes[0]),
                "from a node": there.cpu,
                "from node to node": partial(there.to, nodes[1]),
            }
            for name, call in calls.items():

                def several(call: Callable[[], Any] = call) -> None:
                    for _ in repeat(None, count):
                        call()[::PAGE].sum()
                    nodes.sync()

                figures[f"{size} MB: {name}"] = _per_call(1, several, time.perf_counter) / count
    return figures


# --- training ---


def training(count: int) -> Figures:
    """Train a small network in this process and on a node."""
    figures = {}
    with _nodes(1) as nodes:
        for optimizer in ("SGD", "Adam"):
            for name, device in (("local", torch.device("cpu")), ("flowchan", nodes[0])):
                step = _training_step(optimizer, device)
                for _ in range(3):
                    step()
                for clock in (time.thread_time, time.process_time, time.perf_counter):

                    def several(step: Callable[[], None] = step) -> None:
                        for _ in repeat(None, count):
                            step()
                        nodes.sync()

                    figures[f"{optimizer}: {name}: {clock.__name__}"] = _per_call(1, several, clock) / count
    return figures


def _training_step(optimizer: str, device: torch.device) -> Callable[[], None]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)).to(
        device
    )
    make: Any = getattr(torch.optim, optimizer)
    updates = make(model.parameters(), lr=0.01, foreach=True)
    x, labels = torch.randn(32, 64).to(device), torch.randint(10, (32,)).to(device)

    def step() -> None:
        updates.zero_grad()
        torch.nn.functional.cross_entropy(model(x), labels).backward()  # type: ignore[no-untyped-call]
        updates.step()

    return step


# --- torch.distributed.rpc ---


def _apply(name: str, a: Any, b: Any) -> Any:
    return OPERATIONS[name](a.local_value(), b.local_value())


def _ones() -> Any:
    return torch.ones(SIDE, SIDE)


def _rpc_options(file: str) -> Any:
    from torch.distributed import rpc

    return rpc.TensorPipeRpcBackendOptions(init_method=f"file://{file}", rpc_timeout=600)


def _rpc_worker(file: str) -> None:
    from torch.distributed import rpc

    torch.set_num_threads(1)
    rpc.init_rpc("worker", rank=1, world_size=2, rpc_backend_options=_rpc_options(file))  # type: ignore[no-untyped-call]
    rpc.shutdown()


def rpc_remote(count: int) -> Figures:
    """Issue each operation with ``rpc.remote``, on the values of two RRefs."""
    from torch.distributed import rpc

    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "rendezvous")
        child = multiprocessing.get_context("spawn").Process(target=_rpc_worker, args=(file,))
        child.start()
        rpc.init_rpc("client", rank=0, world_size=2, rpc_backend_options=_rpc_options(file))  # type: ignore[no-untyped-call]
        pair = [rpc.remote("worker", _ones) for _ in range(2)]

        def run(name: Any, times: int) -> None:
            last = pair[0]
            for _ in repeat(None, times):
                last = rpc.remote("worker", _apply, (name, *pair))
            last.to_here()

        names: dict[str, Any] = {name: name for name in OPERATIONS}
        figures = _cpu_per_call(count, run, names)
        pair.clear()
        rpc.shutdown()
        child.join()
    return figures


# --- Monarch ---


def monarch(count: int) -> Figures:
    """Issue operations with Monarch's tensor engine, on a mesh of one process."""
    import monarch
    import monarch.tensor_engine
    from monarch.actor import this_host

    mesh = this_host().spawn_procs(per_host={"gpus": 1})
    with mesh.activate():
        a, b = torch.ones(SIDE, SIDE), torch.ones(SIDE, SIDE)

        def run(operation: Operation, times: int) -> None:
            last = a
            for _ in repeat(None, times):
                last = operation(a, b)
            monarch.fetch_shard(last).result()

        run(OPERATIONS["add"], 10)
        figures = _cpu_per_call(count, run, OPERATIONS)
    mesh.stop().get()
    return figures


SYSTEMS: dict[str, Callable[[int], Figures]] = {
    function.__name__: function
    for function in (flowchan, flowchan_in_python, local, waits, copies, training, rpc_remote, monarch)
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(SYSTEMS[sys.argv[1]](int(sys.argv[2]))))
