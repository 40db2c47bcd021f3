"""Backends of torch.distributed as ways to do operations of a group: gloo, MPI and NCCL.

The members make a backend together, at the first operation that it does; torch's own groups are left alone.
Each such operation begins and ends with a round of the group itself. In the first one calls that do not match
are found. The last one makes all return or raise alike: whom a backend has lost, the group misses, and what
fails for one member fails for all. Who fails destroys its backend before that round; its connections end, and
so nobody waits for it for ever; while a backend is being made there is a time limit.
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
from flowchan.collective.deadline import Left, countdown
from flowchan.collective.operations import BROADCAST, NAMES, REDUCE_SCATTER, key_of
from flowchan.collective.value_bytes import dumps, loads
from flowchan.errors import GroupError, Mismatch
from flowchan.transport.interrupts import unless_interrupted
from flowchan.transport.tcp import joined, split

POLL_INTERVAL_S = 0.02
"""Seconds after which a member that waits for its backend looks at the others."""
GRACE = 1.0
"""Seconds that a backend has to notice by itself that a member is lost, as it does where connections end."""
WITHIN = timedelta(seconds=60)
"""In which a backend has to be made, once all members have agreed to."""
ENDLESS = timedelta(days=20)
"""In place of torch's time-outs, for a member may be slow; as long as their milliseconds fit."""

# Their types are not the same in all versions of torch.
_dist: Any = dist
_Ended = Callable[[float], bool]
"""Waits so many seconds at most, and says whether what it waits for is over."""


class StuckBackend(Exception):
    """A member is lost, and the backend has not noticed."""


def check(name: str) -> None:
    """Raises ``ValueError`` with the remedy, where torch lacks this backend, or the machine what it needs."""
    lacks = {
        "gloo": "" if dist.is_gloo_available() else "torch was built without it",
        "mpi": "" if dist.is_mpi_available() else "torch was built without it, as its wheels are",
        "nccl": ""
        if torch.cuda.is_available() and dist.is_nccl_available()
        else "it needs a CUDA device that torch can see, and a torch that was built for CUDA",
    }
    if why := lacks.get(name, ""):
        raise ValueError(f"{name} of torch.distributed is not available here: {why}; choose another one")


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
        raise GroupError("mpi joins all processes that mpirun has started, in their order, and no others")
    return backend


def _nccl(store: Any, rank: int, size: int, host: str, device: torch.device) -> Any:
    options = _dist.ProcessGroupNCCL.Options()
    options._timeout = ENDLESS
    backend = _dist.ProcessGroupNCCL(store, rank, size, options)
    backend.allreduce([torch.zeros(1, device=device)]).wait()  # it connects by its first operation
    return backend


MAKERS = {"gloo": _gloo, "mpi": _mpi, "nccl": _nccl}
"""How a member makes its part of each, which waits for those of the others."""


