"""Test that parts hold the module's own layers under their own names."""

from __future__ import annotations

import multiprocessing
import os
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

from flowchan.pipelines import Sequential
from flowchan.pipelines.sequential.parts import compute_threads, divided, may_write, run_part


def layers() -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            first=nn.Linear(3, 4),
            act=nn.ReLU(),
            block=nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
            last=nn.Linear(4, 2),
        )
    )


@pytest.mark.parametrize("counts", [[4], [1, 3], [2, 2], [1, 1, 1, 1]])
def test_parts_together_have_the_state_of_the_module(counts: list[int]) -> None:
    module = layers()
    parts = divided(module, counts)
    assert [len(part.module) for part in parts] == counts
    found = {
        name: tensor for part in parts for name, tensor in part.module.state_dict(keep_vars=True).items()
    }
    plain = module.state_dict(keep_vars=True)
    assert list(found) == list(plain)
    assert all(found[name] is plain[name] for name in plain)


def test_parts_keep_the_numbers_of_layers() -> None:
    _, second = divided(nn.Sequential(nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 2)), [1, 2])
    assert list(second.module.state_dict()) == ["1.weight", "1.bias", "2.weight", "2.bias"]


def test_layer_that_occurs_twice_is_in_both_parts() -> None:
    shared = nn.Linear(2, 2)
    first, second = divided(nn.Sequential(shared, nn.ReLU(), shared), [2, 1])
    assert first.module[0] is second.module[0] is shared


def test_str_of_a_part_names_its_layers() -> None:
    one, two = divided(layers(), [3, 1])
    assert str(one) == "part 0 (layers 'first' to 'block')"
    assert str(two) == "part 1 (layer 'last')"
    assert two.name == "part 1"


def test_parts_in_order_compute_the_output_of_the_module() -> None:
    module = layers()
    x = torch.randn(5, 3)
    value, skips = x, {}
    for part in divided(module, [1, 2, 1]):
        value, skips = run_part(part, value, skips)
    assert torch.equal(value, module(x))
    assert skips == {}


def test_in_place_layers_do_not_change_the_input() -> None:
    for first in (nn.ReLU(inplace=True), nn.Sequential(nn.Flatten(), nn.ReLU(inplace=True))):
        x = torch.full((2, 3), -1.0)
        (part,) = divided(nn.Sequential(first), [1])
        value, _ = run_part(part, {"x": x}["x"], {})
        assert torch.equal(value, torch.zeros(2, 3))
        assert torch.equal(x, torch.full((2, 3), -1.0))


def test_may_write_is_false_only_for_known_layers() -> None:
    class Adds(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.add_(1)

    assert not may_write(nn.Sequential(nn.Sequential(nn.Conv2d(1, 1, 1)), nn.ReLU(inplace=True)))
    assert not may_write(nn.BatchNorm1d(3))
    assert may_write(nn.Sequential(nn.ReLU()))
    assert may_write(Adds(2, 2))


def test_part_moves_its_input_to_its_device() -> None:
    (part,) = divided(nn.Sequential(nn.Identity()), [1], [torch.device("meta")])
    value, skips = run_part(part, (torch.ones(2),), {"name": torch.ones(1)})
    assert value[0].device.type == skips["name"].device.type == "meta"


def test_forked_processes_compute_with_one_thread() -> None:
    expected = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    assert (compute_threads(1) == 1) or expected != "fork"
    assert compute_threads(10_000) == 1


class Cores(nn.Module):
    """Layer that appends the affinity mask of its process to the input."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(
            [x, torch.tensor([[float(core in os.sched_getaffinity(0)) for core in range(64)]])], dim=1
        )


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="one core for two parts: run this on two cores or more"
)
def test_parts_in_processes_have_disjoint_cores() -> None:
    with Sequential([Cores(), Cores()], parts=2, on="process", chunks=1) as pipe:
        y = pipe(torch.zeros(1, 0))
    first, second = y[0, :64], y[0, 64:]
    actual = torch.tensor([float(core in os.sched_getaffinity(0)) for core in range(64)])
    assert torch.equal(first + second, actual)
    assert first.any()
    assert second.any()
