"""Test that cuts are optimal, and that measured costs reflect the layers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flowchan.pipelines import Sequential
from flowchan.pipelines.sequential.balance import best_split, costs


@pytest.fixture(autouse=True)
def _equal_layers() -> None:
    """Override the fixture of this name, so that layers are measured."""


def largest(values: list[float], counts: list[int]) -> float:
    """Return the cost of the most expensive part."""
    rest = iter(values)
    return max(sum(itertools.islice(rest, count)) for count in counts)


def all_splits(layers: int, parts: int) -> Iterator[list[int]]:
    for cuts in itertools.combinations(range(1, layers), parts - 1):
        yield [end - begin for begin, end in itertools.pairwise((0, *cuts, layers))]


@given(values=st.lists(st.integers(0, 100), min_size=1, max_size=9), data=st.data())
@settings(max_examples=150, deadline=None)
def test_split_is_as_good_as_exhaustive_search(values: list[float], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(values)))
    counts = best_split(values, parts)
    assert len(counts) == parts
    assert sum(counts) == len(values)
    assert min(counts) >= 1
    assert largest(values, counts) == min(largest(values, tried) for tried in all_splits(len(values), parts))


def test_split_matches_known_results() -> None:
    assert best_split([9, 1, 1, 1, 1, 1, 4], 2) == [1, 6]
    assert best_split([1, 1, 1, 1, 9], 3)[2] == 1


def test_split_handles_hundreds_of_layers() -> None:
    generator = random.Random(1)
    values = [generator.random() for _ in range(300)]
    counts = best_split(values, 8)
    assert largest(values, counts) < sum(values) / 8 + 1


class Slow(nn.Module):
    """Layer that computes ``times`` equal matrix products."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.register_buffer("matrix", torch.eye(96))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = x @ self.matrix
        return x


def test_balance_by_time_is_within_a_tenth_of_optimal() -> None:
    work = [8, 1, 1, 2, 1, 5, 1, 1, 12, 2]
    module = nn.Sequential(*map(Slow, work)).eval()
    with Sequential(module, parts=3, chunks=4, balance="time", sample=torch.randn(512, 96)) as pipe:
        counts = [len(part.module) for part in pipe.parts]
    best = min(largest(list(map(float, work)), tried) for tried in all_splits(len(work), 3))
    assert largest(list(map(float, work)), counts) <= 1.1 * best


def test_measured_time_includes_the_backward_pass_in_training_mode() -> None:
    module = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.ReLU(inplace=True), nn.BatchNorm1d(64), nn.Linear(64, 2)
    )
    x = torch.randn(128, 8, 8)
    both, forward = costs(module.train(), x, "time", 1), costs(module.eval(), x, "time", 1)
    assert both[1] > forward[1]
    assert all(cost > 0 for cost in (*both, *forward))


def several() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(10, 20),  # 220 parameters
        nn.ReLU(inplace=True),
        nn.BatchNorm1d(20),  # 40 parameters, 40 statistics, and a counter of 8 bytes
        nn.Flatten(),  # a view
        nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 1)),  # 630 + 31 parameters
    )


def test_memory_for_inference_is_parameters_buffers_and_activations() -> None:
    samples = 5
    assert costs(several().eval(), torch.randn(samples, 10), "memory", 1) == [
        4 * (220 + samples * 20),
        0,  # in place
        4 * (80 + samples * 20) + 8,
        0,
        4 * (661 + samples * 31),
    ]


def test_memory_for_training_includes_saved_tensors() -> None:
    samples = 5
    assert costs(several().train(), torch.randn(samples, 10), "memory", 1) == [
        4 * (220 + samples * 10),  # a linear layer saves its input
        4 * samples * 20,  # its output, which batch norm also saves
        4 * (80 + 20 + 20) + 8,  # mean and deviation of the batch
        0,
        4 * (661 + samples * (20 + 30)),
    ]


