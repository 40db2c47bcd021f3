"""One part of a model at training: forward and backward passes of micro-batches, each cut off from the other
parts.

The graph that autograd builds ends at the part's borders. What comes in is detached and, where gradients are
wanted, made a leaf; the backward pass starts from the gradients of what went out, and gives the gradients of
those leaves, which the part before starts from. That is the chain rule, done by hand at the borders.

*Recompute* (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"): the first forward pass keeps
nothing but its input; just before the backward pass it is done again, and from the same random numbers.

*Random numbers*: each micro-batch has a stream of its own in each part, begun from the step's seed, the part
and the number of the micro-batch. So dropout draws the same masks under every schedule, on threads and
processes, and when it is done again; not those of the plain module, which draws one mask for the whole batch.
Threads share torch's generator, so there a part has it for itself while it goes forward, unless it can't
draw: one such part at a time.
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
from flowchan.pipelines.sequential.parts import Part, run_part
from flowchan.pipelines.sequential.values import mapped, tensors

GENERATOR = threading.Lock()
"""Held by the thread that draws from torch's generator of this process."""

DRAWS = (
    _DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d, nn.MultiheadAttention, nn.RNNBase,
    nn.Transformer, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer,
)  # fmt: skip
"""torch's layers that draw random numbers, or may."""

Tail = Callable[[Any], Tensor]
"""What follows the last part: the loss of the micro-batch, weighted."""


class Passed(NamedTuple):
    """What goes from part to part with one micro-batch: the value, and the skips by name. ``wants`` says for
    each tensor of both, in the order of :func:`listed`, whether its gradient shall come back."""

    value: Any
    skips: dict[str, Tensor]
    wants: tuple[bool, ...]


class _Forward(NamedTuple):
    """A forward pass whose graph is kept: the leaves that want gradients, and the outputs from which some may
    come."""

    leaves: list[Tensor]
    outputs: list[Tensor]


class _Again(NamedTuple):
    """A forward pass that is to be done again: all it depends on."""

    passed: Passed
    seed: int
    tail: Tail | None
    wants: list[bool]


def listed(value: Any, skips: dict[str, Tensor]) -> list[Tensor]:
    """The tensors of a value, then those of the skips by name."""
    return [*tensors(value), *(skips[name] for name in sorted(skips))]


