"""Test ``Sequential`` with the cases from torchgpipe 0.0.7's tests of balance and skip connections.

``balance="time"`` and ``"memory"`` with ``sample=`` correspond to ``balance_by_time`` and
``balance_by_size``. Each test has the name of the original test but none of its code.

The following cases differ from the originals:

``test_blockpartition_non_positive_partitions``, ``_short_sequence``
    They raise when the pipe is created.
``test_balance_by_time``
    CPU time is measured, so a layer computes instead of sleeping.
``test_layerwise_sandbox``, ``test_not_training``
    Layers are measured in their current mode.
``test_already_has_grad``
    Gradients are left unchanged.
``test_stash``, ``test_pop``, ``test_matching``
    ``Stash`` and ``Pop`` are layers with a name.
``test_stash_not_pop``, ``_again``, ``test_pop_unknown``, ``_again``, ``_not_stashed``
    They raise when the pipe is created.

The following cases are left out:

``test_balance_by_size_param_scale``
    ``tests/sequential/test_balance.py`` tests this with other layers.
``test_deprecated_torchgpipe_balancing``
    flowchan has no older name.
``test_namespace*``, ``test_*_different_names``, ``test_double_stash_pop_but_isolated``
    The program uses different names instead.
``test_declare_but_not_use``, ``test_stash_not_declared``, ``test_pop_not_declared``
    Skips need no declaration.
``skip/test_portal``, ``test_tracker``, ``test_leak``, ``test_inspect_skip_layout``, ``test_api``
    They test internals of torchgpipe.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowchan.pipelines import Pop, Sequential, Stash
from flowchan.pipelines.sequential.balance import best_split

pytestmark = [
    pytest.mark.usefixtures("one_compute_thread"),
    pytest.mark.filterwarnings("ignore:Sequential. with .* parts:RuntimeWarning"),
]


def cut(pipe: Sequential) -> list[int]:
    """Return the number of layers in each part."""
    return [len(part.module) for part in pipe.parts]


class Pass(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


# --- test_balance.py ---


def test_blockpartition() -> None:
    assert best_split([1, 2, 3, 4, 5, 6], 2) == [4, 2]


def test_blockpartition_zeros() -> None:
    assert best_split([0, 0], 2) == [1, 1]


@pytest.mark.parametrize("parts", [0, -1, 2], ids=["non_positive", "non_positive", "short_sequence"])
def test_blockpartition_wrong(parts: int) -> None:
    with pytest.raises(ValueError, match="parts"):
        Sequential([nn.Linear(1, 1)], parts)
    with pytest.raises((TypeError, ValueError), match="layer"):
        Sequential([], 1)


class Works(nn.Module):
    """A layer that takes ``times`` times as long as a layer with ``times=1``."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            for _ in range(20):
                x = x.sin()
        return x


def test_balance_by_time() -> None:
    """CPU time is measured, so a sleeping layer would seem fast.

    Any other cut takes nearly twice as long, so inexact measurements on a busy machine do not matter.
    """
    module = nn.Sequential(*[Works(times) for times in (6, 5, 1)])
    pipe = Sequential(module, 2, balance="time", sample=torch.rand(64, 64), chunks=1)
    assert cut(pipe) == [1, 2]


def test_balance_by_time_loop_resets_input() -> None:
    module = nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten(), nn.Linear(128, 10))
    pipe = Sequential(module, 2, balance="time", sample=torch.rand(10, 3, 8, 8))
    assert sum(cut(pipe)) == 3


