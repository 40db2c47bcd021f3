"""Batch normalisation in micro-batches: running statistics are those of the whole batch.

Each micro-batch is normalised by its own mean and variance, as it has to be: the others are not there yet.
The running statistics, which count in ``eval`` mode, are updated once per step and with the mean and variance
of the whole batch, as the plain module does. A forward pass that is done again (recompute) is not counted
again.

After torchgpipe's ``DeferredBatchNorm``. The moments of micro-batches are put together as in Chan, Golub and
LeVeque 1979, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", which loses no
digits as sums of squares do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@dataclass(slots=True)
class Moments:
    """Of ``count`` values per channel: their mean, and the sum of squared distances from it. Shape
    (channels,), double."""

    count: int
    mean: Tensor
    squares: Tensor

    def plus(self, other: Moments) -> Moments:
        """The moments of both together."""
        count = self.count + other.count
        apart = other.mean - self.mean
        mean = self.mean + apart * (other.count / count)
        return Moments(
            count, mean, self.squares + other.squares + apart**2 * (self.count * other.count / count)
        )


def moments(x: Tensor) -> Moments:
    """Of an input of a batch norm layer, whose channels are dimension 1."""
    variance, mean = torch.var_mean(x.double(), [0, *range(2, x.dim())], correction=0)
    count = x.numel() // x.shape[1]
    return Moments(count, mean, variance * count)


class DeferredBatchNorm:
    """Keeps the batch norm layers of a module from updating their running statistics while it is
    :meth:`deferring`. What passes through them meanwhile is gathered, and :meth:`commit` updates with all of
    it at once.
    """

    def __init__(self, module: nn.Module) -> None:
        self._gathered: dict[_BatchNorm, Moments] = {}
        self._layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]

    @contextlib.contextmanager
    def deferring(self, count: bool) -> Iterator[None]:
        """Within it the layers leave their statistics alone. ``count``: what passes is gathered."""
        layers = [one for one in self._layers if one.track_running_stats and one.running_mean is not None]
        hooks = [layer.register_forward_pre_hook(self._gather) for layer in layers if count]
        for layer in layers:
            layer.track_running_stats = False  # it still has them, and uses them in eval mode
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for layer in layers:
                layer.track_running_stats = True

    def _gather(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        if layer.training and isinstance(layer, _BatchNorm):
            found = moments(inputs[0].detach())
            so_far = self._gathered.get(layer)
            self._gathered[layer] = found if so_far is None else so_far.plus(found)

    def commit(self) -> None:
        """The end of a step: one update of the running statistics of each layer that something passed
        through."""
        with torch.no_grad():
            for layer, found in self._gathered.items():
                _update(layer, found)
        self._gathered.clear()

    def forget(self) -> None:
        """What was gathered counts for nothing."""
        self._gathered.clear()


def _update(layer: _BatchNorm, found: Moments) -> None:
    """As ``torch.nn.functional.batch_norm`` does; the running variance is unbiased."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    factor = layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if factor is None:  # then it is the mean of all batches so far
            factor = 1.0 / float(layer.num_batches_tracked)
    if factor is None:
        factor = 0.0
    unbiased = found.squares / max(found.count - 1, 1)
    layer.running_mean.lerp_(found.mean.to(layer.running_mean.dtype), factor)
    layer.running_var.lerp_(unbiased.to(layer.running_var.dtype), factor)
