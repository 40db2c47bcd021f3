"""Where to cut: what each layer costs on a sample, and the cuts that make the most expensive part as cheap as
can be.

A pipeline is as quick as its slowest part, and needs the memory of its largest: so the largest sum of
consecutive costs is minimised, exactly, by dynamic programming over the number of parts and of layers.
"""

from __future__ import annotations

import contextlib
import copy
import resource
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from flowchan.pipelines.sequential.engine.split_backward import SplitBackward
from flowchan.pipelines.sequential.parts import Part, run_part
from flowchan.pipelines.sequential.skip import Skips
from flowchan.pipelines.sequential.tensor_trees import mapped, tensors

ROUNDS, SECONDS = 2, 0.3
"""Layers are timed in at least so many rounds, and for about so long."""


def best_split(costs: Sequence[float], parts: int) -> list[int]:
    """How many layers each of ``parts`` parts takes so that the largest cost of a part is as small as
    possible. Each has at least one. In ``O(parts × layers²)`` steps."""
    upto = list(accumulate(costs, initial=0.0))
    layers = len(costs)
    # least[n]: the smallest possible largest part of the first n layers, for the parts so far; last[k][n]:
    # where the last of k + 1 parts begins then.
    least = upto[:]
    last: list[list[int]] = [[0] * (layers + 1)]
    for count in range(2, parts + 1):
        row, begins = [float("inf")] * (layers + 1), [0] * (layers + 1)
        for n in range(count, layers + 1):
            # of equal cuts the last one: what costs nothing stays with the layer before it
            row[n], begin = min((max(least[cut], upto[n] - upto[cut]), -cut) for cut in range(count - 1, n))
            begins[n] = -begin
        least = row
        last.append(begins)
    counts, end = [], layers
    for begins in reversed(last):
        counts.append(end - begins[end])
        end = begins[end]
    return counts[::-1]


def costs(
    module: nn.Sequential,
    micro: Any,
    balance: str,
    threads: int,
    backward: bool | None = None,
    param_scale: float = 1.0,
    skips: Skips | None = None,
) -> list[float]:
    """What each layer costs with a micro-batch: seconds with ``threads`` compute threads, of the ``backward``
    pass too, by default where the module is in training mode; or bytes of its parameters, ``param_scale``
    times, its buffers and what it keeps, which is what autograd saves for the backward pass for a module in
    training mode, else what it puts out. ``skips`` come in beside the micro-batch. The module is not
    changed."""
    with torch.random.fork_rng(devices=[]), _compute_threads(threads):
        layers = list(_alone(module, micro, skips))
        if balance == "memory":
            return _bytes(layers, module.training, param_scale)
        return _seconds(layers, module.training if backward is None else backward)


def seconds(module: nn.Sequential, value: Any) -> float:
    """What a forward pass of the whole module takes as it is called. The module is not changed."""
    part = Part(0, copy.deepcopy(module))
    with torch.random.fork_rng(devices=[]):
        _once(part, value, {}, training=False)
        return _seconds([(part, value, {})], training=False)[0]


def step_seconds(module: nn.Sequential, micro: Any, threads: int) -> list[tuple[float, float, float]]:
    """How long each layer takes for a micro-batch's forward pass, and for both halves of its backward pass.
    The module is not changed."""
    with torch.random.fork_rng(devices=[]), _compute_threads(threads):
        layers = list(_alone(module, micro))
        found = [(float("inf"),) * 3] * len(layers)
        begin, rounds = time.perf_counter(), 0
        while rounds < ROUNDS or time.perf_counter() - begin < SECONDS:
            found = [min(best, _halves(*layer), key=sum) for best, layer in zip(found, layers, strict=True)]
            rounds += 1
        return found


