"""Simulate the training algorithms from their definitions, in one thread and in float64.

The simulations share no code with the product. Workers take turns: all workers take step 1, then all take
step 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

State = dict[str, Tensor]
Batch = tuple[Tensor, Tensor]


def model() -> nn.Module:
    """Return a small float64 network with the same initial parameters on every call."""
    layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    numbers = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=numbers, dtype=torch.float64))
    return layers


def batches(workers: int, steps: int) -> list[list[Batch]]:
    """Return a different batch for each step of each worker."""
    numbers = torch.Generator().manual_seed(1)

    def one(width: int) -> Tensor:
        return torch.randn(5, width, generator=numbers, dtype=torch.float64)

    return [[(one(3), one(2)) for _ in range(steps)] for _ in range(workers)]


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def initial() -> State:
    return {name: p.detach().clone() for name, p in model().named_parameters()}


def gradients(state: State, batch: Batch) -> State:
    leaves = {name: x.detach().clone().requires_grad_() for name, x in state.items()}
    value = loss(functional_call(model(), leaves, (batch[0],)), batch[1])
    return dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True))


def plus(one: State, other: State) -> State:
    return {name: x + other[name] for name, x in one.items()}


def times(state: State, factor: float) -> State:
    return {name: x * factor for name, x in state.items()}


def sgd_step(state: State, batch: Batch, lr: float) -> State:
    return plus(state, times(gradients(state, batch), -lr))


def downpour(
    data: Sequence[Sequence[Batch]],
    *,
    lr: float,
    push_every: int = 1,
    pull_every: int = 10,
    prefetch: int = 0,
    start: int = 0,
    momentum: float = 0.0,
) -> tuple[State, list[list[State]]]:
    """Return the server's final parameters, and each worker's parameters after each step."""
    server, count = initial(), len(data)
    local, velocity = [initial() for _ in data], [times(initial(), 0.0) for _ in data]
    unsent: list[list[State]] = [[] for _ in data]
    since: list[list[State]] = [[] for _ in data]
    fetched: list[State | None] = [None] * count
    history: list[list[State]] = [[] for _ in data]

    def total(parts: list[State]) -> State:
        result = parts[0]
        for part in parts[1:]:
            result = plus(result, part)
        return result

    for step in range(1, len(data[0]) + 1):
        for w in range(count):
            gradient = gradients(local[w], data[w][step - 1])
            if momentum:
                velocity[w] = gradient if step == 1 else plus(times(velocity[w], momentum), gradient)
                gradient = plus(gradient, times(velocity[w], momentum))
            update = times(gradient, -lr)
            local[w] = plus(local[w], update)
            unsent[w].append(update)
            after = step - start
            if after > 0 and after % push_every == 0:
                pushed = total(unsent[w])
                server = plus(server, pushed)
                since[w].append(pushed)
                unsent[w] = []
            if after > 0 and after % pull_every == 0:
                mine = since[w] if prefetch else []
                local[w] = server if not prefetch else fetched[w] or {}
                for part in mine:
                    local[w] = plus(local[w], part)
                if unsent[w]:
                    local[w] = plus(local[w], total(unsent[w]))
            if prefetch and after > 0 and (after + prefetch) % pull_every == 0:
                fetched[w], since[w] = server, []
            history[w].append(local[w])
    for w in range(count):
        if unsent[w]:
            server = plus(server, total(unsent[w]))
    return server, history


def elastic_averaging(
    data: Sequence[Sequence[Batch]], *, lr: float, every: int, alpha: float, prefetch: int = 0, start: int = 0
) -> tuple[State, list[list[State]]]:
    """Return the final centre, and each worker's parameters after each step."""
    centre, local = initial(), [initial() for _ in data]
    fetched = [centre for _ in data]
    history: list[list[State]] = [[] for _ in data]
    for step in range(1, len(data[0]) + 1):
        for w in range(len(data)):
            local[w] = sgd_step(local[w], data[w][step - 1], lr)
            after = step - start
            if after > 0 and after % every == 0:
                seen = fetched[w] if prefetch else centre
                pull = times(plus(local[w], times(seen, -1.0)), alpha)
                local[w] = plus(local[w], times(pull, -1.0))
                centre = plus(centre, pull)
            elif prefetch and after > 0 and (after + prefetch) % every == 0:
                fetched[w] = centre
            history[w].append(local[w])
    return centre, history


def diloco(
    rounds: Sequence[Sequence[tuple[int, Sequence[Batch]]]],
    *,
    lr: float,
    outer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
) -> list[State]:
    """Return the parameters after each round.

    Args:
        rounds: Contributions to each round, in order. A contribution is a pair ``(began, batches)``. The
            worker began with the result of round ``began``; round 0 stands for the initial parameters.
        lr: Learning rate of the inner SGD.
        outer: Function that creates the outer optimizer.
    """
    results = [initial()]
    parameters = {name: nn.Parameter(x.clone()) for name, x in results[0].items()}
    optimizer = outer(list(parameters.values()))
    for contributions in rounds:
        total: State = times(results[0], 0.0)
        for began, data in contributions:
            state = results[began]
            for batch in data:
                state = sgd_step(state, batch, lr)
            total = plus(total, plus(results[began], times(state, -1.0)))
        for name, parameter in parameters.items():
            parameter.grad = total[name] / len(contributions)
        optimizer.step()
        results.append({name: p.detach().clone() for name, p in parameters.items()})
    return results[1:]


def summed_sgd(
    data: Sequence[Sequence[Batch]],
    *,
    count: int,
    outer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
) -> tuple[State, list[list[State]]]:
    """Return the final parameters of an AsySG-InCon server, and each worker's parameters after each step."""
    parameters = {name: nn.Parameter(x) for name, x in initial().items()}
    optimizer = outer(list(parameters.values()))
    local = [initial() for _ in data]
    history: list[list[State]] = [[] for _ in data]
    total, gathered = times(initial(), 0.0), 0
    for step in range(len(data[0])):
        for w in range(len(data)):
            total, gathered = plus(total, gradients(local[w], data[w][step])), gathered + 1
            if gathered == count:
                for name, parameter in parameters.items():
                    parameter.grad = total[name]
                optimizer.step()
                total, gathered = times(total, 0.0), 0
            local[w] = {name: p.detach().clone() for name, p in parameters.items()}
            history[w].append(local[w])
    return local[-1], history
