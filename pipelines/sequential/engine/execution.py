"""Run the forward and backward passes of one part in a separate autograd graph.

Autograd's graph ends at the borders of the part. Inputs are detached, and become leaves if their gradients
are needed. The backward pass starts from the gradients of the outputs and returns the gradients of the
leaves. The previous part continues from these gradients. In other words, this module applies the chain rule
at the borders of parts.

*Recompute* (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"): the first forward pass keeps
only its input. Before the backward pass, the forward pass is repeated with the same random numbers.

*Random numbers*: each micro-batch has its own seed in each part, derived from the step's seed, the part and
the number of the micro-batch. For the same parts, dropout therefore draws the same masks under every
schedule, on threads and in processes, and when recomputed. The plain module draws different masks, because it
draws them for the whole batch at once. All threads share torch's generator, so a part on a thread that may
draw random numbers locks the generator during its forward pass.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from flowchan.pipelines.sequential.batchnorm import DeferredBatchNorm
from flowchan.pipelines.sequential.engine.split_backward import SplitBackward
from flowchan.pipelines.sequential.parts import Casting, Part, cast_as, run_part
from flowchan.pipelines.sequential.segments import Owned, Segment
from flowchan.pipelines.sequential.skip import Skips
from flowchan.pipelines.sequential.tensor_trees import mapped, tensors

GENERATOR = threading.Lock()
"""Lock for torch's random number generator in this process."""

DRAWS = (
    _DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d, nn.MultiheadAttention, nn.RNNBase,
    nn.Transformer, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer,
)  # fmt: skip
"""torch's layers that may draw random numbers."""

Tail = Callable[[Any], Tensor]
"""Function that runs after the last part and computes the weighted loss of a micro-batch."""


class Passed(NamedTuple):
    """Micro-batch between two parts: its value, and its skips by name.

    For each tensor in the order of :func:`listed`, ``wants`` tells whether its gradient must be returned.
    """

    value: Any
    skips: Skips
    wants: tuple[bool, ...]


class _Forward(NamedTuple):
    """Completed forward pass, with its autograd graph.

    The object stores the leaves whose gradients are needed, and the outputs that may receive gradients.
    """

    leaves: list[Tensor]
    outputs: list[Tensor]


class _Again(NamedTuple):
    """Inputs that are kept to recompute a forward pass."""

    passed: Passed
    seed: int
    tail: Tail | None
    casting: Casting
    wants: list[bool]


Key = tuple[int, int]
"""Number of the step or call, and number of the micro-batch within the batch."""


def listed(value: Any, skips: Skips) -> list[Tensor]:
    """Return the tensors of a value, followed by the tensors of the skips, sorted by name."""
    return tensors((value, [skips[name] for name in sorted(skips)]))