def _halves(part: Part, value: Any, skips: Skips) -> tuple[float, float, float]:
    value, skips = _leaf(value), _leaf(skips)
    moments = [time.thread_time()]
    # where the layer works in place it may not have a leaf
    out, left = run_part(part, mapped(Tensor.clone, value), mapped(Tensor.clone, skips), keep=False)
    moments.append(time.thread_time())
    ends = [tensor for tensor in tensors((out, list(left.values()))) if tensor.requires_grad]
    inputs = [tensor for tensor in tensors((value, list(skips.values()))) if tensor.requires_grad]
    halves = SplitBackward(ends, [torch.ones_like(end) for end in ends], inputs)
    halves.first()
    moments.append(time.thread_time())
    halves.second()
    moments.append(time.thread_time())
    forward, first, second = (end - begin for begin, end in pairwise(moments))
    return forward, first, second


def _leaf(value: Any) -> Any:
    """The value as one whose gradient is wanted."""
    return mapped(lambda one: one.detach().requires_grad_(one.is_floating_point()), value)


_Layer = tuple[Part, Any, Skips]
"""A copy of a layer as a part of its own, and what goes into it."""


def _alone(module: nn.Sequential, value: Any, skips: Skips | None = None) -> Iterator[_Layer]:
    """Each layer by itself."""
    skips = {} if skips is None else skips
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


def _once(part: Part, value: Any, skips: Skips, training: bool) -> float:
    with torch.set_grad_enabled(training):
        value, skips = _fresh(value, training), _fresh(skips, training)
        begin, computed, waits = time.perf_counter(), time.thread_time(), _waits()
        out, _ = run_part(part, value, skips, keep=False)
        if training:
            ends = [tensor for tensor in tensors(out) if tensor.requires_grad]
            torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
    # What never waited by itself may have waited for a core that another program had, which tells nothing
    # about the layer.
    return time.thread_time() - computed if _waits() == waits else time.perf_counter() - begin


def _waits() -> int:
    """How often this thread has given its core away."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def _fresh(value: Any, training: bool) -> Any:
    """The value as the layer before hands it over: it may be changed, and in training its gradient is
    wanted."""
    return mapped(
        lambda tensor: tensor.detach().requires_grad_(training and tensor.is_floating_point()).clone(), value
    )


def _bytes(layers: list[_Layer], training: bool, param_scale: float) -> list[float]:
    """Of each layer: its parameters and buffers, and what stays until the backward pass, or what it puts out
    where there is none. What several layers keep counts for the first of them; the input counts where a layer
    saves it."""
    value, skips = _fresh(layers[0][1], training=False), layers[0][2]
    kept: list[Any] = [value]  # so that no two tensors have one address
    known = {_address(tensor) for part, *_ in layers for tensor in _state(part)}
    if not training:
        known |= {_address(tensor) for tensor in tensors(value)}
    found = []
    for part, *_ in layers:
        with torch.set_grad_enabled(training):
            value, skips, made = _kept(part, value, skips, training)
        kept.append((value, made))
        sizes = {_address(tensor): tensor.untyped_storage().nbytes() for tensor in made}
        state = param_scale * sum(map(_nbytes, part.module.parameters())) + sum(
            map(_nbytes, part.module.buffers())
        )
        found.append(float(state + sum(size for address, size in sizes.items() if address not in known)))
        known |= set(sizes)
    return found


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _state(part: Part) -> list[Tensor]:
    return [*part.module.parameters(), *part.module.buffers()]


def _kept(part: Part, value: Any, skips: Skips, training: bool) -> tuple[Any, Skips, list[Tensor]]:
    """What a layer gives, and the tensors that it saves for its backward pass, or all that its modules put
    out."""
    made: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        made.append(tensor)
        return tensor

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        made.extend(tensors(output))

    handles = [] if training else [module.register_forward_hook(note) for module in part.module.modules()]
    try:
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            value, skips = run_part(part, value, dict(skips), keep=False)
    finally:
        for handle in handles:
            handle.remove()
    return value, skips, [*made, *_leaves(value)]


def _leaves(value: Any) -> list[Tensor]:
    """The tensors without a history of their own that want gradients: a graph holds them as well."""
    nodes = [tensor.grad_fn for tensor in tensors(value) if tensor.grad_fn is not None]
    seen = set(nodes)
    for node in nodes:
        following = {before for before, _ in node.next_functions if before is not None} - seen
        seen |= following
        nodes += following
    return [node.variable for node in nodes if hasattr(node, "variable")]


@contextlib.contextmanager
def _compute_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
