"""What a pipe can't do while it is no ``nn.Module``, said aloud where it would be silently wrong: gradients
end at it, and a larger module doesn't register it."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from flowchan.pipelines.sequential.values import leaves, mapped


def without_gradient(value: Any) -> Any:
    """The value. ``ValueError`` if a tensor in it requires a gradient, which would end here."""
    if torch.is_grad_enabled():
        for path, leaf in leaves(value):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                raise ValueError(
                    f"Sequential: {path} requires a gradient, but none goes back through a pipe to "
                    f"what made {path}; for "
                    "inference give x.detach() or work under torch.no_grad(); to train, put the "
                    "layers before into the "
                    "pipe's module and use pipe.training()"
                )
    return value


def ending_graph(value: Any, module: nn.Module) -> Any:
    """The value, with tensors that raise in a backward pass where the plain module's would have a graph."""
    if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters()):
        return mapped(_ending_graph, value)
    return value


def _ending_graph(output: Tensor) -> Tensor:
    if not (output.is_floating_point() or output.is_complex()) or output.is_inference():
        return output
    # autograd lets nobody change a function's output in place where it is a view
    own = output.clone() if output._is_view() else output
    ended: Tensor = _End.apply(torch.empty(0, requires_grad=True), [own])  # type: ignore[no-untyped-call]
    return ended


class _End(torch.autograd.Function):
    """Where the graph of a pipe's output ends."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, outputs: list[Tensor]) -> Tensor:
        """The output itself, which autograd doesn't see among the inputs."""
        return outputs[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Raises."""
        raise RuntimeError(
            "a backward pass has reached the output of a Sequential in parts, which has no graph: "
            "the parameters of its "
            "module would get no gradients; train it by pipe.training(loss=…) and step(x, target), "
            "with all layers in its "
            "module; for inference, call the pipe under torch.no_grad()"
        )


class NoModule:
    """A class whose objects can't be attributes of an ``nn.Module``: that would not register their
    parameters, so they would be missing in its ``parameters()`` and ``state_dict()``."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The type. An ``nn.Module`` asks for it when an attribute is set, to see what it must register."""
        if sys._getframe(1).f_code is nn.Module.__setattr__.__code__:
            raise TypeError(
                "a Sequential in parts is no nn.Module: as an attribute of one, its parameters "
                "would be missing in "
                "parameters() and state_dict(); make pipe.module the attribute, and keep the pipe beside it"
            )
        return type(self)