class TorchWay:
    """One of these, for one member. Its operations are those on which a group's others stand."""

    def __init__(self, name: str, group: Any) -> None:
        self.name = name
        self._group: Any = weakref.proxy(group)  # who drops a member leaves at once
        self._backend: Any = None
        self._store: Any = None

    def close(self) -> None:
        """Between two operations, or when one has failed here."""
        self._backend = self._store = None

    # --- the operations ---

    def _reduce(self, doing: int, x: Any, out: Any, op: str, root: int, timeout: float | None) -> Any:
        mine = root in (-1, self._group.rank)
        if array_access.is_numpy(x) and x.dtype.kind in "Mm":
            raise TypeError(f"{self.name} combines no elements of type {x.dtype}: set another algorithm")
        wide = array_access.widened(x) if op == "mean" else x  # the sum of halves may be too large for one
        given, result = _tensor(wide), out if wide is x else wide
        reduction = _reduction(op, given)

        def start(backend: Any) -> Any:
            total = _tensor(result) if mine else given.clone()
            if mine and result is not wide:
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
        if op == "mean" and mine:
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
        self, doing: int, key: int, mine: list[Any], outs: list[Any], timeout: float | None
    ) -> None:
        """Members whose arrays differ in size fill them up to that of the largest."""
        what = key_of(key, mine[0])
        given, rooms = _bytes(mine[0]), [None if out is None else _bytes(out) for out in outs]
        sizes: list[int] = []
        found: list[torch.Tensor] = []

        def start(backend: Any) -> Any:
            largest = max(sizes)
            found.extend(given.new_empty(largest) for _ in sizes)
            whole = given if len(given) == largest else torch.cat([given, found[0][len(given) :]])
            return backend.allgather([found], [whole])

        self._do(doing, what, start, given.device, timeout, (mine[0], None), len(given), sizes.extend)
        for rank, (room, part, size) in enumerate(zip(rooms, found, sizes, strict=True)):
            if room is not None:
                array_access.check_room(rank, size, len(room))
                room.copy_(part[:size])

    def _alltoall(
        self, doing: int, key: int, ins: list[Any], outs: list[Any], timeout: float | None, more: Any
    ) -> None:
        what = key_of(key, ins[0])
        given, rooms = list(map(_bytes, ins)), list(map(_bytes, outs))
        sizes = list(map(len, given)), list(map(len, rooms))
        found: Any = rooms[0].new_empty(sum(sizes[1]))

        def hear(tables: list[tuple[list[int], list[int]]]) -> None:
            if why := sizes_differ(NAMES[doing], dict(enumerate(tables))):
                raise Mismatch(why)

        def start(backend: Any) -> Any:
            swap = getattr(backend, "alltoall_base", None) or backend.all_to_all_single
            return swap(found, torch.cat(given), sizes[1], sizes[0])

        self._do(doing, what, start, given[0].device, timeout, (ins, more), sizes, hear)
        for room, part in zip(rooms, found.split(sizes[1]), strict=True):
            room.copy_(part)

    def _reduce_scatter(self, x: Any, out: Any, op: str, timeout: float | None) -> Any:
        """All of them get the whole: not every backend has an operation for it."""
        whole = _tensor(x).clone()
        self._reduce(REDUCE_SCATTER, whole, whole, op, -1, timeout)
        part = array_access.parts_of(whole, self._group.size)[self._group.rank]
        _tensor(out).copy_(part.reshape(tuple(out.shape)))
        return out

    # --- what they have in common ---

    def _do(
        self,
        doing: int,
        what: Any,
        start: Callable[[Any], Any],
        device: torch.device,
        timeout: float | None,
        given: tuple[Any, Any],
        say: Any = None,
        hear: Callable[[list[Any]], None] | None = None,
    ) -> None:
        """``what`` is the same for all, ``given`` is what the operation was called with. What each has to
        ``say``, all ``hear`` before ``start``."""
        left, key = countdown(timeout), zlib.crc32(repr((self.name, what)).encode())

        def all_say(word: Any) -> list[Any]:
            return list(map(loads, self._group._exchange(doing, key, dumps(word), -1, left(), *given)))

        def act() -> None:
            if failed is not None:
                raise failed
            if hear is not None:
                hear([word for _, word in heard])  # before there are connections that an error here would end
            if self._backend is None:
                self._connect(heard[0][0], device, left)
            self._finish(start(self._backend), device, left)

        failed: Exception | None = None
        try:
            address = self._address()
        except Exception as error:  # which the others hear in the last round
            address, failed = "", error
        heard = all_say((address, say))
        failed = self._failure_of(act, doing)
        word = None if failed is None else (isinstance(failed, Mismatch), _words(failed))
        self._judge(all_say(word), doing, failed)

    def _failure_of(self, act: Callable[[], None], doing: int) -> Exception | None:
        """What ``act`` has raised, after which the backend has ended."""
        try:
            act()
        except unless_interrupted(Exception) as error:  # whatever torch raises, all are told
            self._end(stuck=isinstance(error, StuckBackend | TimeoutError))
            if isinstance(error, StuckBackend):
                self._group._cut_off(NAMES[doing])
            return error.with_traceback(None)  # whose frames keep connections
        except BaseException:
            self._give_up()
            raise
        return None

    def _give_up(self) -> None:
        self._end(stuck=True)
        self._group._give_up_all()

    def _judge(self, errors: list[Any], doing: int, failed: Exception | None) -> None:
        """Raises the same for all."""
        told = {rank: error for rank, error in enumerate(errors) if error is not None}
        if told:
            self.close()
            (rank, (differ, words)), *_ = told.items()
            if differ:
                raise Mismatch(f"the members of {self._group._title()} did not call the same: {words}")
            raise GroupError(f"{NAMES[doing]} by {self.name} has failed at rank {rank}: {words}") from failed

    def _address(self) -> str | None:
        """Where rank 0 tells the others how they find each other."""
        if self._backend is not None or self._group.rank:
            return None
        if self._store is None:
            here = self._group._reached_at()
            family = socket.AF_INET6 if ":" in here else socket.AF_INET
            with socket.create_server((here, 0), family=family) as listener:  # torch's own takes any address
                port = listener.getsockname()[1]
                self._store = _dist.TCPStore(
                    here,
                    port,
                    is_master=True,
                    wait_for_workers=False,
                    timeout=WITHIN,
                    master_listen_fd=listener.detach(),
                )
        return joined((self._store.host, self._store.port))

    def _connect(self, address: str, device: torch.device, left: Left) -> None:
        """In a thread of its own, for it can't be interrupted when one of the others does not come."""
        group, made = self._group, Future[Any]()
        rank, size, here = group.rank, group.size, group._reached_at()

        def make() -> None:
            try:
                if self._store is None:
                    host, port = split(address)
                    self._store = _dist.TCPStore(host, port, wait_for_workers=False, timeout=WITHIN)
                made.set_result(MAKERS[self.name](self._store, rank, size, here, device))
            except BaseException as error:
                made.set_exception(error)

        threading.Thread(target=make, name=f"flowchan-collective-{self.name}", daemon=True).start()
        self._until(lambda seconds: bool(wait([made], seconds).done), left)
        self._backend = made.result()

    def _finish(self, work: Any, device: torch.device, left: Left) -> None:
        """NCCL's is over when its device has done it."""
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
                    pass  # not in time, or it has failed, which is asked for later
            return bool(work.is_completed())

        self._until(ended, left)
        work.wait()

    def _until(self, ended: _Ended, left: Left) -> None:
        lost_since: float | None = None
        while not ended(POLL_INTERVAL_S):
            if left() == 0:
                raise TimeoutError("it was not done in time")
            now = time.monotonic()
            if not self._group._has_lost_any():
                lost_since = None
            elif lost_since is None:
                lost_since = now
            elif now - lost_since > GRACE:
                raise StuckBackend("a member is lost")

    def _end(self, stuck: bool) -> None:
        """``stuck``: it is still at it. NCCL can be told to end; to destroy another one would wait for that,
        so it stays as it is, for ever."""
        abort = getattr(self._backend, "abort", None) if self.name == "nccl" else None
        if abort is not None:
            abort()
        elif stuck and self._backend is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._backend))
        self._backend = None  # others may still be on their way to the store


def _tensor(x: Any) -> torch.Tensor:
    """The same memory; a copy of what can't be written, and so is only read."""
    if isinstance(x, torch.Tensor):
        return x
    found: torch.Tensor = torch.from_numpy(x if x.flags.writeable else x.copy())
    return found


def _bytes(x: Any) -> torch.Tensor:
    """The same memory, as what every backend can move."""
    if isinstance(x, torch.Tensor):
        return x.reshape(-1).view(torch.uint8)
    return _tensor(x.reshape(-1).view("u1"))


def _reduction(op: str, x: torch.Tensor) -> Any:
    floating = x.is_floating_point() or x.is_complex()
    if (op == "mean" and not floating) or (x.is_complex() and op not in ("sum", "mean")):
        raise TypeError(f"there is no {op} of elements of type {x.dtype}")
    names = {"mean": "SUM", "prod": "PRODUCT", "and": "BAND", "or": "BOR", "xor": "BXOR"}
    return getattr(_dist.ReduceOp, names.get(op, op.upper()))


def _words(error: BaseException) -> str:
    """Without the stack of C++ that torch adds."""
    text = str(error).partition("\n")[0]
    return text if isinstance(error, GroupError) else f"{type(error).__name__}: {text}"
