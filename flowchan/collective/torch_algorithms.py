"""Use the backends of torch.distributed (gloo, MPI and NCCL) as algorithms of a group.

On the first operation that uses a backend, the members create it together; torch's own groups are not
affected. Each operation begins and ends with a round of the group. The first round detects mismatched calls.
The last round finds lost members, and raises one member's error on all of them. After the last round, either
all members return, or all raise.

A member that fails destroys its backend before the last round. The other members then find the connections
closed and stop waiting. The creation of a backend has a time limit.
"""

from __future__ import annotations

import ctypes
import socket
import threading
import time
import weakref
import zlib
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from flowchan.collective import array_access
from flowchan.collective.call_arguments import sizes_differ
from flowchan.collective.deadline import RemainingTime, countdown
from flowchan.collective.operations import BROADCAST, NAMES, REDUCE_SCATTER, key_of
from flowchan.collective.value_bytes import dumps, loads
from flowchan.errors import GroupError, Mismatch
from flowchan.transport.interrupts import unless_interrupted
from flowchan.transport.tcp import joined, split

POLL_INTERVAL_S = 0.02
"""Seconds between checks of the other members while this one waits for its backend."""
GRACE = 1.0
"""Seconds that a backend has to notice the closed connections of a lost member before it is aborted."""
WITHIN = timedelta(seconds=60)
"""Time limit for creating a backend after all members have agreed on it."""
ENDLESS = timedelta(days=20)
"""Replacement for torch's default timeouts, because a member may be slow.

The value in milliseconds must fit into the integer type that torch uses.
"""

# The types of these objects differ between versions of torch.
_dist: Any = dist
_Ended = Callable[[float], bool]
"""Function that waits up to the given number of seconds, and returns whether the operation has ended."""


class StuckBackend(Exception):
    """Raised when the backend does not notice that a member is lost."""


def check(name: str) -> None:
    """Raise ``ValueError`` with a remedy if torch lacks the backend, or the machine lacks the device."""
    lacks = {
        "gloo": "" if dist.is_gloo_available() else "torch was built without it",
        "mpi": "" if dist.is_mpi_available() else "torch was built without it, like torch's wheels",
        "nccl": ""
        if torch.cuda.is_available() and dist.is_nccl_available()
        else "it needs a CUDA device and a build of torch with CUDA support",
    }
    if why := lacks.get(name, ""):
        raise ValueError(f"set_algorithm: {name!r} is not available here: {why}; choose another algorithm")


