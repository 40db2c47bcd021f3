"""Implement the ``"flowchan"`` backend for ``torch.distributed``.

    torch.distributed.init_process_group("flowchan")

From torch 2.5 on, this call is enough. In earlier versions, first import this module, which registers the
backend.

CPU tensors use flowchan, and CUDA tensors use NCCL, as in any group of flowchan. The errors are also those of
a group. If a member dies, all survivors raise :class:`flowchan.MemberDied`; mismatched calls raise
:class:`flowchan.Mismatch`. A ``timeout`` other than torch's default limits the time of each operation. A late
operation raises :class:`~flowchan.collective.torch.works.OperationTimeout`.

A process group can have only this backend, because torch silently ignores other backends that are named with
it. The first operation of a group with ``"cpu:flowchan,cuda:gloo"`` therefore raises ``ValueError``.
``"cpu:flowchan,cuda:nccl"`` is equivalent to ``"flowchan"``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from flowchan.collective.call_arguments import parts_argument
from flowchan.collective.operations import ALLREDUCE, ALLTOALL, GATHER, REDUCE, REDUCE_SCATTER, SCATTER
from flowchan.collective.rendezvous.store import meet_by_store
from flowchan.collective.torch.monitored_barrier import MonitoredBarrier
from flowchan.collective.torch.receives import Receives, Tensors
from flowchan.collective.torch.works import Work, done, recorded, timed

_LATER = 64 * 1024
"""From this size in bytes on, a thread runs the operation while its caller continues."""

_FORGETS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7)
"""Whether this version of torch may free a :class:`Work` of this module while torch's C++ code waits for that
work. If so, operations run at once and return torch's own work objects."""

# The types of these objects differ between versions of torch.
_c10d_python: Any = dist.distributed_c10d
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


class ProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """Group with the interface of torch's process groups.

    Every collective takes lists of tensors and options. Like torch's own process groups, it also accepts a
    single tensor, with the operation or root in place of the options. DDP's ``join`` makes such calls.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._group = meet_by_store(store, rank, size, timeout.total_seconds())
        self._timeout = timeout
        self._limit = None if timeout == dist.default_pg_timeout else timeout.total_seconds()
        self._barriers = 0
        self._receives = Receives(self._group)
        self._name = self._description = ""
        self._is_alone = False  # true once _check_alone() has passed

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
        is_sparse = any(x.layout == torch.sparse_coo for x in tensors)

        def run() -> None:
            for x in tensors:
                if is_sparse:
                    self._sum_sparse(x, op)
                else:
                    self._group._reduced(ALLREDUCE, x, op, None, -1, self._limit)

        if is_sparse:
            return self._do("sparse_all_reduce", [], run, tensors)
        return self._do("all_reduce", tensors, run)

    def _sum_sparse(self, x: torch.Tensor, op: str) -> None:
        if op != "sum":
            raise ValueError(f"all_reduce: the reduction of sparse tensors must be sum, got {op}")
        own = x.detach().coalesce()
        parts = self._group.allgather((own.indices(), own.values()), timeout=self._limit)
        total = functools.reduce(
            torch.add, [torch.sparse_coo_tensor(indices, values, x.shape) for indices, values in parts]
        )
        with torch.no_grad():
            x.copy_(total.coalesce())

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Tensors | torch.Tensor, opts: Any) -> Work:
        root, tensors = _root(opts), _listed(tensors)

        def run() -> None:
            for x in tensors:
                self._group._spread_any(x, root, self._limit)

        return self._do("broadcast", tensors, run)

    def reduce(self, tensors: Tensors | torch.Tensor, opts: Any, op: Any = None) -> Work:
        root, op, tensors = _root(opts), _op(op or opts), _listed(tensors)

        def run() -> None:
            for x in tensors:
                self._group._reduced(REDUCE, x, op, None, root, self._limit)

        return self._do("reduce", tensors, run)

    def allgather(self, outputs: Any, inputs: Tensors | torch.Tensor, opts: Any = None) -> Work:
        outputs, inputs = _alike(outputs, inputs), _listed(inputs)

        def run() -> None:
            for out, x in zip(outputs, inputs, strict=True):
                self._gather_into(x, list(out))

        return self._do("all_gather", inputs, run, outputs)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        """Gather several tensors.

        ``outputs`` is indexed by rank and then by tensor; for ``allgather``, it is indexed by tensor and then
        by rank.
        """
        parts_argument("allgather_coalesced", "output_tensor_lists", outputs, self._group.size)
        for rank, parts in enumerate(outputs):
            if len(parts) != len(inputs):
                raise ValueError(
                    f"allgather_coalesced: output_tensor_lists[{rank}] must have a tensor for each of the "
                    f"{len(inputs)} inputs, got {len(parts)}"
                )
        self.allgather(list(zip(*outputs, strict=True)), inputs).wait()
        return done([list(parts) for parts in outputs])

    def all_gather_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any = None) -> Work:
        return self._do("all_gather", [x], lambda: self._gather_into(x, output), [output])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        def run() -> None:
            for out, x in zip(outputs, inputs, strict=True):
                self._gather_into(x, out)

        return self._do("all_gather", inputs, run, outputs)

    def reduce_scatter(self, outputs: Tensors | torch.Tensor, inputs: Any, opts: Any = None) -> Work:
        op, inputs, outputs = _op(opts), _alike(inputs, outputs), _listed(outputs)
        for parts in inputs:
            parts_argument("reduce_scatter", "input_list", parts, self._group.size)

        def run() -> None:
            for out, parts in zip(outputs, inputs, strict=True):
                for root, part in enumerate(parts):
                    self._group._reduced(REDUCE_SCATTER, part, op, out, root, self._limit)

        return self._do("reduce_scatter", outputs, run)

    def reduce_scatter_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([output], [x], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        op = _op(opts)

        def run() -> None:
            for out, x in zip(outputs, inputs, strict=True):
                self._group._part_reduced(x, out, op, self._limit)

        return self._do("reduce_scatter", inputs, run, outputs)

    def gather(self, outputs: Any, inputs: Tensors | torch.Tensor, opts: Any) -> Work:
        outputs, inputs, root = _alike(outputs, inputs), _listed(inputs), _root(opts)
        (x,) = inputs
        nothing = x.new_empty(0)
        ins = [x if rank == root else nothing for rank in range(self._group.size)]
        outs = list(outputs[0]) if self._group.rank == root else [nothing] * self._group.size
        return self._do("gather", inputs, lambda: self._swap(GATHER, ins, outs, root), outputs)

    def scatter(self, outputs: Tensors | torch.Tensor, inputs: Any, opts: Any) -> Work:
        inputs, outputs, root = _alike(inputs, outputs), _listed(outputs), _root(opts)
        (out,) = outputs
        nothing = out.new_empty(0)
        ins = list(inputs[0]) if self._group.rank == root else [nothing] * self._group.size
        outs = [out if rank == root else nothing for rank in range(self._group.size)]
        return self._do("scatter", outputs, lambda: self._swap(SCATTER, ins, outs, root))

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        return self._do("all_to_all", inputs, lambda: self._swap(ALLTOALL, inputs, outputs), outputs)

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
        return self._do("all_to_all", [x], lambda: self._swap(ALLTOALL, ins, outs), [output])

    def barrier(self, opts: Any = None) -> Work:
        return self._do("barrier", [], lambda: self._group.barrier(timeout=self._limit))

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks. If some ranks do not make this call in time, raise an error that names them.

        ``torch.distributed.monitored_barrier`` calls this. After a timeout of this call, the group can still
        be used, unlike after a timeout of other operations.

        Args:
            timeout: Time limit (default: the timeout of the process group).
            wait_all_ranks: Whether to name all missing ranks (default: only the lowest).

        Raises:
            DistBackendError: A rank did not make this call in time.
        """
        self._check_alone()
        limit = (self._timeout if timeout is None else timeout).total_seconds()
        self._barriers += 1
        MonitoredBarrier(self._group, self._receives, self._barriers, limit).wait(wait_all_ranks)

    # --- messages, which are independent of the collectives ---

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> Work:
        def start() -> Work:
            with timed(self._limit):
                for x in tensors:
                    self._group.send((tag, x.detach().contiguous()), to, timeout=self._limit)
            return Work(tensors)

        self._check_alone()
        return recorded("send", start)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Work:
        self._check_alone()
        return recorded("recv", lambda: self._receives.start(tensors, source, tag, self._limit))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        self._check_alone()
        return recorded("recv", lambda: self._receives.start(tensors, None, tag, self._limit))

    # torch 2.4 calls these methods only by these names.
    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc
    # Names that torch used before version 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _gather_into(self, x: torch.Tensor, out: Any) -> None:
        self._group._gather_into(x, out, self._limit)

    def _swap(self, doing: int, xs: Tensors, outs: Tensors, root: int | None = None) -> None:
        self._group._swap_arrays(doing, xs, outs, self._limit, root)

    def _do(self, name: str, tensors: Tensors, run: Callable[[], Any], result: Any = None) -> Work:
        """Run a small operation now. Run a large operation in a thread, so that autograd can continue."""
        self._check_alone()
        result = list(tensors) if result is None else result

        def within_limit() -> None:
            with timed(self._limit):
                run()

        def start() -> Work:
            if _FORGETS or sum(x.numel() * x.element_size() for x in tensors) < _LATER:
                self._group._settle()
                within_limit()
                return done(result)
            return Work(result, self._group._start(within_limit, *tensors)._future)

        return recorded(name, start)

    def _check_alone(self) -> None:
        """Raise ``ValueError`` if the process group names other backends, which torch silently ignores."""
        if self._is_alone:
            return
        named = str(_c10d_python._world.pg_backend_config.get(self, ""))
        others = [one for one in named.split(",") if one.partition(":")[2] not in ("", "flowchan")]
        if set(others) - {"cuda:nccl"}:
            raise ValueError(
                f'the backend must be just "flowchan", got "{named}"; it already uses NCCL for CUDA tensors, '
                'and dist.new_group(backend="gloo") creates a group with another backend'
            )
        self._is_alone = True


def _listed(tensors: Tensors | torch.Tensor) -> Tensors:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _alike(parts: Any, tensors: Tensors | torch.Tensor) -> Any:
    """Return ``parts`` as a list with an entry for each tensor, even if ``tensors`` is a single tensor."""
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


_monitored_barrier_of_torch = dist.monitored_barrier


@functools.wraps(_monitored_barrier_of_torch)
def _monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
    member = dist.group.WORLD if group is None else group
    if not isinstance(member, ProcessGroup):
        _monitored_barrier_of_torch(group, timeout, wait_all_ranks)
        return
    limit = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
    member.monitored_barrier(limit, wait_all_ranks)


# Replace torch's own function, which rejects every backend except gloo.
dist.monitored_barrier = _c10d_python.monitored_barrier = _monitored_barrier
dist.Backend.register_backend("flowchan", ProcessGroup, devices=["cpu"])