class Execution:
    """The forward and backward passes of one part. Not for several threads at once.

    ``autocast``: the type that operations are cast to which can take it. ``shared``: the process has other
    workers on threads, so torch's generator is not ours.
    """

    def __init__(self, part: Part, *, recompute: bool, autocast: torch.dtype | None, shared: bool) -> None:
        self.part = part
        self._recompute = recompute
        self._autocast = autocast
        self._shared = shared
        self._may_draw = may_draw(part.module)
        self._trains = any(parameter.requires_grad for parameter in part.module.parameters())
        self._held: dict[int, _Forward | _Again] = {}
        self._norms = DeferredBatchNorm(part.module)

    def forward(self, chunk: int, passed: Passed, seed: int, tail: Tail | None, soon: bool) -> Passed:
        """The forward pass of micro-batch ``chunk``. ``soon``: its backward pass comes next, so that it would
        save nothing to do it again. What it gives is cut off from the graph."""
        self._norms.counting = True
        try:
            if self._recompute and not soon:
                with torch.no_grad():
                    value, skips, _ = self._run(passed, seed, tail)
                back = self._trains or any(passed.wants)
                wants = [
                    back and (one.is_floating_point() or one.is_complex()) for one in listed(value, skips)
                ]
                self._held[chunk] = _Again(passed, seed, tail, wants)
            else:
                value, skips, leaves = self._run(passed, seed, tail)
                wants = [one.requires_grad for one in listed(value, skips)]
                self._held[chunk] = _Forward(leaves, _chosen(listed(value, skips), wants))
        finally:
            self._norms.counting = False
        cut = {name: skip.detach() for name, skip in skips.items()}
        return Passed(mapped(Tensor.detach, value), cut, tuple(wants))

    def is_to_be_done_again(self, chunk: int) -> bool:
        """Whether :meth:`again` must come before :meth:`backward`."""
        return isinstance(self._held[chunk], _Again)

    def again(self, chunk: int) -> None:
        """The forward pass once more, with its graph."""
        held = self._held[chunk]
        assert isinstance(held, _Again)
        value, skips, leaves = self._run(held.passed, held.seed, held.tail)
        self._held[chunk] = _Forward(leaves, _chosen(listed(value, skips), held.wants))

    def backward(self, chunk: int, gradients: tuple[Tensor | None, ...] | None) -> tuple[Tensor | None, ...]:
        """The backward pass of micro-batch ``chunk``, from the gradients of those outputs for which one is
        wanted, or from the loss where ``gradients`` is ``None``. Adds to the ``grad`` of the part's
        parameters, and gives the gradients of those inputs for which one is wanted."""
        held = self._held.pop(chunk)
        assert isinstance(held, _Forward)
        pairs = [] if gradients is None else zip(held.outputs, gradients, strict=True)
        roots = [(output, gradient.to(output.device)) for output, gradient in pairs if gradient is not None]
        roots = [(output, gradient) for output, gradient in roots if output.requires_grad]
        if gradients is None:
            torch.autograd.backward([loss for loss in held.outputs if loss.requires_grad])
        elif roots:
            torch.autograd.backward([output for output, _ in roots], [gradient for _, gradient in roots])
        return tuple(leaf.grad for leaf in held.leaves)

    def evaluate(self, passed: Passed) -> Passed:
        """A forward pass in ``eval`` mode that leaves nothing behind."""
        modes = [(module, module.training) for module in self.part.module.modules()]
        self.part.module.eval()
        try:
            with torch.no_grad(), self._casting():
                value, skips = run_part(self.part, passed.value, passed.skips, keep=self._shared)
        finally:
            for module, training in modes:
                module.training = training
        return Passed(value, skips, ())

    def commit(self) -> None:
        """The end of a step: batch norm's running statistics."""
        self._norms.commit()

    def close(self) -> None:
        """The part's module is as it was; nothing is held."""
        self._held.clear()
        self._norms.close()

    def _run(
        self, passed: Passed, seed: int, tail: Tail | None
    ) -> tuple[Any, dict[str, Tensor], list[Tensor]]:
        """The outputs, and the leaves that want gradients."""
        wanted = iter(passed.wants or [False] * len(listed(passed.value, passed.skips)))
        leaves: list[Tensor] = []

        def cut(tensor: Tensor) -> Tensor:
            leaf = tensor.detach()
            if next(wanted):
                leaves.append(leaf.requires_grad_())
            return leaf

        value = mapped(cut, passed.value)
        skips = {name: cut(passed.skips[name]) for name in sorted(passed.skips)}
        # Of the function behind the last part it is not known whether it draws.
        drawing = self._drawing(seed) if self._may_draw or tail is not None else contextlib.nullcontext()
        with drawing, self._casting():
            value, skips = run_part(self.part, value, skips)
            if tail is not None:
                value, skips = tail(value), {}
        return value, skips, leaves

    def _casting(self) -> contextlib.AbstractContextManager[Any]:
        if self._autocast is None:
            return contextlib.nullcontext()
        device = "cpu" if self.part.device is None else self.part.device.type
        return torch.autocast(device, dtype=self._autocast)

    @contextlib.contextmanager
    def _drawing(self, seed: int) -> Iterator[None]:
        """Within it random numbers are those of ``seed``; behind it the generators go on as if nothing had
        been."""
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
    """Whether the module may draw random numbers: not if it consists of torch's own layers only, none of them
    one that draws, and without hooks, which could."""
    return any(
        not type(layer).__module__.startswith("torch.nn.modules.")
        or isinstance(layer, DRAWS)
        or layer._forward_hooks
        or layer._forward_pre_hooks
        for layer in module.modules()
    )


def _chosen(values: list[Tensor], wants: list[bool]) -> list[Tensor]:
    return [value for value, wanted in zip(values, wants, strict=True) if wanted]