def _gloo(store: Any, rank: int, size: int, host: str, device: torch.device) -> Any:
    options = _dist.ProcessGroupGloo._Options()
    options._devices = [_dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = WITHIN
    backend = _dist.ProcessGroupGloo(store, rank, size, options)
    backend._set_default_timeout(ENDLESS)
    return backend


def _mpi(store: Any, rank: int, size: int, host: str, device: torch.device) -> Any:
    backend = _dist.ProcessGroupMPI.create([])
    if (backend.rank(), backend.size()) != (rank, size):
        raise GroupError(
            "mpi: the group must contain all processes that mpirun started, in mpirun's order; otherwise, "
            "choose another algorithm"
        )
    return backend


def _nccl(store: Any, rank: int, size: int, host: str, device: torch.device) -> Any:
    options = _dist.ProcessGroupNCCL.Options()
    options._timeout = ENDLESS
    backend = _dist.ProcessGroupNCCL(store, rank, size, options)
    backend.allreduce([torch.zeros(1, device=device)]).wait()  # NCCL connects during its first operation
    return backend


MAKERS = {"gloo": _gloo, "mpi": _mpi, "nccl": _nccl}
"""Functions that create one member's part of a backend. Each waits for the other members."""


class TorchAlgorithm:
    """One member's part of a backend, with the operations from which the group builds all others."""

    def __init__(self, name: str, group: Any) -> None:
        self.name = name
        self._group: Any = weakref.proxy(group)  # weak, so that an unused member is closed at once
        self._backend: Any = None
        self._store: Any = None

    def close(self) -> None:
        """Close the backend. Call this between operations, or after this member failed."""
        self._backend = self._store = None

    # --- operations ---

    def _reduce(self, doing: int, x: Any, out: Any, op: str, root: int, timeout: float | None) -> Any:
        own = root in (-1, self._group.rank)
        if array_access.is_numpy(x) and x.dtype.kind in "Mm":
            raise TypeError(f"{self.name} cannot combine elements of type {x.dtype}; set another algorithm")
        wide = array_access.widened(x) if op == "mean" else x  # a half-precision sum may overflow
        given, result = _tensor(wide), out if wide is x else wide
        reduction = _reduction(op, given)

        def start(backend: Any) -> Any:
            total = _tensor(result) if own else given.clone()
            if own and result is not wide:
                total.copy_(given.view(total.shape))
            flat = torch.view_as_real(total) if total.is_complex() else total
            if root < 0:
                options = _dist.AllreduceOptions()
                options.reduceOp = reduction
                return backend.allreduce([flat], options)
            options = _dist.ReduceOptions()
            options.reduceOp, options.rootRank = reduction, root
            return backend.reduce([flat], options)

        more = op if root < 0 else (root, op)
        self._do(doing, (array_access.kind(x), op, root), start, given.device, timeout, (x, more))
        if op == "mean" and own:
            array_access.divide(result, self._group.size)
            if result is not out:
                array_access.narrow(out, result)
        return out

    def _spread(self, x: Any, root: int, timeout: float | None) -> Any:
        flat = _bytes(x)

        def start(backend: Any) -> Any:
            options = _dist.BroadcastOptions()
            options.rootRank = root
            return backend.broadcast([flat], options)

        self._do(BROADCAST, (array_access.kind(x), root), start, flat.device, timeout, (x, root))
        return x

    def _allgather_into(
        self, doing: int, key: int, own: list[Any], outs: list[Any], timeout: float | None
    ) -> None:
        """Gather arrays into ``outs``; members with smaller arrays pad them to the largest size."""
        what = key_of(key, own[0])
        given, destinations = _bytes(own[0]), [None if out is None else _bytes(out) for out in outs]
        sizes: list[int] = []
        found: list[torch.Tensor] = []

        def start(backend: Any) -> Any:
            largest = max(sizes)
            found.extend(given.new_empty(largest) for _ in sizes)
            whole = given if len(given) == largest else torch.cat([given, found[0][len(given) :]])
            return backend.allgather([found], [whole])

        self._do(doing, what, start, given.device, timeout, (own[0], None), len(given), sizes.extend)
        for rank, (destination, part, size) in enumerate(zip(destinations, found, sizes, strict=True)):
            if destination is not None:
                array_access.check_size(NAMES[doing], rank, size, len(destination))
                destination.copy_(part[:size])

    def _alltoall(
        self, doing: int, key: int, ins: list[Any], outs: list[Any], timeout: float | None, more: Any
    ) -> None:
        what = key_of(key, ins[0])
        given, destinations = list(map(_bytes, ins)), list(map(_bytes, outs))
        sizes = list(map(len, given)), list(map(len, destinations))
        found: Any = destinations[0].new_empty(sum(sizes[1]))

        def on_values(tables: list[tuple[list[int], list[int]]]) -> None:
            if why := sizes_differ(NAMES[doing], dict(enumerate(tables))):
                raise Mismatch(why)

        def start(backend: Any) -> Any:
            swap = getattr(backend, "alltoall_base", None) or backend.all_to_all_single
            return swap(found, torch.cat(given), sizes[1], sizes[0])

        self._do(doing, what, start, given[0].device, timeout, (ins, more), sizes, on_values)
        for destination, part in zip(destinations, found.split(sizes[1]), strict=True):
            destination.copy_(part)

    def _reduce_scatter(self, x: Any, out: Any, op: str, timeout: float | None) -> Any:
        """Combine whole arrays on all members, because some backends cannot combine parts."""
        whole = _tensor(x).clone()
        self._reduce(REDUCE_SCATTER, whole, whole, op, -1, timeout)
        part = array_access.parts_of("reduce_scatter", whole, self._group.size)[self._group.rank]
        _tensor(out).copy_(part.reshape(tuple(out.shape)))
        return out

    # --- steps that all operations share ---

    def _do(
        self,
        doing: int,
        what: Any,
        start: Callable[[Any], Any],
        device: torch.device,
        timeout: float | None,
        given: tuple[Any, Any],
        contribution: Any = None,
        on_values: Callable[[list[Any]], None] | None = None,
    ) -> None:
        """Run an operation of the backend between two rounds of the group.

        ``what`` must be equal on all members; ``given`` lists the call's arguments, for messages. Each member
        sends its ``contribution`` in the first round. ``on_values`` gets all contributions before ``start``
        is called.
        """
        remaining, key = countdown(timeout), zlib.crc32(repr((self.name, what)).encode())

        def exchange(word: Any) -> list[Any]:
            return list(map(loads, self._group._exchange(doing, key, dumps(word), -1, remaining(), *given)))

        def act() -> None:
            if failed is not None:
                raise failed
            if on_values is not None:
                # Call this before the members connect, because an error afterwards would close the
                # connections.
                on_values([word for _, word in values])
            if self._backend is None:
                self._connect(values[0][0], device, remaining)
            self._finish(start(self._backend), device, remaining)

        failed: Exception | None = None
        try:
            address = self._address()
        except Exception as error:  # the other members get this error in the last round
            address, failed = "", error
        values = exchange((address, contribution))
        failed = self._failure_of(act, doing)
        word = None if failed is None else (isinstance(failed, Mismatch), _words(failed))
        self._judge(exchange(word), doing, failed)

    def _failure_of(self, act: Callable[[], None], doing: int) -> Exception | None:
        """Run ``act``. If ``act`` raises, end the backend and return the exception."""
        try:
            act()
        except unless_interrupted(Exception) as error:  # any type, because torch raises many
            self._end(stuck=isinstance(error, StuckBackend | TimeoutError))
            if isinstance(error, StuckBackend):
                self._group._cut_off(NAMES[doing])
            return error.with_traceback(None)  # the frames in the traceback would keep the connections open
        except BaseException:
            self._give_up()
            raise
        return None

    def _give_up(self) -> None:
        self._end(stuck=True)
        self._group._give_up_all()

    def _judge(self, errors: list[Any], doing: int, failed: Exception | None) -> None:
        """Raise the same error on all members if any of them failed."""
        failures = {rank: error for rank, error in enumerate(errors) if error is not None}
        if failures:
            self.close()
            (rank, (differ, words)), *_ = failures.items()
            if differ:
                raise Mismatch(f"members of {self._group._title()} made calls that do not match: {words}")
            raise GroupError(f"{NAMES[doing]} with {self.name} failed on rank {rank}: {words}") from failed

    def _address(self) -> str | None:
        """Return the address where rank 0 serves the backend's store, or None."""
        if self._backend is not None or self._group.rank:
            return None
        if self._store is None:
            own_address = self._group._reached_at()
            family = socket.AF_INET6 if ":" in own_address else socket.AF_INET
            # Listen only on this host's address: torch's own listener would accept connections on all
            # addresses.
            with socket.create_server((own_address, 0), family=family) as listener:
                port = listener.getsockname()[1]
                self._store = _dist.TCPStore(
                    own_address,
                    port,
                    is_master=True,
                    wait_for_workers=False,
                    timeout=WITHIN,
                    master_listen_fd=listener.detach(),
                )
        return joined((self._store.host, self._store.port))

    def _connect(self, address: str, device: torch.device, remaining: RemainingTime) -> None:
        """Create the backend in a thread, because the call cannot be interrupted if a member is missing."""
        group, made = self._group, Future[Any]()
        rank, size, own_address = group.rank, group.size, group._reached_at()

        def make() -> None:
            try:
                if self._store is None:
                    host, port = split(address)
                    self._store = _dist.TCPStore(host, port, wait_for_workers=False, timeout=WITHIN)
                made.set_result(MAKERS[self.name](self._store, rank, size, own_address, device))
            except BaseException as error:
                made.set_exception(error)

        threading.Thread(target=make, name=f"flowchan-collective-{self.name}", daemon=True).start()
        self._until(lambda seconds: bool(wait([made], seconds).done), remaining)
        self._backend = made.result()

    def _finish(self, work: Any, device: torch.device, remaining: RemainingTime) -> None:
        """Wait for an operation. An NCCL operation ends only when the device has run the operation."""
        pause = 1e-5

        def ended(seconds: float) -> bool:
            nonlocal pause
            if device.type != "cpu":
                time.sleep(pause)
                pause = min(2 * pause, seconds)
            elif not work.is_completed():
                try:
                    work.wait(timedelta(seconds=seconds))
                except RuntimeError:
                    pass  # the operation timed out or failed; the code below reports this
            return bool(work.is_completed())

        self._until(ended, remaining)
        work.wait()

    def _until(self, ended: _Ended, remaining: RemainingTime) -> None:
        lost_since: float | None = None
        while not ended(POLL_INTERVAL_S):
            if remaining() == 0:
                raise TimeoutError("the backend did not answer in time")
            now = time.monotonic()
            if not self._group._has_lost_any():
                lost_since = None
            elif lost_since is None:
                lost_since = now
            elif now - lost_since > GRACE:
                raise StuckBackend("a member is lost")

    def _end(self, stuck: bool) -> None:
        """Destroy the backend.

        If ``stuck`` is true, an operation is still running. NCCL can abort the operation. The destructors of
        other backends would wait for the operation, so these backends are kept until the process ends.
        """
        abort = getattr(self._backend, "abort", None) if self.name == "nccl" else None
        if abort is not None:
            abort()
        elif stuck and self._backend is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._backend))
        self._backend = None  # keep the store, because other members may still connect to it


