"""Test that random modules with random cuts and schedules train like the plain module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from trained import OPTIMIZERS, assert_same_state, batches, in_parts, train_plainly

from flowchan.pipelines import Pop, Stash
from flowchan.pipelines.sequential.engine.schedule import SCHEDULES

WIDTH = 6
LAYERS = ["linear", "linear", "tanh", "relu", "norm", "stash", "pop"]


@st.composite
def modules(draw: st.DrawFn) -> nn.Sequential:
    """Draw up to twelve layers, with skips and frozen parameters."""
    torch.manual_seed(draw(st.integers(0, 99)))
    layers: list[nn.Module] = []
    stashed: list[str] = []
    for kind in draw(st.lists(st.sampled_from(LAYERS), max_size=8)):
        if kind == "linear":
            layers.append(nn.Linear(WIDTH, WIDTH))
        elif kind == "tanh":
            layers.append(nn.Tanh())
        elif kind == "relu":
            layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)]
        elif kind == "norm":
            layers.append(nn.LayerNorm(WIDTH))
        elif kind == "stash":
            stashed.append(f"skip {len(layers)}")
            layers += [Stash(stashed[-1]), nn.Linear(WIDTH, WIDTH)]
        elif stashed:
            layers.append(
                Pop(
                    stashed.pop(draw(st.integers(0, len(stashed) - 1))),
                    draw(st.sampled_from([torch.add, torch.mul])),
                )
            )
    module = nn.Sequential(*layers, *map(Pop, stashed), nn.Linear(WIDTH, 4))
    for parameter in list(module.parameters())[:-1]:
        parameter.requires_grad_(draw(st.integers(0, 9)) > 0)
    return module


@st.composite
def cuts(draw: st.DrawFn, layers: int) -> dict[str, Any]:
    """Draw training options for a module with ``layers`` layers."""
    parts = draw(st.integers(1, min(5, layers)))
    schedule = draw(st.sampled_from(SCHEDULES))
    workers = draw(st.integers(1, parts)) if schedule == "interleaved" else None
    return {
        "parts": parts,
        "schedule": schedule,
        "workers": workers,
        "chunks": draw(st.sampled_from([1, 2, 3, 8])),
        "recompute": draw(st.booleans()),
        "clip": draw(st.sampled_from([None, 0.1])),
    }


def test_random_module_trains_like_the_plain_module(long_walk: bool) -> None:
    @settings(max_examples=100 if long_walk else 30, deadline=None, derandomize=True)
    @given(st.data())
    def trains_like_it(data: st.DataObject) -> None:
        module = data.draw(modules())
        options = data.draw(cuts(len(module)))
        sizes = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
        plain, losses = train_plainly(module, OPTIMIZERS["sgd"], batches(sizes), options["clip"])
        with in_parts(module, optimizer=OPTIMIZERS["sgd"], **options) as training:
            found = [float(training.step(*batch)) for batch in batches(sizes)]
        assert found == pytest.approx(losses, rel=1e-3, abs=1e-4)
        assert_same_state(module, plain, rtol=1e-3, atol=1e-4)

    trains_like_it()
