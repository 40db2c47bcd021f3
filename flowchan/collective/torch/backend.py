"""The ``"flowchan"`` backend for ``torch.distributed``.

    torch.distributed.init_process_group("flowchan")

This call is enough from torch 2.5 on; in earlier versions, import this module first to register the backend.

CPU tensors use flowchan and CUDA tensors use NCCL, as in any group. The errors are the group's errors. If a
member dies, all survivors raise :class:`flowchan.MemberDied`; calls that do not match raise
:class:`flowchan.Mismatch`. torch's own timeout has no effect.

A process group has only this backend, because torch ignores other backends that are named with it. The first
operation of ``"cpu:flowchan,cuda:gloo"`` therefore raises ``ValueError``. ``"cpu:flowchan,cuda:nccl"`` is
equivalent to ``"flowchan"``.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from flowchan.collective.array_access import described
from flowchan.collective.call_arguments import parts_argument
from flowchan.collective.group import Group
from flowchan.collective.handles import end_before_threads
from flowchan.collective.operations import ALLREDUCE, ALLTOALL, GATHER, REDUCE, REDUCE_SCATTER, SCATTER
from flowchan.collective.rendezvous.store import meet_by_store
from flowchan.errors import GroupError, Mismatch

_LATER = 64 * 1024
"""Size in bytes from which a thread runs an operation while its caller continues."""
_TURN = 0.02
"""Seconds after which a receiving thread lets another thread receive."""

_FORGETS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7)
"""Whether this version of torch drops a :class:`Work` from this module while torch's C++ code waits for it.
If so, operations run at once and return torch's own work objects."""

# The types of these objects differ between versions of torch.
_c10d: Any = torch._C._distributed_c10d
_c10d_python: Any = dist.distributed_c10d
_Work: Any = dist.Work
_ProcessGroup: Any = dist.ProcessGroup
_Reduce: Any = dist.ReduceOp.RedOpType
_OPS = {
    _Reduce.SUM: "sum",
    _Reduce.AVG: "mean",
    _Reduce.PRODUCT: "prod",
    _Reduce.MIN: "min",
    _Reduce.MAX: "max",
    _Reduce.BAND: "and",
    _Reduce.BOR: "or",
    _Reduce.BXOR: "xor",
}

Tensors = Sequence[torch.Tensor]


class Work(_Work):  # type: ignore[misc]
    """A finished operation, or one that is running in the group's thread."""

    def __init__(self, result: Any, going_on: Future[Any] | None = None) -> None:
        super().__init__()
        self._result = result
        self._going_on = going_on

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._going_on is not None:
            self._going_on.result(timeout.total_seconds() or None)
        return True

    def is_completed(self) -> bool:
        return self._going_on is None or self._going_on.done()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        return None if self._going_on is None else self._going_on.exception()

    def result(self) -> Any:
        self.wait()
        return self._result

    def _source_rank(self) -> int:
        """Return the rank of the sender, for a receive from any rank."""
        assert self._going_on is not None
        return int(self._going_on.result())

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        promise: torch.futures.Future[Any] = torch.futures.Future()
        if self._going_on is None:
            promise.set_result(self._result)
            return promise
        self._going_on.add_done_callback(lambda _: promise.set_result(None))
        # DDP waits in C++, which handles an error from a callback but not one from ``set_exception``.
        return promise.then(lambda _: self.result())


