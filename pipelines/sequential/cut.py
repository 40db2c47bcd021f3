"""Where a module is cut, and into how many micro-batches a batch: by what the first batch shows, unless it
was said."""

from __future__ import annotations

import contextlib
import operator
import os
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
from flowchan.pipelines.sequential.parts import Part, compute_threads, divided
from flowchan.pipelines.sequential.tensor_trees import batch_size, evenly, join_checked, split

CHUNKS = 8
"""A batch has at most so many micro-batches where their number is left to us."""

PAYS = 50e6
"""Floating point operations for which a part gets a micro-batch of its own: about a millisecond on one core,
several times what it costs to pass a micro-batch on. They are counted and not timed, so that chunks are the
same in every run."""

ADDS = 512
"""Operations of a micro-batch's forward pass for each parameter, where it goes back as well: each micro-batch
adds once to every gradient, which goes through memory, and so should be little beside them. A linear layer
has so many with 256 samples. Counted, for the same reason."""

PASSING = {"process": 100e-6, "thread": 50e-6}
"""Seconds that a batch costs a part beside its layers; the program, at both ends, it costs twice that."""


class Cut:
    """The parts of a module: ``counts`` layers each, or so many as make the slowest of ``counts`` parts as
    quick as can be, measured with the first batch; until then they are equal. Any thread may use it."""

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
        self._verify = verify  # with the first micro-batch
        self._free = isinstance(counts, int) and _on_cpu(module, devices)
        self._open = self._free and 1 < cast("int", counts) < len(module)
        self._seen = self._counted = False
        self._work: list[float] | None = None  # operations of each layer for one sample, where they are known
        self._divide(evenly(len(module), counts) if isinstance(counts, int) else counts)

    def _divide(self, counts: Sequence[int]) -> None:
        self._layers = list(self.module._modules.values())
        self._parts = divided(self.module, counts, self.devices, away=bool(self.on.hosts))

    @property
    def parts(self) -> list[Part]:
        """Those of the layers of now. ``ValueError`` where layers came or went."""
        layers = self.module._modules
        if len(layers) != len(self._layers):
            raise ValueError(
                f"Sequential: the module has {len(layers)} layers, but had {len(self._layers)} when it was "
                "cut into parts; make another pipe of it"
            )
        if not all(map(operator.is_, layers.values(), self._layers)):  # one was replaced by another
            self._divide([len(part.module) for part in self._parts])
            if not self.on.apart:
                for part in self._parts:
                    part.module.to(part.device)
        return self._parts

    @property
    def counts(self) -> int | list[int]:
        """The layers of each part, or the number of parts as long as it is not measured where to cut."""
        return len(self._parts) if self._open else [len(part.module) for part in self._parts]

    def pieces(self, value: Any, whole: bool = False, back: bool = False) -> list[Any]:
        """The micro-batches of a batch, which may go ``back``; one if it shall stay ``whole``. The first
        batch is checked. Raises as ``split`` and ``check_shapes`` do."""
        samples = self.samples(value)
        with self._lock:
            if not self._seen:
                sample = value if whole else split(value, self.chunks or CHUNKS, dim=self.dim)[0]
                self._verified(sample)
                with contextlib.suppress(*([] if self.join is None else [TypeError, ValueError])):
                    self._work = check_shapes(self.module, sample, self.dim)
                self._seen = True
        chunks = 1 if whole else self._chunks(samples, back)
        return split(value, chunks, dim=self.dim)

    def samples(self, value: Any) -> int:
        """How many samples a batch or micro-batch has."""
        return batch_size(value, dim=self.dim)

    def joined(self, values: list[Any], sizes: list[int], batch: str) -> Any:
        """The output of a batch from those of its micro-batches."""
        return join_checked(values, sizes, batch, self.dim) if self.join is None else self.join(values)

    def split(self, value: Any) -> list[Any]:
        """The micro-batches of a batch for a training, whose output need not be one that can be joined."""
        with self._lock:
            if self._verify is not None:
                self._verified(split(value, self.chunks or CHUNKS)[0])
            self._count(value)
        return split(value, self._chunks(batch_size(value), back=True))

    def halvable(self) -> bool:
        """Whether :meth:`halves` are what a training had better have: not on hosts, for those pass twice as
        much to each other, and not where layers share a parameter, which only one part may have."""
        owned = [tensor for layer in self._layers for tensor in {*layer.parameters(), *layer.buffers()}]
        enough = len(self._layers) >= 2 * len(self.parts) > 2
        return self._free and enough and not self.on.hosts and len(set(owned)) == len(owned)

    def halves(self, value: Any = None) -> list[Part]:
        """Twice as many parts, whose work is as even as can be, as counted with the batch ``value``. It is
        not measured: a training draws the same random numbers in every run, and these depend on the
        parts."""
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
        with contextlib.suppress(TypeError, ValueError):  # of a training the output need not be joined
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
        # Fewer than two for each part would have parts wait longer than the sums of gradients take.
        return min(chunks, max(int(work / (ADDS * parameters)), 2 * len(self.parts)))

    def measure(self, piece: Any) -> None:
        """Finds the best cut with the first micro-batch of all, and does nothing later. Says by a warning
        that the pipe will not be quicker than the plain module."""
        with self._lock:
            if not self._open or not self.samples(piece):
                return
            self._open = False
            number = len(self.parts)
            threads = compute_threads(number) if self.on.apart else torch.get_num_threads()
            try:
                costs = balancing.costs(self.module, piece, "time", threads, backward=False)
                plain = balancing.seconds(self.module, piece)
            except Exception:  # a layer that can't be copied, or fails: it will say so when it runs
                return
            counts = balancing.best_split(costs, number)
            if counts != [len(part.module) for part in self.parts]:
                self._divide(counts)
            if self.on.hosts:  # what they can do is not known here
                return
            ends = accumulate(counts, initial=0)
            slowest = max(sum(costs[begin:end]) for begin, end in pairwise(ends))
            cores = len(os.sched_getaffinity(0))
            passing = PASSING[self.on.name]
            busy = sum(costs) * min(threads, cores) + (number + 2) * passing  # seconds of all cores together
            expected = max(slowest + passing, busy / cores)
            if expected >= plain:
                self._warn(self.samples(piece), plain, expected)

    def _warn(self, samples: int, plain: float, expected: float) -> None:
        threads = torch.get_num_threads()
        with_threads = f"torch's {threads} compute threads" if threads > 1 else "one compute thread"
        warnings.warn(
            f"Sequential: in {len(self.parts)} parts this module won't be quicker than by itself with "
            f"{with_threads}: {samples} samples at once take it {plain * 1e3:.2g} ms, and a pipe "
            f"{expected * 1e3:.2g} ms at best; larger batches or fewer chunks may pay, or call the module "
            "itself",
            RuntimeWarning,
            stacklevel=2,
        )


def _on_cpu(module: nn.Module, devices: Sequence[torch.device] | None) -> bool:
    """Elsewhere a clock does not tell how long a layer computes."""
    tensors = [*module.parameters(), *module.buffers()]
    return all(one.type == "cpu" for one in devices or ()) and all(
        tensor.device.type == "cpu" for tensor in tensors
    )
