"""Test the default cut of a module, and the default number of micro-batches."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
from plain import on_both_placements
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from flowchan.pipelines import Sequential


@pytest.fixture(autouse=True)
def _equal_layers() -> None:
    """Override the fixture of this name, so that layers are measured."""


class Costs(nn.Module):
    """Layer that computes ``times`` equal matrix products."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x @ torch.eye(64)
        return x


def uneven() -> nn.Sequential:
    return nn.Sequential(Costs(60), Costs(40), *(Costs(1) for _ in range(6)))


@on_both_placements
@pytest.mark.parametrize("stream", [False, True])
def test_cut_is_measured_once_with_the_first_batch(on: Any, stream: bool) -> None:
    with Sequential(uneven(), parts=2, on=on) as pipe:
        assert [len(part.module) for part in pipe.parts] == [4, 4]
        x = torch.randn(512, 64)
        for _ in range(2):
            y = next(pipe.stream([x])) if stream else pipe(x)
            assert torch.equal(y, x)
            assert [len(part.module) for part in pipe.parts] == [1, 7]
        assert {event.part for event in pipe.timeline().events} == {0, 1}


@pytest.mark.parametrize(
    "options", [{"parts": [3, 5]}, {"parts": 8}, {"balance": "memory", "sample": torch.ones(2, 3)}]
)
def test_explicit_cut_is_not_measured(options: Any) -> None:
    calls: list[int] = []

    class Counts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.device.type != "meta":
                calls.append(len(x))
            return x

    with Sequential([Counts() for _ in range(8)], chunks=1, **options) as pipe:
        calls.clear()
        pipe(torch.ones(2, 3))
    assert calls == [2] * 8


def test_cut_stays_even_if_a_layer_cannot_be_measured() -> None:
    class Alone(nn.Identity):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("no copies")

    with Sequential([Alone(), *(nn.Identity() for _ in range(3))], parts=2) as pipe:
        assert pipe(torch.ones(2, 1)).tolist() == [[1.0], [1.0]]
        assert [len(part.module) for part in pipe.parts] == [2, 2]


@on_both_placements
def test_slow_pipe_warns_once(on: Any) -> None:
    x = torch.ones(2, 1)
    with Sequential([nn.Identity() for _ in range(4)], parts=2, on=on) as pipe:
        with pytest.warns(RuntimeWarning, match="will not be faster .* with one compute thread: "):
            pipe(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pipe(x)
            list(pipe.stream([x]))


def test_slow_pipe_warns_with_the_number_of_compute_threads() -> None:
    torch.set_num_threads(3)
    try:
        with (
            Sequential([nn.Identity() for _ in range(4)]) as pipe,
            pytest.warns(RuntimeWarning, match="with 2 parts, .* with torch's 3 compute threads: "),
        ):
            pipe(torch.ones(2, 1))
    finally:
        torch.set_num_threads(1)


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="one core for two parts: run this on two cores or more"
)
def test_fast_pipe_does_not_warn() -> None:
    with Sequential([Costs(30) for _ in range(4)], parts=2) as pipe, warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe(torch.randn(512, 64))


class Sizes(nn.Module):
    """Layer that records the sizes of micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "meta":
            self.seen.append(len(x))
        return x


@pytest.mark.parametrize(("samples", "chunks"), [(64, 1), (256, 1), (1100, 4), (5000, 8)])
def test_number_of_chunks_depends_on_the_number_of_operations(samples: int, chunks: int) -> None:
    """Each of the two parts needs 50 million operations. With 400,000 operations per sample for both parts,
    this takes 250 samples."""
    sizes = Sizes()
    module = nn.Sequential(nn.Linear(400, 500, bias=False), sizes)
    pieces = [len(piece) for piece in torch.empty(samples, 0).tensor_split(chunks)]
    x = torch.randn(samples, 400)
    with Sequential(module) as pipe:
        pipe(x)
    assert sizes.seen == pieces
    sizes.seen.clear()
    with Sequential(module).trainer(loss=mse_loss) as training:
        training.step(x, torch.zeros(samples, 500))
    assert sizes.seen == pieces


def test_layers_with_unknown_cost_use_eight_chunks() -> None:
    sizes = Sizes()
    with Sequential([sizes, nn.Identity()]) as pipe:
        pipe(torch.ones(16, 1))
    assert sizes.seen == [2] * 8