class Expands(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = x * torch.rand_like(x, requires_grad=True)
        return x


@pytest.mark.parametrize(("times", "expected"), [((1, 2, 3, 4, 5, 6), [4, 2]), ((6, 5, 4, 3, 2, 1), [2, 4])])
def test_balance_by_size_latent(times: tuple[int, ...], expected: list[int]) -> None:
    module = nn.Sequential(*map(Expands, times))
    pipe = Sequential(module, 2, balance="memory", sample=torch.rand(10, 100, 100), chunks=1)
    assert cut(pipe) == expected


@pytest.mark.parametrize(
    ("layers", "expected"), [(range(6), [4, 2]), (reversed(range(6)), [2, 4])], ids=["up", "down"]
)
def test_balance_by_size_param(layers: Any, expected: list[int]) -> None:
    up = expected == [4, 2]
    module = nn.Sequential(*[nn.Linear(i + 1, i + 2) if up else nn.Linear(i + 2, i + 1) for i in layers])
    sample = torch.rand(7, 1) if up else torch.rand(1, 7)
    pipe = Sequential(module, 2, balance="memory", sample=sample, param_scale=100, chunks=1)
    assert cut(pipe) == expected


def test_layerwise_sandbox_and_not_training() -> None:
    seen: set[bool] = set()
    module = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)).eval()
    module.append(Pass())
    module[2].register_forward_hook(lambda layer, x, y: seen.add(layer.training))
    module[2].eval()
    Sequential(module, 2, balance="time", sample=torch.rand(2, 3, 4, 4))
    assert not any(layer.training for layer in module.modules())
    assert seen <= {False}


def test_sandbox_during_profiling_and_already_has_grad() -> None:
    module = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1))
    module(torch.rand(1, 3, 8, 8)).norm().backward()
    state, kept = copy.deepcopy(module.state_dict()), [one.grad.clone() for one in module.parameters()]
    Sequential(module, 2, balance="time", sample=torch.rand(1, 3, 8, 8))
    torch.testing.assert_close(module.state_dict(), state)
    torch.testing.assert_close([one.grad for one in module.parameters()], kept)


class Twin(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.detach()


class Sums(nn.Module):
    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        return both[0] + both[1]


@pytest.mark.parametrize("balance", ["time", "memory"])
def test_balance_by_time_tuple_and_by_size_tuple(balance: Any) -> None:
    pipe = Sequential([Twin(), Sums()], 2, balance=balance, sample=torch.rand(1))
    assert cut(pipe) == [1, 1]


# --- skip/ ---


@pytest.mark.parametrize("recompute", [False, True], ids=["never", "always"])
@pytest.mark.parametrize("balance", [[5], [2, 3], [3, 2], [2, 1, 2]], ids=["3", "1:2", "2:1", "1:1:1"])
def test_1to3(balance: list[int], recompute: bool) -> None:
    module = nn.Sequential(
        Stash("1to3"), nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), Pop("1to3")
    )
    twin, x = copy.deepcopy(module), torch.rand(6, 3, 8, 8, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    with Sequential(module, balance, chunks=3, recompute=recompute) as pipe:
        pipe(x).square().mean().backward()
    twin(other).square().mean().backward()
    torch.testing.assert_close(x.grad, other.grad)
    for mine, plain in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, plain.grad)


def test_none_skip_and_stash_none() -> None:
    def none(x: Tensor, skip: Any) -> Tensor:
        assert skip is None
        return x

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stash = Stash("none")

        def forward(self, x: Tensor) -> Tensor:
            self.stash(None)
            return x

    x = torch.rand(10, requires_grad=True)
    with Sequential([Keeps(), Pop("none", none)], [1, 1], chunks=5) as pipe:
        pipe(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(10))


def test_matching_and_stash_and_pop() -> None:
    x = torch.rand(4)
    with Sequential([Stash("foo"), nn.Tanh(), Pop("foo")], [1, 2]) as pipe:
        torch.testing.assert_close(pipe(x), x.tanh() + x)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("stash_not_pop", [Stash("foo")]),
        ("pop_unknown", [Pop("foo")]),
        ("stash_again", [Stash("foo"), Stash("foo"), Pop("foo")]),
        ("pop_again", [Stash("foo"), Pop("foo"), Pop("foo")]),
        ("stash_pop_together_same_name", [Pop("foo"), Stash("foo")]),
        ("pop_not_stashed", [nn.Tanh(), Pop("foo")]),
    ],
)
def test_skippables(name: str, layers: list[nn.Module]) -> None:
    with pytest.raises(ValueError, match="foo"):
        Sequential(layers, [len(layers)])


def test_double_stash_pop() -> None:
    """A name may be used again after its pop."""
    x, layers = torch.rand(4), [Stash("foo"), Pop("foo"), Stash("foo"), Pop("foo")]
    with Sequential(layers, [2, 2]) as pipe:
        torch.testing.assert_close(pipe(x), 4 * x)