class Receives:
    """Receives that run while their caller sends.

    Receives from one source run one at a time, and so do receives from any source. A receive from any source
    may get a message that a receive from its sender is waiting for. The two kinds of receive therefore take
    turns, and each first looks at the messages that the other kind has received. This keeps each sender's
    messages in order.
    """

    def __init__(self, member: Group) -> None:
        self._member = member
        self._threads: dict[int | None, ThreadPoolExecutor] = {}
        self._changed = threading.Condition()  # guards the following attributes
        self._other: defaultdict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)
        self._waiting: Counter[int | None] = Counter()  # number of receives that are waiting, by source
        self._receiving: set[int | None] = set()  # sources from which a thread is receiving
        self._has_received_from_any = self._closed = False
        end_before_threads(self, Receives.close)

    def start(self, tensors: Tensors, source: int | None, tag: int) -> Work:
        if source not in self._threads:
            self._threads[source] = ThreadPoolExecutor(1, thread_name_prefix=f"flowchan-receive-{source}")
        return Work(list(tensors), self._threads[source].submit(self._receive, tensors, source, tag))

    def _receive(self, tensors: Tensors, source: int | None, tag: int) -> int:
        """Receive tensors and return the rank of their sender; all must come from the sender of the first."""
        for x in tensors:
            source, found = self._next(source, tag)
            if found.dtype != x.dtype or found.numel() != x.numel():
                raise Mismatch(
                    f"rank {source} sent {described(found)}, but the receiver's tensor is {described(x)}"
                )
            with torch.no_grad():
                x.copy_(found.reshape(x.shape))

        assert source is not None
        return source

    def _next(self, source: int | None, tag: int) -> tuple[int, torch.Tensor]:
        """Return the next message with this tag, and its sender."""
        with self._changed:
            self._waiting[source] += 1
            try:
                while (came := self._of(source, tag)) is None:
                    if self._closed:
                        raise GroupError(f"receive failed: {self._member!r} is closed")
                    if self._may_receive(source):
                        self._receive_next(source)
                    else:
                        self._changed.wait()
                return came
            finally:
                self._waiting[source] -= 1
                self._changed.notify_all()

    def _may_receive(self, source: int | None) -> bool:
        others = sum(self._waiting.values()) - self._waiting[None]
        if source is None:
            return not self._receiving and not (self._has_received_from_any and others)
        return None not in self._receiving and (self._has_received_from_any or not self._waiting[None])

    def _receive_next(self, source: int | None) -> None:
        """Receive one message for any waiting receive, unless no message arrives during this turn."""
        self._receiving.add(source)
        self._changed.release()
        received: Any = None
        try:
            if source is None:
                received = self._member.receive_any(timeout=_TURN)
            else:
                received = self._member.receive(source, timeout=_TURN), source
        except TimeoutError:
            pass
        finally:
            self._changed.acquire()
            if received is not None:
                (its_tag, found), sender = received
                self._other[sender, its_tag].append(found)
            self._receiving.remove(source)
            self._has_received_from_any = source is None
            self._changed.notify_all()

    def _of(self, source: int | None, tag: int) -> tuple[int, torch.Tensor] | None:
        """Return the next received message with this tag, or None."""
        for (sender, its_tag), waiting in self._other.items():
            if waiting and its_tag == tag and source in (None, sender):
                return sender, waiting.popleft()
        return None

    def close(self) -> None:
        """End receives that are waiting, before the member leaves."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads.values():
            thread.shutdown(wait=True, cancel_futures=True)


class ProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """A group with the interface of torch's process group.

    Every collective takes lists of tensors and options. As in torch's own process groups, it also accepts a
    single tensor, and the operation or the root in place of the options. DDP's ``join`` makes such calls.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._group = meet_by_store(store, rank, size, timeout.total_seconds())
        self._receives = Receives(self._group)
        self._name = self._description = ""
        self._is_alone = False  # true once the check has passed

    # --- names, which functional collectives need ---

    def getBackendName(self) -> str:  # noqa: N802
        return "flowchan"

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def pg_name(self) -> str:
        return self._name

    # --- this backend for all devices ---

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    def _get_backend(self, device: torch.device) -> ProcessGroup:
        return self

    def shutdown(self) -> None:
        self._receives.close()
        self._group.close()

    abort = shutdown

    # --- collectives ---

    def allreduce(self, tensors: Tensors | torch.Tensor, opts: Any = None) -> Work:
        op, tensors = _op(opts), _listed(tensors)
        return self._do(
            tensors, lambda: [self._group._reduced(ALLREDUCE, x, op, None, -1, None) for x in tensors]
        )

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Tensors | torch.Tensor, opts: Any) -> Work:
        root, tensors = _root(opts), _listed(tensors)
        return self._do(tensors, lambda: [self._group._spread_any(x, root, None) for x in tensors])

    def reduce(self, tensors: Tensors | torch.Tensor, opts: Any, op: Any = None) -> Work:
        root, op, tensors = _root(opts), _op(op or opts), _listed(tensors)
        return self._do(
            tensors, lambda: [self._group._reduced(REDUCE, x, op, None, root, None) for x in tensors]
        )

    def allgather(self, outputs: Any, inputs: Tensors | torch.Tensor, opts: Any = None) -> Work:
        outputs, inputs = _alike(outputs, inputs), _listed(inputs)

        def run() -> None:
            for out, x in zip(outputs, inputs, strict=True):
                self._gather_into(x, list(out))

        return self._do(inputs, run, outputs)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        """Gather several tensors.

        ``outputs`` is indexed by rank and then by tensor; for ``allgather``, by tensor and then by rank.
        """
        parts_argument("allgather_coalesced", "output_tensor_lists", outputs, self._group.size)
        for rank, parts in enumerate(outputs):
            if len(parts) != len(inputs):
                raise ValueError(
                    f"allgather_coalesced: output_tensor_lists[{rank}] must have a tensor for each of the "
                    f"{len(inputs)} inputs, got {len(parts)}"
                )
        self.allgather(list(zip(*outputs, strict=True)), inputs).wait()
        return _done([list(parts) for parts in outputs])

    def all_gather_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any = None) -> Work:
        return self._do([x], lambda: self._gather_into(x, output), [output])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        def run() -> None:
            for out, x in zip(outputs, inputs, strict=True):
                self._gather_into(x, out)

        return self._do(inputs, run, outputs)

    def reduce_scatter(self, outputs: Tensors | torch.Tensor, inputs: Any, opts: Any = None) -> Work:
        op, inputs, outputs = _op(opts), _alike(inputs, outputs), _listed(outputs)
        for parts in inputs:
            parts_argument("reduce_scatter", "input_list", parts, self._group.size)

        def run() -> None:
            for out, parts in zip(outputs, inputs, strict=True):
                for root, part in enumerate(parts):
                    self._group._reduced(REDUCE_SCATTER, part, op, out, root, None)

        return self._do(outputs, run)

    def reduce_scatter_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any = None) -> Work:
        op = _op(opts)
        return self._do([x], lambda: self._group._part_reduced(x, output, op, None), [output])

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        op = _op(opts)

        def run() -> None:
            for out, x in zip(outputs, inputs, strict=True):
                self._group._part_reduced(x, out, op, None)

        return self._do(inputs, run, outputs)

    def gather(self, outputs: Any, inputs: Tensors | torch.Tensor, opts: Any) -> Work:
        outputs, inputs, root = _alike(outputs, inputs), _listed(inputs), _root(opts)
        (x,) = inputs
        nothing = x.new_empty(0)
        ins = [x if rank == root else nothing for rank in range(self._group.size)]
        outs = list(outputs[0]) if self._group.rank == root else [nothing] * self._group.size
        return self._do(inputs, lambda: self._group._swap_arrays(GATHER, ins, outs, None, root), outputs)

    def scatter(self, outputs: Tensors | torch.Tensor, inputs: Any, opts: Any) -> Work:
        inputs, outputs, root = _alike(inputs, outputs), _listed(outputs), _root(opts)
        (out,) = outputs
        nothing = out.new_empty(0)
        ins = list(inputs[0]) if self._group.rank == root else [nothing] * self._group.size
        outs = [out if rank == root else nothing for rank in range(self._group.size)]
        return self._do(outputs, lambda: self._group._swap_arrays(SCATTER, ins, outs, None, root))

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        return self._do(inputs, lambda: self._group._swap_arrays(ALLTOALL, inputs, outputs, None), outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        x: torch.Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
    ) -> Work:
        size = self._group.size
        ins = list(torch.split(x, list(input_splits) or x.shape[0] // size))
        outs = list(torch.split(output, list(output_splits) or output.shape[0] // size))
        if not x.shape[0]:
            ins = [x] * size
        if not output.shape[0]:
            outs = [output] * size
        return self._do([x], lambda: self._group._swap_arrays(ALLTOALL, ins, outs, None), [output])

    def barrier(self, opts: Any = None) -> Work:
        self._check_alone()
        self._group.barrier()
        return _done([])

    # --- messages, which are independent of the collectives ---

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> Work:
        self._check_alone()
        for x in tensors:
            self._group.send((tag, x.detach().contiguous()), to)
        return Work(tensors)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Work:
        self._check_alone()
        return self._receives.start(tensors, source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        self._check_alone()
        return self._receives.start(tensors, None, tag)

    # torch 2.4 calls these methods only by their Python names
    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc
    # torch's names before version 2.13
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _gather_into(self, x: torch.Tensor, out: Any) -> None:
        self._group._gather_into(x, out, None)

    def _do(self, tensors: Tensors, run: Callable[[], Any], result: Any = None) -> Work:
        """Run a small operation now, and a large one in the thread, so that torch's autograd continues."""
        self._check_alone()
        result = list(tensors) if result is None else result
        if _FORGETS or sum(x.numel() * x.element_size() for x in tensors) < _LATER:
            self._group._settle()
            run()
            return _done(result)
        return Work(result, self._group._start(run, *tensors)._future)

    def _check_alone(self) -> None:
        """Raise ``ValueError`` if the process group names other backends, which torch ignores silently."""
        if self._is_alone:
            return
        named = str(_c10d_python._world.pg_backend_config.get(self, ""))
        others = [one for one in named.split(",") if one.partition(":")[2] not in ("", "flowchan")]
        if set(others) - {"cuda:nccl"}:
            raise ValueError(
                f'the backend must be "flowchan" alone, got "{named}"; CUDA tensors use NCCL without '
                'a second backend, and dist.new_group(backend="gloo") creates a group with another '
                "backend"
            )
        self._is_alone = True


def _done(result: Any) -> Work:
    """Return a completed torch ``Work`` object.

    DDP's ``join`` passes it to C++ without keeping a Python reference to it. A :class:`Work` from this module
    would lose its Python part, and the remaining C++ base would wait forever.
    """
    promise: torch.futures.Future[Any] = torch.futures.Future()
    promise.set_result(result)
    work: Work = _c10d._create_work_from_future(promise)
    return work


def _listed(tensors: Tensors | torch.Tensor) -> Tensors:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _alike(parts: Any, tensors: Tensors | torch.Tensor) -> Any:
    """Return ``parts`` as a list with one entry for each tensor, even if ``tensors`` is a single tensor."""
    return [parts] if isinstance(tensors, torch.Tensor) else parts


def _root(opts: Any) -> int:
    return int(getattr(opts, "rootRank", opts))


def _op(opts: Any) -> str:
    op = getattr(opts, "reduceOp", _Reduce.SUM if opts is None or isinstance(opts, int) else opts)
    op = getattr(op, "op", op)
    if op not in _OPS:
        raise ValueError(
            f"with the flowchan backend, the reduction must be one of {', '.join(_OPS.values())}, got {op}"
        )
    return _OPS[op]


dist.Backend.register_backend("flowchan", ProcessGroup, devices=["cpu"])
