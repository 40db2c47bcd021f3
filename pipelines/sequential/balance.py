"""Where to cut: what each layer costs on a sample, and the cuts that make the most expensive part as cheap as can be.

A pipeline is as quick as its slowest part, and needs the memory of its largest: so the largest sum of consecutive costs is
minimised, exactly, by dynamic programming over the number of parts and of layers.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from flowchan.pipelines.sequential.parts import Part, run_part
from flowchan.pipelines.sequential.values import mapped, tensors

ROUNDS, SECONDS = 5, 0.3
"""Layers are timed in at least so many rounds, and for about so long."""


def best_split(costs: Sequence[float], parts: int) -> list[int]:
    """How many layers each of ``parts`` parts takes so that the largest cost of a part is as small as possible. Each has
    at least one. In ``O(parts × layers²)`` steps."""
    upto = list(accumulate(costs, initial=0.0))
    layers = len(costs)
    # least[n]: the smallest possible largest part of the first n layers, for the parts so far; last[k][n]: where the
    # last of k + 1 parts begins then.
    least = upto[:]
    last: list[list[int]] = [[0] * (layers + 1)]
    for count in range(2, parts + 1):
        row, begins = [float("inf")] * (layers + 1), [0] * (layers + 1)
        for n in range(count, layers + 1):
            row[n], begins[n] = min((max(least[cut], upto[n] - upto[cut]), cut) for cut in range(count - 1, n))
        least = row
        last.append(begins)
    counts, end = [], layers
    for begins in reversed(last):
        counts.append(end - begins[end])
        end = begins[end]
    return counts[::-1]


def costs(module: nn.Sequential, micro: Any, balance: str, threads: int) -> list[float]:
    """What each layer costs with a micro-batch: seconds, of forward and backward for a module in training mode, with
    ``threads`` compute threads; or bytes of its parameters, buffers and activations. The module is not changed."""
    with torch.random.fork_rng(devices=[]), _compute_threads(threads):
        layers = list(_alone(module, micro))
        if balance == "memory":
            return [float(_bytes(*layer)) for layer in layers]
        return _seconds(layers, module.training)


_Layer = tuple[Part, Any, dict[str, Tensor]]
"""A copy of a layer as a part of its own, and what goes into it."""


def _alone(module: nn.Sequential, value: Any) -> Iterator[_Layer]:
    """Each layer by itself."""
    skips: dict[str, Tensor] = {}
    for number, (name, layer) in enumerate(module._modules.items()):
        alone = nn.Sequential()
        alone.add_module(name, copy.deepcopy(layer))
        alone.training = module.training
        part = Part(number, alone)
        yield part, value, skips
        with torch.no_grad():
            value, skips = run_part(part, value, dict(skips))


def _seconds(layers: list[_Layer], training: bool) -> list[float]:
    """The shortest time of each layer: what disturbs a measurement only ever makes it longer."""
    found = [float("inf")] * len(layers)
    begin = time.perf_counter()
    rounds = 0
    while rounds < ROUNDS or time.perf_counter() - begin < SECONDS:
        for number, layer in enumerate(layers):
            found[number] = min(found[number], _once(*layer, training))
        rounds += 1
    return found


def _once(part: Part, value: Any, skips: dict[str, Tensor], training: bool) -> float:
    with torch.set_grad_enabled(training):
        value, skips = _fresh(value, training), _fresh(skips, training)
        begin = time.perf_counter()
        out, _ = run_part(part, value, skips, keep=False)
        if training:
            ends = [tensor for tensor in tensors(out) if tensor.requires_grad]
            torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
    return time.perf_counter() - begin


def _fresh(value: Any, training: bool) -> Any:
    """The value as the layer before hands it over: it may be changed, and in training its gradient is wanted."""
    return mapped(lambda tensor: tensor.detach().requires_grad_(training and tensor.is_floating_point()).clone(), value)


def _bytes(part: Part, value: Any, skips: dict[str, Tensor]) -> int:
    """Parameters, buffers and what all layers within the part put out. A layer that works in place puts out nothing new."""
    own = (*part.module.parameters(), *part.module.buffers())
    value = _fresh(value, training=False)
    made = {tensor.untyped_storage().data_ptr(): 0 for tensor in tensors(value)}
    kept: list[Any] = []  # so that no two outputs have one address

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        kept.append(output)
        for tensor in tensors(output):
            storage = tensor.untyped_storage()
            made.setdefault(storage.data_ptr(), storage.nbytes())

    handles = [module.register_forward_hook(note) for module in part.module.modules()]
    try:
        with torch.no_grad():
            run_part(part, value, dict(skips), keep=False)
    finally:
        for handle in handles:
            handle.remove()
    return sum(tensor.numel() * tensor.element_size() for tensor in own) + sum(made.values())


@contextlib.contextmanager
def _compute_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