class Expand(nn.Module):
    """Layer with an output as large as its input, and with ``times`` tensors of this size in its graph."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = x + torch.rand_like(x, requires_grad=True)
        return x


@pytest.mark.parametrize(("times", "counts"), [([1, 2, 3, 4, 5, 6], [4, 2]), ([6, 5, 4, 3, 2, 1], [2, 4])])
def test_memory_includes_tensors_held_only_by_the_autograd_graph(times: list[int], counts: list[int]) -> None:
    module = nn.Sequential(*map(Expand, times))
    with Sequential(module, balance="memory", sample=torch.rand(10, 20, 20)) as pipe:
        assert [len(part.module) for part in pipe.parts] == counts


class Half(nn.Module):
    """Layer that either saves or frees ``wide`` internal values per sample."""

    def __init__(self, wide: int, saves: bool) -> None:
        super().__init__()
        self.wide, self.saves = wide, saves

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        between = x.repeat(1, self.wide)
        return x + (between.exp() if self.saves else between * 2).view(len(x), self.wide, -1).sum(1)


def test_memory_includes_tensors_saved_inside_a_layer() -> None:
    module = nn.Sequential(nn.Linear(4, 4), Half(50, saves=False), Half(50, saves=True), nn.Linear(4, 4))
    _, frees, saves, _ = costs(module, torch.randn(6, 4), "memory", 1)
    assert frees == 0
    assert saves == 4 * 6 * 4 * 50


def test_balance_by_memory_separates_large_layers() -> None:
    module = nn.Sequential(
        nn.Linear(8, 1000), nn.ReLU(), nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 8)
    )
    with Sequential(module, parts=2, balance="memory", sample=torch.randn(16, 8)) as pipe:
        assert [len(part.module) for part in pipe.parts] == [2, 3]


def test_param_scale_multiplies_the_bytes_of_parameters() -> None:
    module = nn.Sequential(nn.Linear(100, 100), nn.Tanh(), nn.Tanh(), nn.Tanh()).train()
    sample = torch.rand(200, 100)
    found = []
    for scale in (1, 4):
        pipe = Sequential(module, balance="memory", sample=sample, chunks=1, param_scale=scale)
        found.append([len(part.module) for part in pipe.parts])
    assert found == [[2, 2], [1, 3]]
    assert costs(module, sample, "memory", 1, param_scale=4)[0] - costs(module, sample, "memory", 1)[0] == (
        3 * 4 * (100 * 100 + 100)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"param_scale": 2}, 'balance must be "memory" if param_scale is passed'),
        ({"param_scale": -1, "balance": "memory"}, "a non-negative number, got -1"),
        ({"param_scale": "2", "balance": "memory"}, "a non-negative number, got '2'"),
    ],
)
def test_invalid_param_scale_raises(options: dict[str, Any], message: str) -> None:
    if "balance" in options:
        options |= {"sample": torch.rand(2, 2)}
    with pytest.raises(ValueError, match=message):
        Sequential([nn.Linear(2, 2), nn.Linear(2, 2)], **options)


@pytest.mark.parametrize("balance", ["time", "memory"])
def test_measurement_changes_neither_module_nor_generator(balance: str) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.ReLU(inplace=True)).train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    x = torch.randn(16, 4)
    given, state = x.clone(), torch.get_rng_state()
    costs(module, x, balance, 1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(x, given)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(layer._forward_hooks for layer in module.modules())


def test_measurement_uses_the_compute_threads_of_a_part() -> None:
    seen = []

    class Threads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch.get_num_threads())
            return x

    before = torch.get_num_threads()
    costs(nn.Sequential(Threads()), torch.ones(2), "memory", 3)
    assert set(seen) == {3}
    assert torch.get_num_threads() == before


def test_measurement_handles_dictionaries_and_tuples() -> None:
    class Both(nn.Module):
        def forward(self, x: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            return x["a"] + 1, x["b"] + 1

    class Sum(nn.Module):
        def forward(self, x: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return x[0] + x[1]

    sample = {"a": torch.zeros(4, 3), "b": torch.zeros(4, 3)}
    assert costs(nn.Sequential(Both(), Sum()).eval(), sample, "memory", 1) == [2 * 4 * 12, 4 * 12]
