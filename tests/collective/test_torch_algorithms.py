"""Test the backends of torch.distributed as algorithms of a group.

These backends must give the same results as the native algorithms, and a death during their operations must
raise the usual error. CUDA tensors use NCCL, which needs devices. Machines without devices test the choice of
the backend with a dummy backend, and with tensors that have no memory.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.group_members import Processes, in_processes, in_threads, raised

from flowchan import collective
from flowchan.collective import algorithms, operations
from flowchan.errors import GroupError, MemberDied, Mismatch

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from flowchan.collective import torch_algorithms  # noqa: E402

OPERATIONS = ["allreduce", "reduce", "broadcast", "allgather", "gather", "reduce_scatter", "alltoall"]
DEVICES = torch.cuda.device_count()
needs_cuda = pytest.mark.skipif(not DEVICES, reason="no CUDA device: run the test on a machine that has one")


@pytest.fixture(autouse=True, scope="module")
def used_before(one_compute_thread: None) -> None:
    """Create a store before the tests, so that resources which torch keeps do not look like leaks."""
    in_threads(2, lambda g: (by(g, "gloo"), g.allreduce(torch.ones(1))))


def by(g: Any, algorithm: str | None) -> None:
    for operation in OPERATIONS:
        g.set_algorithm(operation, algorithm)


def all_results(g: Any, make: Callable[[Any], Any]) -> list[Any]:
    """Return the results of all operations on arrays that ``make`` converts from NumPy."""
    x = make(np.arange(6 * g.size, dtype="f4").reshape(g.size, 6) * (g.rank + 1))
    found = [g.allreduce(make(x), op) for op in ("sum", "mean", "max", "prod")]
    out = make(x)
    g.reduce(x, root=1, op="min", out=out)
    found += [out, x, g.broadcast(make(x), root=1)]
    found += g.allgather(x[: g.rank + 1])
    found += g.gather(x[g.rank], root=1) or []
    found += g.allgather(x, out=[make(x) for _ in range(g.size)])
    found += [g.reduce_scatter(x), g.reduce_scatter(x, out=make(x[:1]))]
    buffers = [make(x[: g.rank + 1]) for _ in range(g.size)]
    found += g.alltoall([x[: to + 1] + to for to in range(g.size)], out=buffers)
    return [one.tolist() for one in found]


class RecordingBackend:
    """A backend that records its calls and completes them at once, after calling ``first``."""

    def __init__(self, first: Callable[[], Any] = lambda: None) -> None:
        self.calls: list[str] = []
        self.first = first
        self.before: Any = None

    def __getattr__(self, call: str) -> Any:
        def done(*_: Any) -> RecordingBackend:
            self.calls.append(call)
            self.first()
            return self

        return done

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


def fail() -> None:
    raise RuntimeError("the backend fails on this member")


def replace_backend(g: Any, backend: RecordingBackend) -> None:
    """Replace the member's gloo with ``backend``, but keep the connections of gloo open."""
    backend.before, g._backends["gloo"]._backend = g._backends["gloo"]._backend, backend


def test_gloo_matches_native_algorithms(run: Any) -> None:
    def body(g: Any) -> Any:
        found = []
        for algorithm in (None, "gloo"):
            by(g, algorithm)
            found.append((all_results(g, np.array), all_results(g, lambda x: torch.as_tensor(x).clone())))
        handle = g.allreduce(torch.ones(3), wait=False)
        return found, handle.wait().tolist()

    for (ours, others), later in run(3, body):
        assert others == ours
        assert later == [3.0] * 3


def test_gloo_algorithm_validates_out_before_the_operation(run: Any) -> None:
    """All algorithms check ``out`` in the same way."""

    def body(g: Any) -> Any:
        x = np.full(4, 1.5)
        sealed = np.frombuffer(bytes(32))
        calls: list[Callable[[], Any]] = [
            lambda: g.allreduce(x, out=np.zeros(4, "f4")),
            lambda: g.allreduce(x, out=np.zeros(4, "i4")),
            lambda: g.allreduce(x, out=np.zeros((2, 4))),
            lambda: g.allreduce(sealed),
            lambda: g.reduce_scatter(x, out=np.zeros(3)),
            lambda: g.reduce_scatter(x, out=sealed[:2]),
            lambda: g.allgather(x[:2], out=sealed),
            lambda: g.alltoall([x[:2]] * 2, out=[sealed[:2]] * 2),
        ]
        for algorithm in (None, "gloo"):
            by(g, algorithm)
            for call in calls:
                with pytest.raises(ValueError, match=r"elements of the input's type|got a read-only float"):
                    call()
            if g.rank:
                with pytest.raises(ValueError, match="got a read-only float"):
                    g.broadcast(sealed)
        return sealed.tolist(), g.allreduce(x, out=np.zeros((2, 2))).tolist()

    assert run(2, body) == [([0.0] * 4, [[3.0, 3.0]] * 2)] * 2


