"""Check the arguments of ``trainer(...)`` before training starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from flowchan.items.text import short
from flowchan.pipelines.sequential.engine.training_worker import at
from flowchan.pipelines.sequential.parts import Part


def check_training(
    parts: Sequence[Part], loss: Any, optimizer: Any, recompute: Any, clip: Any, autocast: Any
) -> None:
    """Raise ``TypeError`` or ``ValueError`` if training is not possible.

    The cause is either a wrong argument or a layer that cannot be trained in a pipe.
    """
    _check_loss(loss)
    if optimizer is not None:
        _check_optimizer(parts, optimizer)
    if not isinstance(recompute, bool):
        raise TypeError(f"training: recompute must be True or False, got {short(recompute)}")
    if clip is not None:
        _check_clip(clip, optimizer)
    if autocast is not None and (not isinstance(autocast, torch.dtype) or not autocast.is_floating_point):
        raise TypeError(
            "training: autocast must be a floating-point dtype such as torch.bfloat16, or None, "
            f"got {short(autocast)}"
        )
    _check_tensors(parts)


def _check_loss(loss: Any) -> None:
    if isinstance(loss, type):
        raise TypeError(
            f"training: loss must be a function, got the class {loss.__name__}; "
            f"pass an instance, {loss.__name__}()"
        )
    if not callable(loss):
        raise TypeError(f"training: loss must be a function that takes output and target, got {short(loss)}")
    if isinstance(loss, torch.nn.Module) and any(one.requires_grad for one in loss.parameters()):
        raise ValueError(
            "training: loss must not have parameters that require grad, because a step would not train "
            "them; compute the loss yourself from pipe(x)"
        )


def _check_clip(clip: Any, optimizer: Any) -> None:
    if isinstance(clip, bool) or not isinstance(clip, (int, float)) or not clip > 0:
        raise ValueError(f"training: clip must be a maximum norm greater than 0, or None, got {short(clip)}")
    if optimizer is None:
        raise ValueError(
            "training: clip must be None without optimizer=; call "
            "torch.nn.utils.clip_grad_norm_(module.parameters(), ...) before your optimizer's step()"
        )


def _check_tensors(parts: Sequence[Part]) -> None:
    """Check that no tensor is used by two parts, and that no tensor has a hook."""
    owners: dict[int, Part] = {}
    for part in parts:
        for kind, name, tensor in _named_tensors(part):
            owner = owners.setdefault(id(tensor), part)
            if owner is not part:
                raise ValueError(
                    f"training: each {kind} must be in one part, got {name!r} in {owner} and in {part}; "
                    "put the layers that share it into one part"
                )
            if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
                raise ValueError(
                    f"training: {kind} {name!r} of {part} must not have hooks, because they would run once "
                    "per micro-batch or never; compute the loss yourself from pipe(x)"
                )


def _named_tensors(part: Part) -> Iterator[tuple[str, str, Tensor]]:
    for name, parameter in part.module.named_parameters():
        yield "parameter", name, parameter
    for name, buffer in part.module.named_buffers():
        yield "buffer", name, buffer


def _check_optimizer(parts: Sequence[Part], optimizer: Any) -> None:
    """Create the optimizers once so that any error is raised now, then discard them.

    The test detects errors early, and imports the optimizers' modules before processes are forked.
    """
    if not callable(optimizer) or isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            "training: optimizer must be a function that takes a list of parameters, such as "
            f"partial(SGD, lr=0.1), or None, got {type(optimizer).__name__}"
        )
    for part in parts:
        parameters = list(part.module.parameters())
        if parameters:
            with at(part, "creating its optimizer"):
                made = optimizer(parameters)
            if not callable(getattr(made, "step", None)):
                raise TypeError(
                    "training: optimizer must return an object with a step() method, got an object of "
                    f"type {type(made).__name__}"
                )
