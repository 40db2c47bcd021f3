"""Normalise micro-batches in batch norm layers, but keep running statistics of the whole batch.

Each micro-batch is normalised with its own mean and variance, because the other micro-batches may not exist
yet. ``eval`` mode uses the running statistics. The running statistics are updated once per step with the mean
and variance of the whole batch, as in the plain module. A recomputed forward pass is not counted again.

The idea comes from torchgpipe's ``DeferredBatchNorm``. Moments are combined as in Chan, Golub and LeVeque
1979, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances". Plain sums of squares would
lose precision.
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
    """Moments of ``count`` values per channel: the mean, and the sum of the squared deviations from it.

    Both tensors have shape (channels,) and type double.
    """

    count: int
    mean: Tensor
    squares: Tensor

    def plus(self, other: Moments) -> Moments:
        """Return the moments of the union of both sets of values."""
        count = self.count + other.count
        difference = other.mean - self.mean
        mean = self.mean + difference * (other.count / count)
        return Moments(
            count, mean, self.squares + other.squares + difference**2 * (self.count * other.count / count)
        )


def moments(x: Tensor) -> Moments:
    """Compute the moments of a batch norm layer's input, in which dimension 1 is the channel dimension."""
    variance, mean = torch.var_mean(x.double(), [0, *range(2, x.dim())], correction=0)
    count = x.numel() // x.shape[1]
    return Moments(count, mean, variance * count)


class DeferredBatchNorm:
    """Deferred updates of the running statistics in a module's batch norm layers.

    In a :meth:`deferring` block, the layers do not update their statistics. The inputs are accumulated
    instead, and :meth:`commit` updates the statistics once, with all inputs.
    """

    def __init__(self, module: nn.Module) -> None:
        self._gathered: dict[_BatchNorm, Moments] = {}
        self._layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]

    @contextlib.contextmanager
    def deferring(self, count: bool) -> Iterator[None]:
        """Suspend updates of running statistics. If ``count`` is true, accumulate the layers' inputs."""
        layers = [one for one in self._layers if one.track_running_stats and one.running_mean is not None]
        hooks = [layer.register_forward_pre_hook(self._gather) for layer in layers if count]
        for layer in layers:
            # The layer keeps its statistics, and still uses them in eval mode.
            layer.track_running_stats = False
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
        """Update the running statistics of each layer once, with all inputs of the step."""
        with torch.no_grad():
            for layer, found in self._gathered.items():
                _update(layer, found)
        self._gathered.clear()

    def forget(self) -> None:
        """Discard the accumulated inputs."""
        self._gathered.clear()


def _update(layer: _BatchNorm, found: Moments) -> None:
    """Update the running statistics as torch's ``batch_norm`` does, with the unbiased variance."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    factor = layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if factor is None:  # without a factor, the running statistics are means over all batches
            factor = 1.0 / float(layer.num_batches_tracked)
    if factor is None:
        factor = 0.0
    unbiased = found.squares / max(found.count - 1, 1)
    layer.running_mean.lerp_(found.mean.to(layer.running_mean.dtype), factor)
    layer.running_var.lerp_(unbiased.to(layer.running_var.dtype), factor)