@pytest.mark.filterwarnings("error")
def test_gloo_accepts_readonly_inputs(run: Any) -> None:
    def body(g: Any) -> Any:
        by(g, "gloo")
        return g.allreduce(np.frombuffer(np.arange(4.0).tobytes()), out=np.zeros(4)).tolist()

    assert run(2, body) == [[0.0, 2.0, 4.0, 6.0]] * 2


def test_gloo_mean_of_float16_does_not_overflow(run: Any) -> None:
    def body(g: Any) -> Any:
        by(g, "gloo")
        x = torch.ones(2) if g.rank else np.ones(2, "f4")
        g.allreduce(x)
        g.broadcast(x)
        return x.tolist(), g.allreduce(np.full(3, 60000, "f2"), "mean").tolist()

    assert run(2, body) == [([2.0] * 2, [60000.0] * 3)] * 2


def test_store_on_one_host_listens_only_on_loopback() -> None:
    def body(g: Any) -> Any:
        by(g, "gloo")
        g.allreduce(torch.ones(1))
        if g.rank:
            return g.barrier()
        end = f":{g._backends['gloo']._store.port:04X}"
        found = []
        for table in ("tcp", "tcp6"):
            with open(f"/proc/self/net/{table}") as lines:
                rows = [line.split() for line in lines]
            found += [row[1] for row in rows if row[3] == "0A" and row[1].endswith(end)]
        g.barrier()
        return [address.removesuffix(end) for address in found]

    assert raised(in_threads(2, body))[0] == ["0100007F"]


def test_store_failure_raises_on_all_members() -> None:
    def body(g: Any) -> Any:
        by(g, "gloo")
        algorithm = g._by(operations.ALLREDUCE, torch.ones(1))
        if g.rank == 0:
            algorithm._address = fail
        with pytest.raises(
            GroupError, match=r"allreduce with gloo failed on rank 0: .*the backend fails on this member"
        ):
            g.allreduce(torch.ones(1))
        vars(algorithm).pop("_address", None)
        return g.allreduce(torch.ones(1)).item()

    assert raised(in_threads(2, body)) == [2.0] * 2


def test_backends_do_not_affect_torch_groups() -> None:
    def body(g: Any) -> Any:
        by(g, "gloo")
        before = g.allreduce(torch.ones(2)).tolist(), dist.is_initialized()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        alone = torch.ones(2)
        dist.all_reduce(alone)
        together = g.allreduce(torch.ones(2)).tolist()
        dist.destroy_process_group()
        return before, alone.tolist(), together, g.allreduce(torch.ones(2)).tolist()

    expected = (([2.0, 2.0], False), [1.0, 1.0], [2.0, 2.0], [2.0, 2.0])
    assert raised(in_processes(2, body)) == [expected] * 2


def test_mismatched_gloo_calls_raise_on_all_members(run: Any) -> None:
    """The calls differ in shape, in algorithm, or in the sizes of an alltoall."""

    def body(g: Any) -> Any:
        by(g, "gloo")
        with pytest.raises(Mismatch, match=r"called allreduce\(float32\[3\].*called allreduce\(float32\[4\]"):
            g.allreduce(torch.ones(3 + g.rank % 2))
        if g.rank:
            g.set_algorithm("allreduce", None)
        with pytest.raises(Mismatch):
            g.allreduce(torch.ones(3))
        with pytest.raises(Mismatch, match=r"rank 0 sends 12 bytes to rank 0, which expects 16"):
            g.alltoall([torch.ones(3)] * 2, out=[torch.ones(4)] * 2)
        g.set_algorithm("allreduce", "gloo")
        return g.allreduce(torch.ones(3)).tolist()

    assert run(2, body) == [[2.0] * 3] * 2


