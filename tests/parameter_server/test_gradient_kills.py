"""Test that tensors and optimizer state have the same version, wherever a kill hits the server's worker."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from shard_blocks import bits
from test_server_kills import KillAtLine
from torch import nn, optim

from flowchan import worker
from flowchan.pipelines import ParameterServer, RowOptimizer
from flowchan.pipelines.parameter_server.shard import Push, Shard

pytestmark = pytest.mark.usefixtures("one_compute_thread")

STRIDE = 10
"""Number of lines between two points that kill workers."""
PUSHES = 60


def die_at_lines(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    """Make incarnation n of the worker die while it applies push n, before line ``first + STRIDE * n``."""
    serve = Shard._serve

    def serve_and_die(self: Shard, push: Push) -> None:
        if push.number == worker().incarnation:
            sys.settrace(KillAtLine(first + STRIDE * push.number))
        try:
            serve(self, push)
        finally:
            sys.settrace(None)

    monkeypatch.setattr(Shard, "_serve", serve_and_die)


def restarts(server: Any) -> int:
    (stage,) = [stage for stage in server._run.stats().stages if stage.name == server.name]
    return int(stage.restarts)


def test_gradient_pushes_match_torch_wherever_the_worker_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    die_at_lines(monkeypatch, 0)
    torch.manual_seed(1)
    start = {"w": torch.randn(20, 3), "b": torch.randn(3)}
    params = {name: nn.Parameter(value.clone()) for name, value in start.items()}
    optimizer = optim.Adam(params.values(), lr=0.1)
    with ParameterServer(start, optimizer=lambda params: optim.Adam(params, lr=0.1)) as server:
        client = server.client()
        for version in range(1, PUSHES + 1):
            for p in params.values():
                p.grad = torch.randn_like(p)
            assert (
                client.push({name: p.grad for name, p in params.items()}, rule="gradient").wait() == version
            )
            optimizer.step()
            assert {name: bits(x) for name, x in client.pull().items()} == {
                n: bits(p) for n, p in params.items()
            }
        assert restarts(server) > 10


def test_row_gradients_match_torch_wherever_the_worker_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    die_at_lines(monkeypatch, STRIDE // 2)
    torch.manual_seed(1)
    param = nn.Parameter(torch.randn(30, 2))
    optimizer = optim.SparseAdam([param], lr=0.1)
    with ParameterServer({"t": param.detach()}, rows={"t": RowOptimizer.adam(lr=0.1)}) as server:
        client = server.client()
        for version in range(1, PUSHES + 1):
            ids, values = torch.randint(0, 30, (5,)), torch.randn(5, 2)
            assert client.push_rows("t", ids, values, rule="gradient").wait() == version
            param.grad = torch.sparse_coo_tensor(ids[None], values, param.shape).coalesce()
            optimizer.step()
            assert bits(client.pull()["t"]) == bits(param)
        assert restarts(server) > 10
