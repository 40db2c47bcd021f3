"""Measure pushes and pulls of 64 MB between a client and a parameter server on one host."""

from __future__ import annotations

import copy
import importlib.util
import mmap
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Case, Effort, Report, at_most
from flowchan.pipelines import ParameterServer

ISOLATES = (
    "One client pushes 64 MB of float32 values, which the server adds to its state, and pulls the state. "
    "The server is another process on the same machine, with one thread. A push finishes when the server "
    "has applied the values. For queued pushes, the client sends several pushes before it waits for the "
    "last one. memcpy copies 64 MB within the client, into memory that is in use. The bare copies are the "
    "copy and the addition of a push, in one process without messages. They copy the values into shared "
    "memory, and write the sum of these values and the state into a second block. flowchan and "
    "torch.distributed.rpc use torch tensors; the Ray actor uses NumPy arrays. Ray returns read-only arrays "
    "in shared memory. The client copies them into its own array, as with the other systems."
)
SIZE = 64 << 20
PUSH, QUEUED, PULL = "push of 64 MB", "queued pushes of 64 MB", "pull of 64 MB"

Calls = dict[str, Callable[[int], object]]
"""For each workload, a function that runs it ``n`` times."""


def measure(effort: Effort) -> Report:
    report = Report()
    torch.set_num_threads(1)
    with _flowchan() as mine, _rpc() as rpc, _ray() as ray:
        cases: dict[str, Calls] = {"flowchan": mine, "memcpy": _memcpy(), "bare copies": _bare_copies()}
        cases["torch.distributed.rpc"] = rpc
        if ray:
            cases["Ray actor"] = ray
        for work in (PUSH, QUEUED, PULL):
            able = [name for name, calls in cases.items() if work in calls]
            count = max(2, round(effort.seconds * 10))
            found = report.interleave(
                work, [_case(name, cases[name][work], count) for name in able], effort.rounds
            )
            results = dict(zip(able, found, strict=True))
            own = results["flowchan"]
            # While a client waits for a push, only one of the two processes works. Therefore, compare the
            # time of a push with the time that both processes together need for their copies.
            if work == PUSH:
                report.rows.append(at_most(1.25, own, results["bare copies"]))
            else:
                report.rows.append(at_most(1.5, own, results["memcpy"]))
            for peer, least in (("torch.distributed.rpc", 3), ("Ray actor", 5)):
                if peer in results:
                    report.rows.append(at_most(1 / least, own, results[peer]))
    return report


def _case(name: str, call: Callable[[int], object], count: int) -> Case:
    def work() -> tuple[Sequence[float], int]:
        call(1)
        began = time.perf_counter()
        call(count)
        return [(time.perf_counter() - began) / count], count

    return Case(name, "s", work)


def _repeat(call: Callable[[], object]) -> Callable[[int], object]:
    return lambda count: [call() for _ in range(count)]


def _memcpy() -> Calls:
    given, out = np.ones(SIZE, np.uint8), np.ones(SIZE, np.uint8)
    copy = _repeat(lambda: np.copyto(out, given))
    return {QUEUED: copy, PULL: copy, PUSH: copy}


def _bare_copies() -> Calls:
    """Return the minimal work of a push: copy the values, and add them to the last version in another block.

    The last version stays intact until the new version is complete.
    """
    values = torch.ones(SIZE // 4)
    blocks = [torch.frombuffer(mmap.mmap(-1, SIZE), dtype=torch.float32) for _ in range(3)]

    def push() -> None:
        sent, current, shadow = blocks
        sent.copy_(values)
        torch.add(current, sent, out=shadow)
        blocks[1:] = shadow, current

    return {PUSH: _repeat(push)}


@contextmanager
def _flowchan() -> Iterator[Calls]:
    values, out = torch.ones(SIZE // 4), torch.zeros(SIZE // 4)
    with ParameterServer(torch.zeros(SIZE // 4)) as server:
        client = server.client()
        yield {
            PUSH: _repeat(lambda: client.push(values).wait()),
            QUEUED: lambda count: [client.push(values) for _ in range(count)][-1].wait(),
            PULL: _repeat(lambda: client.pull(out=out)),
        }


class _State:
    """State of a peer's server."""

    def __init__(self, values: Any) -> None:
        self.values = copy.deepcopy(values)  # copied, because Ray passes a read-only array

    def push(self, given: Any) -> None:
        self.values += given

    def pull(self) -> Any:
        return self.values


_state = _State(None)


def _begin(size: int) -> None:
    torch.set_num_threads(1)
    _state.values = torch.zeros(size)


def _push(given: torch.Tensor) -> None:
    _state.push(given)


def _pull() -> Any:
    return _state.pull()


def _serve(file: str) -> None:
    from torch.distributed import rpc

    rpc.init_rpc("server", rank=1, world_size=2, rpc_backend_options=_options(file))  # type: ignore[no-untyped-call]
    rpc.shutdown()


def _options(file: str) -> Any:
    from torch.distributed import rpc

    return rpc.TensorPipeRpcBackendOptions(init_method=f"file://{file}", rpc_timeout=600)


@contextmanager
def _rpc() -> Iterator[Calls]:
    from torch.distributed import rpc

    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "rendezvous")
        child = multiprocessing.get_context("spawn").Process(target=_serve, args=(file,))
        child.start()
        rpc.init_rpc("client", rank=0, world_size=2, rpc_backend_options=_options(file))  # type: ignore[no-untyped-call]
        values, out = torch.ones(SIZE // 4), torch.zeros(SIZE // 4)
        rpc.rpc_sync("server", _begin, (SIZE // 4,))
        yield {
            PUSH: _repeat(lambda: rpc.rpc_sync("server", _push, (values,))),
            QUEUED: lambda count: [
                future.wait() for future in [rpc.rpc_async("server", _push, (values,)) for _ in range(count)]
            ],
            PULL: _repeat(lambda: out.copy_(rpc.rpc_sync("server", _pull))),
        }
        rpc.shutdown()
        child.join()


def _ray() -> AbstractContextManager[Calls | None]:
    return _ray_actor() if importlib.util.find_spec("ray") else nullcontext()


@contextmanager
def _ray_actor() -> Iterator[Calls]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        actor = ray.remote(_State).remote(np.zeros(SIZE // 4, np.float32))
        values, out = np.ones(SIZE // 4, np.float32), np.zeros(SIZE // 4, np.float32)
        yield {
            PUSH: _repeat(lambda: ray.get(actor.push.remote(values))),
            QUEUED: lambda count: ray.get([actor.push.remote(values) for _ in range(count)]),
            PULL: _repeat(lambda: np.copyto(out, ray.get(actor.pull.remote()))),
        }
    finally:
        ray.shutdown()