def test_backend_failure_raises_on_all_members(run: Any) -> None:
    """The backend may fail on one member while the others wait for that member."""

    def body(g: Any) -> Any:
        by(g, "gloo")
        with pytest.raises(GroupError, match=r"allreduce with gloo failed on rank \d: "):
            g.allreduce(torch.zeros(3, dtype=torch.uint32))  # a type that gloo does not support
        before = g.allreduce(torch.ones(3)).tolist()
        if g.rank == 1:
            replace_backend(g, RecordingBackend(fail))
        with pytest.raises(GroupError, match=r"reduce with gloo failed on rank \d: "):
            g.reduce(torch.ones(100_000), root=2)
        return before, g.allreduce(torch.ones(3)).tolist()

    assert run(3, body) == [([3.0] * 3, [3.0] * 3)] * 3


def test_failure_during_connect_raises_on_all_members(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = threading.Event()

    def make(*_: Any) -> None:
        raise RuntimeError("it can't be made")

    monkeypatch.setitem(torch_algorithms.MAKERS, "gloo", make)

    def body(g: Any) -> None:
        by(g, "gloo")
        algorithm = g._by(operations.ALLREDUCE, torch.ones(1))
        end, connect = algorithm._end, algorithm._connect
        if g.rank == 0:
            algorithm._end = lambda stuck: (end(stuck), failed.set())
        else:
            algorithm._connect = lambda *arguments: (failed.wait(), connect(*arguments))
        with pytest.raises(GroupError, match=r"allreduce with gloo failed on rank 0: .* it can't be made"):
            g.allreduce(torch.ones(1))

    raised(in_threads(2, body))


def dies_in(g: Any, step: str, victim: int) -> None:
    """Kill the victim at this step of its backend's next operation."""
    by(g, "gloo")
    if step != "_connect":
        g.allreduce(torch.ones(3))
    else:
        g._by(operations.ALLREDUCE, torch.ones(3))
    if g.rank == victim:
        setattr(g._backends["gloo"], step, lambda *_: os.kill(os.getpid(), signal.SIGKILL))


@pytest.mark.parametrize("step", ["_connect", "_finish"])
def test_death_in_backend_raises_on_all_members(step: str) -> None:
    def body(g: Any) -> Any:
        dies_in(g, step, 1)
        with pytest.raises(MemberDied) as died:
            g.allreduce(torch.ones(1_000_000))
        with g.shrink() as rest:
            by(rest, "gloo")
            return died.value.ranks, died.value.operation, rest.allreduce(torch.ones(2)).tolist()

    found = Processes(3, body).results(2)
    assert found == dict.fromkeys((0, 2), ((1,), "allreduce", [2.0, 2.0]))


def test_member_interrupted_in_a_backend_counts_as_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C interrupts the member, but its connections stay open, so other backends notice nothing."""
    monkeypatch.setattr(torch_algorithms, "GRACE", 0.05)
    read, write = os.pipe()

    def interrupt() -> None:
        raise KeyboardInterrupt

    def body(g: Any) -> Any:
        by(g, "gloo")
        g.allreduce(torch.ones(3))
        if g.rank == 1:
            replace_backend(g, RecordingBackend(interrupt))
            with pytest.raises(KeyboardInterrupt):
                g.allreduce(torch.ones(3))
            return os.read(read, 1)
        with pytest.raises(MemberDied) as died:
            g.allreduce(torch.ones(3))
        os.write(write, b"!")
        return died.value.ranks

    assert raised(in_processes(2, body)) == [(1,), b"!"]
    os.close(read)
    os.close(write)


def test_timeout_ends_a_backend_operation() -> None:
    read, write = os.pipe()

    def body(g: Any) -> Any:
        by(g, "gloo")
        g.allreduce(torch.ones(3))
        if g.rank == 1:
            replace_backend(g, RecordingBackend(lambda: os.read(read, 1)))
            with pytest.raises(GroupError):
                g.allreduce(torch.ones(3))
            return None
        with pytest.raises(TimeoutError, match="allreduce of a group of 2 timed out: rank 1 "):
            g.allreduce(torch.ones(3), timeout=0.1)
        os.write(write, b"!")
        return None

    raised(in_processes(2, body))
    os.close(read)
    os.close(write)


def test_death_in_backend_on_another_host_raises() -> None:
    from test_linked_groups import OverHosts

    def body(g: Any) -> Any:
        dies_in(g, "_finish", 3)
        with pytest.raises(MemberDied) as died:
            g.allreduce(torch.ones(1_000_000))
        return died.value.ranks

    assert OverHosts("aabb", body).results(3) == dict.fromkeys((0, 1, 2), (3,))


def test_unavailable_algorithm_raises_with_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_mpi_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (g,) = collective.members(1)
    with g:
        with pytest.raises(ValueError, match=r"set_algorithm: 'mpi' is not available here: torch was built"):
            g.set_algorithm("allreduce", "mpi")
        with pytest.raises(ValueError, match=r"'nccl' .* needs a CUDA device .*; choose another algorithm"):
            g.set_algorithm("allreduce", "nccl")
        with pytest.raises(ValueError, match="name must be None for barrier, got 'gloo'"):
            g.set_algorithm("barrier", "gloo")
        assert "exchange" in g.explain("allreduce", torch.ones(1))
        g.set_algorithm("allreduce", "gloo")
        assert (
            g.explain("allreduce", torch.ones(1))
            == "allreduce: torch.distributed's gloo, among all 1 members"
        )
        assert "serialize" in g.explain("allreduce", 1)
        g.set_algorithm("allreduce", None)
        with pytest.raises(TypeError, match=r"x must be .*, got float32\[2\] on meta; a meta tensor has no"):
            g.allreduce(torch.ones(2, device="meta"))


def test_device_tensors_use_the_backend_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device tensor uses the backend even if it was not selected, and a host tensor does not."""
    made: list[RecordingBackend] = []

    def make(*_: Any) -> RecordingBackend:
        made.append(RecordingBackend())
        return made[-1]

    monkeypatch.setattr(algorithms, "BY_DEVICE", {"meta": "noted"})
    monkeypatch.setitem(torch_algorithms.MAKERS, "noted", make)
    x, parts = torch.ones(4, device="meta"), [torch.ones(2, device="meta")] * 2

    def body(g: Any) -> Any:
        explanation = g.explain("allreduce", x)
        assert g.allreduce(x, "mean") is x
        g.broadcast(x, root=1)
        g.reduce(x, root=1)
        devices = {
            one.device.type for one in (*g.allgather(x), g.reduce_scatter(x), *g.alltoall(parts, parts))
        }
        handle = g.allreduce(x, wait=False)
        assert handle.wait() is x
        with pytest.raises(Mismatch, match=r"rank 1 called allreduce\(float32\[4\]\)"):
            g.allreduce(torch.ones(4) if g.rank else x)
        return explanation, devices, g.allreduce(torch.ones(1)).item()

    expected = "allreduce: torch.distributed's noted, among all 2 members", {"meta"}, 2.0
    assert raised(in_threads(2, body)) == [expected] * 2
    calls = ["allreduce", "broadcast", "reduce", "allgather", "allreduce", "alltoall_base", "allreduce"]
    assert [one.calls for one in made] == [calls] * 2


class Mpi(RecordingBackend):
    """A backend that imitates mpirun's with a single process."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def test_mpi_requires_all_processes_that_mpirun_started(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Mpi()
    monkeypatch.setattr(dist, "is_mpi_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupMPI", SimpleNamespace(create=lambda ranks: made), raising=False)
    (g,) = collective.members(1)
    with g:
        g.set_algorithm("allreduce", "mpi")
        g.allreduce(torch.ones(3))
        assert made.calls == ["allreduce"]

    def body(g: Any) -> None:
        g.set_algorithm("allreduce", "mpi")
        with pytest.raises(GroupError, match="mpi: the group must contain all processes that mpirun started"):
            g.allreduce(torch.ones(3))

    raised(in_threads(2, body))


def on_device(g: Any) -> Callable[[Any], Any]:
    torch.cuda.set_device(g.rank)
    return lambda x: torch.as_tensor(x, device=f"cuda:{g.rank}").clone()


def nccl_results(g: Any) -> Any:
    return all_results(g, on_device(g)) if g.size > 1 else g.allreduce(on_device(g)([1.0])).tolist()


@needs_cuda
def test_nccl_matches_native_algorithms() -> None:
    """Each member has its own CUDA device."""
    size = min(DEVICES, 3)
    found = Processes(size, nccl_results, method="spawn").results(size)
    if size == 1:
        assert found == {0: [1.0]}
    else:
        assert [found[rank] for rank in range(size)] == in_threads(size, lambda g: all_results(g, np.array))


def die_in_nccl(g: Any) -> Any:
    x = on_device(g)([1.0] * 1_000_000)
    g.allreduce(x)
    if g.rank == 1:
        g._backends["nccl"]._finish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(MemberDied) as died:
        g.allreduce(x)
    return died.value.ranks


@needs_cuda
@pytest.mark.skipif(DEVICES < 2, reason="one CUDA device: a death in NCCL needs two")
def test_death_in_nccl_raises() -> None:
    assert Processes(2, die_in_nccl, method="spawn").results(1) == {0: (1,)}