def _tensor(x: Any) -> torch.Tensor:
    """Return a tensor that shares the memory of ``x``, or a copy if that memory is read-only."""
    if isinstance(x, torch.Tensor):
        return x
    found: torch.Tensor = torch.from_numpy(x if x.flags.writeable else x.copy())
    return found


def _bytes(x: Any) -> torch.Tensor:
    """Return the memory of ``x`` as a tensor of bytes, which every backend can send."""
    if isinstance(x, torch.Tensor):
        return x.reshape(-1).view(torch.uint8)
    return _tensor(x.reshape(-1).view("u1"))


def _reduction(op: str, x: torch.Tensor) -> Any:
    floating = x.is_floating_point() or x.is_complex()
    if (op == "mean" and not floating) or (x.is_complex() and op not in ("sum", "mean")):
        raise TypeError(f"elements of type {x.dtype} cannot be combined with {op!r}")
    names = {"mean": "SUM", "prod": "PRODUCT", "and": "BAND", "or": "BOR", "xor": "BXOR"}
    return getattr(_dist.ReduceOp, names.get(op, op.upper()))


def _words(error: BaseException) -> str:
    """Return an error's message without the C++ stack trace that torch appends."""
    text = str(error).partition("\n")[0]
    return text if isinstance(error, GroupError) else f"{type(error).__name__}: {text}"
