"""Test that a pipe on hosts has the same outputs and side effects as the plain module.

Its parts use copies of the tensors, and a change on either side reaches the other side.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from support.preloaded_programs import ONE_THREAD
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from trained import OPTIMIZERS, assert_same_state, batches, in_parts, perceptron, train_plainly

from flowchan import RunError, StageError, worker
from flowchan.hosts import local, slurm
from flowchan.pipelines.sequential import Sequential

POOL = local(2)


class Where(nn.Module):
    """Layer that adds its host's number to the input."""

    def forward(self, x: Tensor) -> Tensor:
        return x + POOL.hosts.index(worker().host)


@pytest.fixture(autouse=True, scope="module")
def _agents_share_one_import_of_torch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Import torch once, in the agents' fork server; the pages in docs/sequential run without this
    fixture."""
    folder = tmp_path_factory.mktemp("preload")
    (folder / "sitecustomize.py").write_text("import torch, torch._dynamo\n")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ONE_THREAD.items():  # a process can be forked only while it has a single thread
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield


@pytest.fixture
def data() -> list[tuple[Tensor, Tensor]]:
    return list(batches([8, 8, 5]))


def test_parts_are_assigned_to_hosts_in_turn() -> None:
    with Sequential([Where(), Where(), Where(), Where()], 4, on=POOL, chunks=2) as pipe:
        assert torch.equal(pipe(torch.zeros(4, 3)), torch.full((4, 3), 2.0))
        assert "local(2)" in repr(pipe)


def test_outputs_match_the_plain_module() -> None:
    module = perceptron().eval()
    x = [one for one, _ in batches([8, 3, 8])]
    with torch.no_grad(), Sequential(module, 2, on=POOL, chunks=4) as pipe:
        for one in x:
            torch.testing.assert_close(pipe(one), module(one))
        for one, out in zip(x, pipe.stream(iter(x)), strict=True):
            torch.testing.assert_close(out, module(one))
        module[0].weight.mul_(2)
        torch.testing.assert_close(pipe(x[0]), module(x[0]))


def test_stream_that_changes_statistics_on_a_host_raises() -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    with Sequential(module, 2, on=POOL, chunks=2) as pipe:
        with pytest.raises(StageError, match=r"changed its buffers on another host.*eval\(\)"):
            list(pipe.stream([torch.randn(4, 6)]))
        module.eval()
        x = torch.randn(4, 6)
        (out,) = pipe.stream([x])
        torch.testing.assert_close(out, module(x).detach())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_on_hosts_updates_parameters_after_each_step(name: str, data: Any) -> None:
    module = perceptron()
    plain = copy.deepcopy(module)
    own = OPTIMIZERS[name](plain.parameters())
    with in_parts(module, 2, on=POOL, optimizer=OPTIMIZERS[name]) as training:
        for x, target in data:
            loss = training.step(x, target)
            own.zero_grad()
            expected = cross_entropy(plain(x), target)
            expected.backward()  # type: ignore[no-untyped-call]
            own.step()
            torch.testing.assert_close(loss, expected.detach())
            assert_same_state(module, plain, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(training.evaluate(data[0][0]), plain(data[0][0]).detach())


def test_outside_optimizer_works_with_hosts(data: Any) -> None:
    module = perceptron()
    plain, losses = train_plainly(module, OPTIMIZERS["sgd"], data)
    outside = OPTIMIZERS["sgd"](module.parameters())
    with in_parts(module, 2, on=POOL) as training:
        for (x, target), expected in zip(data, losses, strict=True):
            outside.zero_grad()
            assert float(training.step(x, target)) == pytest.approx(expected, rel=1e-4)
            outside.step()
    assert_same_state(module, plain, rtol=1e-4, atol=1e-5)


def test_state_loaded_during_training_reaches_the_hosts(data: Any) -> None:
    module, other = perceptron(), perceptron(seed=5)
    plain, _ = train_plainly(other, partial(SGD, lr=0.1), data[1:])
    with in_parts(module, 2, on=POOL, optimizer=partial(SGD, lr=0.1)) as training:
        training.step(*data[0])
        module.load_state_dict(other.state_dict())
        for x, target in data[1:]:
            training.step(x, target)
    assert_same_state(module, plain, rtol=1e-4, atol=1e-5)


def test_restarted_training_on_hosts_equals_an_uninterrupted_one() -> None:
    steps = list(batches([8] * 6))

    def run(module: nn.Sequential, data: Any, state: Any = None) -> tuple[list[float], Any]:
        with in_parts(module, 2, POOL, optimizer=OPTIMIZERS["adam"]) as training:
            if state is not None:
                training.load_state_dict(state)
            return [float(training.step(x, target)) for x, target in data], training.state_dict()

    whole, halves, rest = perceptron(), perceptron(), perceptron(seed=9)
    expected, _ = run(whole, steps)
    before, state = run(halves, steps[:3])
    after, _ = run(rest, steps[3:], state)
    assert before + after == expected
    assert_same_state(rest, whole, rtol=0, atol=0)


def test_batch_norm_statistics_are_returned_from_hosts() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 4), nn.BatchNorm1d(4))
    local_module = copy.deepcopy(module)
    (x, target), (other, _) = batches([8, 8])
    places: list[tuple[nn.Sequential, Any]] = [(module, POOL), (local_module, "thread")]
    for one, on in places:
        with in_parts(one, 2, on=on, chunks=2) as training:
            training.step(x, target)
    assert_same_state(module, local_module)
    for one, on in places:
        with Sequential(one, 2, on=on, chunks=2) as pipe:
            pipe(other)
    assert_same_state(module, local_module)


def test_backward_from_a_loss_trains_a_pipe_on_hosts(data: Any) -> None:
    module = perceptron()
    plain, losses = train_plainly(module, OPTIMIZERS["adam"], data)
    with Sequential(module, 2, on=POOL, chunks=2) as pipe:
        optimizer = OPTIMIZERS["adam"](pipe.parameters())
        for (x, target), expected in zip(data, losses, strict=True):
            optimizer.zero_grad()
            loss = cross_entropy(pipe(x), target)
            loss.backward()
            optimizer.step()
            assert float(loss.detach()) == pytest.approx(expected, rel=1e-4)
    assert_same_state(module, plain, rtol=1e-4, atol=1e-5)


def test_pool_without_known_hosts_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(
        ValueError, match="Sequential: slurm: this program is not running in a Slurm allocation"
    ):
        Sequential(perceptron(), on=slurm())


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("never")


def raised_by(module: nn.Sequential) -> Iterator[BaseException]:
    x, target = next(batches([4]))
    with Sequential(module, 2, on=POOL, chunks=2) as pipe:
        for grad in (True, False):
            with torch.set_grad_enabled(grad), pytest.raises(StageError) as caught:
                pipe(x)
            yield caught.value
    with pytest.raises(RunError) as failed, in_parts(module, 2, on=POOL, chunks=2) as training:
        training.step(x, target)
    yield failed.value


def test_part_that_fails_on_a_host_is_named() -> None:
    for error in raised_by(nn.Sequential(nn.Linear(6, 4), Fails())):
        assert "part 1" in str(error)
        assert "never" in str(error)
