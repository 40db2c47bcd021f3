"""Test batch normalisation: micro-batches are normalised separately, and statistics cover whole batches."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from plain import on_both_placements
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from trained import OPTIMIZERS, assert_same_state, in_parts, schedules

from flowchan.pipelines.sequential.batchnorm import DeferredBatchNorm, moments


def normalised(momentum: float | None = 0.1) -> nn.Sequential:
    """Return five layers that start with a batch norm layer.

    That layer's input does not depend on any parameter.
    """
    torch.manual_seed(0)
    return nn.Sequential(
        nn.BatchNorm1d(6, momentum=momentum),
        nn.Linear(6, 12),
        nn.BatchNorm1d(12, momentum=momentum),
        nn.Tanh(),
        nn.Linear(12, 4),
    )


def batches(sizes: Iterable[int]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    xs = [3 + 2 * torch.randn(size, 6, generator=generator) for size in sizes]
    return [(x, torch.randint(4, (len(x),), generator=generator)) for x in xs]


def in_micro_batches(
    module: nn.Sequential, data: Iterable[tuple[Tensor, Tensor]], chunks: int
) -> nn.Sequential:
    """Train a copy as a pipe should: sum the gradients of micro-batches, and use the statistics of whole
    batches."""
    module = copy.deepcopy(module)
    optimizer = OPTIMIZERS["sgd"](module.parameters())
    for x, target in data:
        deferred = DeferredBatchNorm(module)
        optimizer.zero_grad()
        with deferred.deferring(count=True):
            for piece, wanted in zip(x.tensor_split(chunks), target.tensor_split(chunks), strict=True):
                (cross_entropy(module(piece), wanted) * (len(piece) / len(x))).backward()
        optimizer.step()
        deferred.commit()
    return module


@schedules
@pytest.mark.parametrize("recompute", [False, True])
def test_batch_norm_results_match_training_in_micro_batches(
    schedule: Any, parts: int, workers: int, recompute: bool
) -> None:
    module = normalised()
    data = batches([12, 12, 9])
    expected = in_micro_batches(module, data, 4)
    options = {"schedule": schedule, "workers": workers, "recompute": recompute}
    with in_parts(module, parts, optimizer=OPTIMIZERS["sgd"], **options) as training:
        for each in data:
            training.step(*each)
    assert_same_state(module, expected)


def test_training_on_processes_matches_the_reference() -> None:
    module = normalised()
    data = batches([12, 12, 9])
    expected = in_micro_batches(module, data, 4)
    with in_parts(module, 3, "process", optimizer=OPTIMIZERS["sgd"], recompute=True) as training:
        for each in data:
            training.step(*each)
    assert_same_state(module, expected)


@on_both_placements
@pytest.mark.parametrize("momentum", [0.1, 0.5, None])
@pytest.mark.parametrize("recompute", [False, True])
def test_running_statistics_match_the_plain_module(on: Any, momentum: float | None, recompute: bool) -> None:
    """Compare only the first layer, because its input is the same in the pipe and in the plain module."""
    module = normalised(momentum)
    plain = copy.deepcopy(module)
    with in_parts(module, 2, on, recompute=recompute) as training:
        for x, target in batches([12, 12, 9]):
            training.step(x, target)
            plain(x)
    actual, other = module[0], plain[0]
    assert isinstance(actual, nn.BatchNorm1d)
    assert isinstance(other, nn.BatchNorm1d)
    torch.testing.assert_close(actual.running_mean, other.running_mean)
    torch.testing.assert_close(actual.running_var, other.running_var)
    assert int(actual.num_batches_tracked) == int(other.num_batches_tracked) == 3


def test_single_micro_batch_trains_exactly_like_the_plain_module() -> None:
    module = normalised()
    plain = copy.deepcopy(module)
    optimizer = OPTIMIZERS["sgd"](plain.parameters())
    with in_parts(module, 3, chunks=1, optimizer=OPTIMIZERS["sgd"]) as training:
        for x, target in batches([12, 12]):
            training.step(x, target)
            optimizer.zero_grad()
            cross_entropy(plain(x), target).backward()
            optimizer.step()
    assert_same_state(module, plain)


def test_layer_in_eval_mode_keeps_its_statistics() -> None:
    module = normalised()
    frozen = module[0].eval()
    before = copy.deepcopy(frozen.state_dict())
    with in_parts(module, 2, optimizer=OPTIMIZERS["sgd"]) as training:
        for each in batches([12, 12]):
            training.step(*each)
    assert not module[0].training
    assert module[2].training
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(frozen.state_dict()[name], before[name])
    assert int(module[2].num_batches_tracked) == 2


@on_both_placements
def test_evaluation_uses_the_statistics_without_changing_them(on: Any) -> None:
    module = normalised()
    data = batches([12, 12])
    with in_parts(module, 3, on, optimizer=OPTIMIZERS["sgd"]) as training:
        for each in data:
            training.step(*each)
        before = copy.deepcopy(module.state_dict())
        found = training.evaluate(data[0][0])
        torch.testing.assert_close(dict(module.state_dict()), dict(before))
    torch.testing.assert_close(found, module.eval()(data[0][0]).detach())


def test_layers_are_restored_after_each_step() -> None:
    module = normalised()
    with in_parts(module, 2) as training:
        training.step(*batches([8])[0])
        assert all(layer.track_running_stats for layer in (module[0], module[2]))  # type: ignore[union-attr]
        assert not any(layer._forward_pre_hooks for layer in module)


def test_layer_without_statistics_is_unchanged() -> None:
    module = nn.Sequential(nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 4))
    with in_parts(module, 2, optimizer=OPTIMIZERS["sgd"]) as training:
        training.step(*batches([8])[0])
    assert not module[0].track_running_stats  # type: ignore[union-attr]


# --- unit tests ---


@pytest.mark.parametrize("shape", [(40, 3), (40, 3, 5), (40, 3, 2, 2)])
@pytest.mark.parametrize("pieces", [1, 3, 40])
def test_combined_moments_of_pieces_equal_moments_of_the_whole(shape: tuple[int, ...], pieces: int) -> None:
    x = 1000 + torch.randn(shape, generator=torch.Generator().manual_seed(0))
    first, *others = (moments(piece) for piece in x.tensor_split(pieces))
    for other in others:
        first = first.plus(other)
    channels = x.double().transpose(0, 1).reshape(3, -1)
    assert first.count == channels.shape[1]
    torch.testing.assert_close(first.mean, channels.mean(1))
    torch.testing.assert_close(first.squares / first.count, channels.var(1, correction=0))


def test_statistics_of_images_are_per_channel() -> None:
    layer, plain = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    x = torch.randn(8, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    deferred = DeferredBatchNorm(layer)
    with deferred.deferring(count=True):
        for piece in x.split(3):
            layer(piece)
    deferred.commit()
    plain(x)
    torch.testing.assert_close(dict(layer.state_dict()), dict(plain.state_dict()))
