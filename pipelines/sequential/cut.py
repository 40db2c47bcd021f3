"""Choose a module's parts and the number of micro-batches.

The first batch determines whatever the user has not chosen.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import warnings
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import nn

from flowchan.declare.placements import Placement
from flowchan.pipelines.sequential import balance as balancing
from flowchan.pipelines.sequential.checks import check_shapes
from flowchan.pipelines.sequential.cuda_streams import from_workers, to_workers
from flowchan.pipelines.sequential.parts import Part, compute_threads, divided
from flowchan.pipelines.sequential.tensor_trees import batch_size, evenly, join_checked, split
from flowchan.run.observe.cgroups import affinity_cores

CHUNKS = 8
"""Maximum number of micro-batches per batch, unless the user sets it."""

PAYS = 50e6
"""Floating-point operations per part that justify another micro-batch. They take about a millisecond on one
core, which is several times the cost of passing on a micro-batch. They are counted, not timed, so every run
uses the same number of micro-batches."""

ADDS = 512
"""Minimum number of forward operations per parameter and micro-batch, if there is a backward pass. Each
micro-batch adds to every gradient in memory once, which should take little time compared with its operations.
A linear layer reaches this number with 256 samples. As above, operations are counted, not timed."""

PASSING = {"process": 100e-6, "thread": 50e-6}
"""Overhead per batch and part, in seconds.