class Execution:
    """Forward and backward passes of one part, to be used by a single thread.

    ``recompute``: repeat the forward pass before the backward pass. ``shared``: other workers in this process
    also use torch's generator. ``deferred``: ``norms.commit()`` updates the running statistics of batch norm
    layers at the end of each batch.
    """

    def __init__(self, part: Part, *, recompute: bool, shared: bool, deferred: bool = True) -> None:
        self.part = part
        self.norms = DeferredBatchNorm(part.module)
        self._deferred = deferred
        self._recompute = recompute
        self._shared = shared
        self._may_draw = may_draw(part.module)
        self._held: dict[Key, _Forward | _Again] = {}
        self._halves: dict[Key, SplitBackward] = {}  # micro-batches whose second half has not run yet

    def forward(
        self,
        key: Key,
        passed: Passed,
        seed: int = 0,
        tail: Tail | None = None,
        casting: Casting = (),
        soon: bool = False,
    ) -> Passed:
        """Run the forward pass of a micro-batch, and return the detached outputs.

        ``soon`` means that the backward pass follows immediately. Recomputing would then save no memory.
        """
        if self._recompute and not soon:
            with torch.no_grad(), self._counting():
                value, skips, _ = self._run(passed, seed, tail, casting)
            back = any(passed.wants) or any(one.requires_grad for one in self.part.module.parameters())
            wants = [back and (one.is_floating_point() or one.is_complex()) for one in listed(value, skips)]
            self._held[key] = _Again(passed, seed, tail, casting, wants)
        else:
            with self._counting():
                value, skips, leaves = self._run(passed, seed, tail, casting)
            wants = [one.requires_grad for one in listed(value, skips)]
            self._held[key] = _Forward(leaves, _chosen(listed(value, skips), wants))
        return Passed(mapped(Tensor.detach, value), mapped(Tensor.detach, skips), tuple(wants))

    def needs_recompute(self, key: Key) -> bool:
        """Return True if the forward pass must be recomputed before the backward pass."""
        return isinstance(self._held[key], _Again)

    def again(self, key: Key) -> None:
        """Recompute the forward pass, and record its autograd graph."""
        held = self._held[key]
        assert isinstance(held, _Again)
        with self.norms.deferring(count=False):
            value, skips, leaves = self._run(held.passed, held.seed, held.tail, held.casting)
        self._held[key] = _Forward(leaves, _chosen(listed(value, skips), held.wants))

    def backward(self, key: Key, gradients: tuple[Tensor | None, ...] | None) -> tuple[Tensor | None, ...]:
        """Run the backward pass of a micro-batch.

        The pass starts from ``gradients``, which contains one gradient for each output that requires grad, or
        from the loss if ``gradients`` is ``None``. The pass adds to the ``grad`` of the part's parameters,
        and returns the gradients of the inputs that require grad.
        """
        held = self._held.pop(key)
        assert isinstance(held, _Forward)
        if gradients is None:
            torch.autograd.backward([loss for loss in held.outputs if loss.requires_grad])
        else:
            outputs, given = _roots(held, gradients)
            if outputs:
                torch.autograd.backward(outputs, given)
        return tuple(leaf.grad for leaf in held.leaves)

    def inputs(self, key: Key, gradients: tuple[Tensor | None, ...] | None) -> tuple[Tensor | None, ...]:
        """Run the first half of :meth:`backward`, and return the gradients of the inputs."""
        held = self._held.pop(key)
        assert isinstance(held, _Forward)
        if gradients is None:
            halves = SplitBackward([loss for loss in held.outputs if loss.requires_grad], None, held.leaves)
        else:
            halves = SplitBackward(*_roots(held, gradients), held.leaves)
        halves.first()
        self._halves[key] = halves
        return tuple(leaf.grad for leaf in held.leaves)

    def weights(self, key: Key) -> None:
        """Run the second half of :meth:`backward`, which adds to the ``grad`` of the part's parameters."""
        self._halves.pop(key).second()

    def gradients(
        self, key: Key, gradients: tuple[Tensor | None, ...], parameters: list[Tensor], keep: bool
    ) -> tuple[Tensor | None, ...]:
        """Run the backward pass of a micro-batch without changing any ``grad``.

        Returns the gradients of the inputs that require a gradient, followed by the gradients of
        ``parameters``. If ``keep`` is true, the autograd graph is kept for another backward pass.
        """
        held = self._held[key] if keep else self._held.pop(key)
        assert isinstance(held, _Forward)
        outputs, given = _roots(held, gradients)
        requested = [*held.leaves, *parameters]
        if not outputs or not requested:
            return (None,) * len(requested)
        return torch.autograd.grad(outputs, requested, given, retain_graph=keep, allow_unused=True)

    def infer(self, passed: Passed, casting: Casting = ()) -> Passed:
        """Run a forward pass without recording an autograd graph."""
        with torch.no_grad(), self._counting(), cast_as(casting):
            value, skips = run_part(self.part, passed.value, passed.skips, keep=self._shared)
        return Passed(value, skips, ())

    def evaluate(self, passed: Passed, casting: Casting) -> Passed:
        """Run a forward pass in ``eval`` mode, without recording an autograd graph."""
        modes = [(module, module.training) for module in self.part.module.modules()]
        self.part.module.eval()
        try:
            return self.infer(passed, casting)
        finally:
            for module, training in modes:
                module.training = training

    def drop(self, number: int) -> None:
        """Release the autograd graphs of a step or call."""
        self._held = {key: held for key, held in self._held.items() if key[0] != number}

    def close(self) -> None:
        """Release all graphs."""
        self._held.clear()
        self._halves.clear()

    def _counting(self) -> contextlib.AbstractContextManager[None]:
        return self.norms.deferring(count=True) if self._deferred else contextlib.nullcontext()

    def _run(
        self, passed: Passed, seed: int, tail: Tail | None, casting: Casting
    ) -> tuple[Any, Skips, list[Tensor]]:
        """Run the part, and return its output, its skips and the leaves whose gradients are needed."""
        wanted = iter(passed.wants or [False] * len(listed(passed.value, passed.skips)))
        leaves: list[Tensor] = []

        def cut(tensor: Tensor) -> Tensor:
            leaf = tensor.detach()
            if next(wanted):
                leaves.append(leaf.requires_grad_())
            return leaf

        value = mapped(cut, passed.value)
        skips = mapped(cut, {name: passed.skips[name] for name in sorted(passed.skips)})
        # Seed the generators also for the loss, which may draw random numbers.
        drawing = self._drawing(seed) if self._may_draw or tail is not None else contextlib.nullcontext()
        with drawing, cast_as(casting):
            value, skips = run_part(self.part, value, skips)
            if tail is not None:
                value, skips = tail(value), {}
        return value, skips, leaves

    @contextlib.contextmanager
    def _drawing(self, seed: int) -> Iterator[None]:
        """Seed the random number generators inside the block, and restore them afterwards."""
        devices = (
            [self.part.device] if self.part.device is not None and self.part.device.type == "cuda" else []
        )
        with GENERATOR if self._shared else contextlib.nullcontext(), torch.random.fork_rng(devices):
            torch.default_generator.manual_seed(seed)
            for device in devices:
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(seed)
            yield


def may_draw(module: nn.Module) -> bool:
    """Return True if the module may draw random numbers.

    A module without hooks that consists only of deterministic torch layers and functions draws none.
    """
    return any(
        layer.draws
        if isinstance(layer, (Owned, Segment))
        else not type(layer).__module__.startswith("torch.nn.modules.")
        or isinstance(layer, DRAWS)
        or layer._forward_hooks
        or layer._forward_pre_hooks
        for layer in module.modules()
    )


def _roots(held: _Forward, gradients: tuple[Tensor | None, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs from which a backward pass starts, and their gradients."""
    pairs = zip(held.outputs, gradients, strict=True)
    roots = [(output, given) for output, given in pairs if given is not None and output.requires_grad]
    return [output for output, _ in roots], [given.to(output.device) for output, given in roots]


def _chosen(values: list[Tensor], wants: list[bool]) -> list[Tensor]:
    return [value for value, wanted in zip(values, wants, strict=True) if wanted]
