"""Measure the costs of layers on a sample, and find the cut whose most expensive part is the cheapest.

A pipeline is as fast as its slowest part, and needs as much memory as its largest. Dynamic programming over
the numbers of parts and layers finds the exact optimum: it minimises the largest sum of consecutive costs.
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
"""Minimum number of timing rounds for the layers, and the approximate time for all rounds."""


def best_split(costs: Sequence[float], parts: int) -> list[int]:
    """Return the number of layers in each part that minimises the largest cost of a part.

    Each part gets at least one layer. The search takes ``O(parts × layers²)`` steps.
    """
    upto = list(accumulate(costs, initial=0.0))
    layers = len(costs)
    # If only the first n layers are cut, ``least[n]`` is the smallest possible cost of the most expensive
    # part. If they are cut into k + 1 parts, ``last[k][n]`` is the index of the last part's first layer.
    least = upto[:]
    last: list[list[int]] = [[0] * (layers + 1)]
    for count in range(2, parts + 1):
        row, begins = [float("inf")] * (layers + 1), [0] * (layers + 1)
        for n in range(count, layers + 1):
            # Among equally good cuts, choose the last one, so that a layer without cost stays with the
            # previous layers.
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
    """Measure the cost of each layer with a micro-batch, on copies of the layers.

    With ``balance="time"``, the costs are times in seconds, measured with ``threads`` compute threads.
    ``backward`` includes the backward pass (default: in training mode). With ``balance="memory"``, the costs
    are in bytes: parameters times ``param_scale``, buffers, and activations. In training mode, the
    activations are the tensors that autograd saves; otherwise, they are all outputs. ``skips`` are stashed
    tensors that come with the micro-batch.
    """
    with torch.random.fork_rng(devices=[]), _compute_threads(threads):
        layers = list(_alone(module, micro, skips))
        if balance == "memory":
            return _bytes(layers, module.training, param_scale)
        return _seconds(layers, module.training if backward is None else backward)


def seconds(module: nn.Sequential, value: Any) -> float:
    """Measure how many seconds a forward pass through a copy of the whole module takes.

    The measurement uses the current number of threads.
    """
    part = Part(0, copy.deepcopy(module))
    with torch.random.fork_rng(devices=[]):
        _once(part, value, {}, training=False)
        return _seconds([(part, value, {})], training=False)[0]


def step_seconds(module: nn.Sequential, micro: Any, threads: int) -> list[tuple[float, float, float]]:
    """Measure the time of the forward pass and of both halves of the backward pass, for each layer.

    The measurement runs copies of the layers on one micro-batch.
    """
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
    # Pass clones, because a layer that works in place would reject a leaf that requires grad.
    out, remaining_skips = run_part(
        part, mapped(Tensor.clone, value), mapped(Tensor.clone, skips), keep=False
    )
    moments.append(time.thread_time())
    ends = [tensor for tensor in tensors((out, list(remaining_skips.values()))) if tensor.requires_grad]
    inputs = [tensor for tensor in tensors((value, list(skips.values()))) if tensor.requires_grad]
    halves = SplitBackward(ends, [torch.ones_like(end) for end in ends], inputs)
    halves.first()
    moments.append(time.thread_time())
    halves.second()
    moments.append(time.thread_time())
    forward, first, second = (end - begin for begin, end in pairwise(moments))
    return forward, first, second


def _leaf(value: Any) -> Any:
    """Return the value with its tensors replaced by leaf tensors that require grad."""
    return mapped(lambda one: one.detach().requires_grad_(one.is_floating_point()), value)


_Layer = tuple[Part, Any, Skips]
"""A copy of a layer as a part, with its input and skips."""


def _alone(module: nn.Sequential, value: Any, skips: Skips | None = None) -> Iterator[_Layer]:
    """Yield a copy of each layer as a part, together with its input and skips."""
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
    """Return the shortest measured time of each layer, because disturbances only lengthen measurements."""
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
    # If the thread never waited, return its CPU time, which leaves out interruptions by other programs.
    # Otherwise, return the elapsed time, which includes the waits.
    return time.thread_time() - computed if _waits() == waits else time.perf_counter() - begin


def _waits() -> int:
    """Return the number of this thread's voluntary context switches."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def _fresh(value: Any, training: bool) -> Any:
    """Return a copy with the properties of a layer's output: writable and, in training, requiring grad."""
    return mapped(
        lambda tensor: tensor.detach().requires_grad_(training and tensor.is_floating_point()).clone(), value
    )


def _bytes(layers: list[_Layer], training: bool, param_scale: float) -> list[float]:
    """Return the bytes of each layer: parameters, buffers and activations.

    Without a backward pass, the activations are the outputs. A tensor that several layers keep is attributed
    to the first of them. An input is attributed to the layer that saves it.
    """
    value, skips = _fresh(layers[0][1], training=False), layers[0][2]
    kept: list[Any] = [value]  # keeps all tensors alive, so that no address is reused
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
    """Run a layer, and return its output, its skips and the tensors that its graph keeps.

    In training, these are the tensors saved for the backward pass. Otherwise, they are all outputs of its
    modules.
    """
    made: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        made.append(tensor)
        return tensor

    def record(module: nn.Module, inputs: Any, output: Any) -> None:
        made.extend(tensors(output))

    handles = [] if training else [module.register_forward_hook(record) for module in part.module.modules()]
    try:
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            value, skips = run_part(part, value, dict(skips), keep=False)
    finally:
        for handle in handles:
            handle.remove()
    return value, skips, [*made, *_leaves(value)]


def _leaves(value: Any) -> list[Tensor]:
    """Return the leaf tensors that require grad, which the graph also keeps."""
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