The program has twice this overhead, because it works at both ends of the pipe.
"""


class Cut:
    """Decides where to cut a module into parts. Several threads can share this object.

    ``counts`` is the number of layers in each part, or the number of parts. If only the number of parts is
    given, the parts first have equal numbers of layers. The first batch then determines the cut that makes
    the slowest part as fast as possible.
    """

    def __init__(
        self,
        module: nn.Sequential,
        counts: int | Sequence[int],
        on: Placement,
        chunks: int | None,
        devices: Sequence[torch.device] | None,
        dim: int = 0,
        join: Callable[[list[Any]], Any] | None = None,
        verify: Callable[[Any], None] | None = None,
    ) -> None:
        self.module, self.on, self.chunks, self.devices = module, on, chunks, devices
        self.dim, self.join = dim, join
        self._lock = threading.Lock()
        self._verify = verify  # called with the first micro-batch
        self._free = isinstance(counts, int) and _on_cpu(module, devices)
        self._open = self._free and 1 < cast("int", counts) < len(module)
        self._seen = self._counted = False
        self._work: list[float] | None = None  # operations per sample of each layer, if known
        self._divide(evenly(len(module), counts) if isinstance(counts, int) else counts)

    def _divide(self, counts: Sequence[int]) -> None:
        self._layers = list(self.module._modules.values())
        self._parts = divided(self.module, counts, self.devices, remote=bool(self.on.hosts))

    @property
    def parts(self) -> list[Part]:
        """Parts with the current layers. Raises ``ValueError`` if layers were added or removed."""
        layers = self.module._modules
        if len(layers) != len(self._layers):
            raise ValueError(
                f"Sequential: the module must still have the {len(self._layers)} layers it had when the pipe "
                f"was created, got {len(layers)}; create another pipe"
            )
        if not all(map(operator.is_, layers.values(), self._layers)):  # a layer has been replaced
            self._divide([len(part.module) for part in self._parts])
            if not self.on.own_process:
                for part in self._parts:
                    part.module.to(part.device)
        return self._parts

    @property
    def counts(self) -> int | list[int]:
        """Number of layers in each part or, until the cut is decided, the number of parts."""
        return len(self._parts) if self._open else [len(part.module) for part in self._parts]

    def pieces(self, value: Any, whole: bool = False, back: bool = False) -> list[Any]:
        """Split a batch into micro-batches, and check the first batch.

        ``back`` means that a backward pass follows, and ``whole`` that the batch must not be split. Raises
        the same errors as ``split`` and ``check_shapes``.
        """
        samples = self.samples(value)
        with self._lock:
            if not self._seen:
                sample = value if whole else split(value, self.chunks or CHUNKS, dim=self.dim)[0]
                self._verified(sample)
                with contextlib.suppress(*([] if self.join is None else [TypeError, ValueError])):
                    self._work = check_shapes(self.module, sample, self.dim)
                self._seen = True
        chunks = 1 if whole else self._chunks(samples, back)
        to_workers(value)
        return split(value, chunks, dim=self.dim)

    def samples(self, value: Any) -> int:
        """Return the number of samples in a batch or micro-batch."""
        return batch_size(value, dim=self.dim)

    def joined(self, values: list[Any], sizes: list[int], batch: str) -> Any:
        """Combine the outputs of a batch's micro-batches."""
        from_workers(values)
        return join_checked(values, sizes, batch, self.dim) if self.join is None else self.join(values)

    def split(self, value: Any) -> list[Any]:
        """Split a batch for training, where the outputs of the micro-batches need not be joinable."""
        with self._lock:
            if self._verify is not None:
                self._verified(split(value, self.chunks or CHUNKS)[0])
            self._count(value)
        to_workers(value)
        return split(value, self._chunks(batch_size(value), back=True))

    def halvable(self) -> bool:
        """Return True if training should use :meth:`halves`.

        The halves would double the network traffic between hosts. If layers share a parameter, halves are not
        possible, because two parts would own the parameter.
        """
        owned = [tensor for layer in self._layers for tensor in {*layer.parameters(), *layer.buffers()}]
        enough = len(self._layers) >= 2 * len(self.parts) > 2
        return self._free and enough and not self.on.hosts and len(set(owned)) == len(owned)

    def halves(self, value: Any = None) -> list[Part]:
        """Return twice as many parts, whose shares of the operations for ``value`` are as equal as possible.

        Time is not measured, because measured times vary between runs. The parts would vary with them, and
        so would the random numbers of training, which must be the same in every run.
        """
        with self._lock:
            if value is not None:
                self._count(value)
            number = 2 * len(self.parts)
            layers = len(self.module)
            counts = (
                evenly(layers, number) if self._work is None else balancing.best_split(self._work, number)
            )
            return divided(self.module, counts)

    def _count(self, value: Any) -> None:
        if self._seen or self._counted:
            return
        self._counted = True
        with contextlib.suppress(TypeError, ValueError):  # ignored, because training joins no outputs
            self._work = check_shapes(self.module, split(value, CHUNKS)[0])

    def _verified(self, sample: Any) -> None:
        if self._verify is not None and self.samples(sample):
            self._verify(sample)
            self._verify = None

    def _chunks(self, samples: int, back: bool) -> int:
        if self.chunks is not None:
            return self.chunks
        if self._work is None:
            return CHUNKS
        work = sum(self._work) * samples
        chunks = max(1, min(CHUNKS, int(work / (PAYS * len(self.parts)))))
        parameters = sum(one.numel() for one in self.module.parameters() if one.requires_grad)
        if not back or not parameters:
            return chunks
        # Use at least two micro-batches per part. Fewer micro-batches mean fewer additions of gradients, but
        # the idle time of the workers would cost more.
        return min(chunks, max(int(work / (ADDS * parameters)), 2 * len(self.parts)))

    def measure(self, piece: Any) -> None:
        """Measure the layers with the first micro-batch to choose the best cut. Later calls do nothing.

        Warn if the pipe will not be faster than the plain module.
        """
        with self._lock:
            if not self._open or not self.samples(piece):
                return
            self._open = False
            number = len(self.parts)
            threads = compute_threads(number) if self.on.own_process else torch.get_num_threads()
            try:
                costs = balancing.costs(self.module, piece, "time", threads, backward=False)
                plain = balancing.seconds(self.module, piece)
            except Exception:  # a layer cannot be copied, or it fails; the run will report this
                return
            counts = balancing.best_split(costs, number)
            if counts != [len(part.module) for part in self.parts]:
                self._divide(counts)
            if self.on.hosts:  # do not warn, because the speed of the hosts is unknown
                return
            ends = accumulate(counts, initial=0)
            slowest = max(sum(costs[begin:end]) for begin, end in pairwise(ends))
            cores = affinity_cores()
            passing = PASSING[self.on.name]
            # CPU time of a batch. The batch cannot end before all cores together have spent this time.
            busy = sum(costs) * min(threads, cores) + (number + 2) * passing
            expected = max(slowest + passing, busy / cores)
            if expected >= plain:
                self._warn(self.samples(piece), plain, expected)

    def _warn(self, samples: int, plain: float, expected: float) -> None:
        threads = torch.get_num_threads()
        with_threads = f"torch's {threads} compute threads" if threads > 1 else "one compute thread"
        warnings.warn(
            f"Sequential: with {len(self.parts)} parts, the pipe will not be faster than the "
            f"plain module with {with_threads}: {samples} samples take at least "
            f"{expected * 1e3:.2g} ms instead of {plain * 1e3:.2g} ms; use larger batches or "
            "fewer chunks",
            RuntimeWarning,
            stacklevel=2,
        )


def _on_cpu(module: nn.Module, devices: Sequence[torch.device] | None) -> bool:
    """Return True if all tensors are on the CPU.

    Only then does this thread's CPU time measure the computation.
    """
    tensors = [*module.parameters(), *module.buffers()]
    return all(one.type == "cpu" for one in devices or ()) and all(
        tensor.device.type == "cpu" for tensor in tensors
    )
