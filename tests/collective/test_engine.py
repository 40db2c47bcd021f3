"""Test that replicas learn like one module, that hooks run in order, and that training resumes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.group_members import in_threads, raised

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from flowchan import Graph  # noqa: E402
from flowchan.collective.training.engine import HOOKS, Engine, Mean  # noqa: E402
from flowchan.collective.training.gradients import check_equal  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_compute_thread")

Batches = list[tuple[Any, Any]]


@pytest.fixture(scope="module")
def batches() -> Batches:
    """Return the digits data set in batches of 64."""
    found = pytest.importorskip("sklearn.datasets").load_digits()
    x, y = torch.tensor(found.data / 16), torch.tensor(found.target)
    return [(x[i : i + 64], y[i : i + 64]) for i in range(0, 64 * 12, 64)]


def engine(group: Any = None, hooks: Any = (), seed: int = 0, overlap: bool = True) -> Engine:
    net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) / 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    return Engine(net, nn.functional.cross_entropy, optimizer, group, hooks, overlap=overlap)


class Curve:
    """A hook that records each step's loss, averaged over all replicas."""

    def __init__(self, group: Any = None) -> None:
        self.group, self.losses = group, []  # type: ignore[var-annotated]

    def on_forward(self, state: Any) -> None:
        mean = Mean()
        mean.add(state.loss.item())
        if state.training:
            self.losses.append(mean.over(self.group))


def test_engine_with_two_replicas_matches_one_replica(batches: Batches) -> None:
    """In float64, the mean of two halves differs from the mean of the whole batch only by rounding.

    A graph prepares the samples.
    """

    def half(g: Any, epoch: int) -> Any:
        whole = Graph("samples").source(batches)
        return whole.map(lambda pair: tuple(part[g.rank :: 2] for part in pair)).collect()

    def train(g: Any) -> tuple[list[float], float]:
        curve = Curve(g)
        # with different seeds, because all members get the parameters of rank 0
        made = engine(g, [curve], seed=g.rank)
        made.train(lambda epoch: half(g, epoch), epochs=2)
        check_equal(made.module, g)
        return curve.losses, made.test(batches)

    one = Curve()
    alone = engine(hooks=[one])
    alone.train(batches, epochs=2)
    for losses, loss in raised(in_threads(2, train)):
        torch.testing.assert_close(losses, one.losses, rtol=1e-9, atol=1e-12)
        assert loss == pytest.approx(alone.test(batches), rel=1e-9)
    assert len(one.losses) == 24
    assert one.losses[-1] < one.losses[0] / 4


def test_hooks_run_in_order_on_a_replica_with_fewer_samples(batches: Batches) -> None:
    def train(g: Any) -> list[str]:
        messages: list[str] = []
        hook = SimpleNamespace(
            **{name: lambda state, name=name: messages.append(f"{name} {state.step}") for name in HOOKS}
        )
        clipping = SimpleNamespace(on_backward=lambda state: clip(made.module))
        made = engine(g, [clipping, hook])
        made.train(batches[: 1 + g.rank], epochs=1)
        check_equal(made.module, g)
        return messages

    def clip(module: Any) -> None:
        nn.utils.clip_grad_norm_(module.parameters(), 0.1)

    first, second = raised(in_threads(2, train))
    start, end = ["on_start 0", "on_start_epoch 0"], ["on_end_epoch 2", "on_end 2"]
    step = ["on_sample 0", "on_output 0", "on_forward 0", "on_backward 0", "on_update 1"]
    assert first == [*start, *step, "on_backward 1", "on_update 2", *end]
    again = ["on_sample 1", "on_output 1", "on_forward 1", "on_backward 1", "on_update 2"]
    assert second == [*start, *step, *again, *end]


def test_hook_can_replace_the_output_before_the_loss(batches: Batches) -> None:
    def double(state: Any) -> None:
        state.output = state.output * 2

    doubled = SimpleNamespace(on_output=double)
    halved = engine(hooks=[doubled])
    with torch.no_grad():
        for p in list(halved.module.parameters())[-2:]:
            p.div_(2)
    assert halved.test(batches) == engine().test(batches)


def test_overlap_with_different_numbers_of_samples_matches_no_overlap(batches: Batches) -> None:
    """The order of adding does not matter in a group of two, so the parameters are bit-equal.

    One parameter gets no gradient.
    """

    def train(g: Any, overlap: bool) -> list[Any]:
        made = engine(g, overlap=overlap)
        assert isinstance(made.module, nn.Sequential)
        made.module.append(Unused())
        made.train(batches[: 3 + 4 * g.rank], epochs=2)
        check_equal(made.module, g)
        backward_outside_training(made.module)
        return [p.detach().clone() for p in made.module.parameters()]

    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, dtype=torch.double))

        def forward(self, x: Any) -> Any:
            return x

    def backward_outside_training(module: Any) -> None:
        for _ in range(2):
            module(batches[0][0]).sum().backward()

    overlapped = raised(in_threads(2, train, True))
    for one, other in zip(overlapped, raised(in_threads(2, train, False)), strict=True):
        assert all(map(torch.equal, one, other))


def test_hook_may_call_backward_without_overlap(batches: Batches) -> None:
    """Adversarial samples, for example, need the input's gradient."""

    def train(g: Any, overlap: bool) -> None:
        def perturb(state: Any) -> None:
            given, target = state.sample
            given = given.clone().requires_grad_()
            made.loss(made.module(given), target).backward()
            state.sample = given.detach() + 0.01 * given.grad.sign(), target

        made = engine(g, [SimpleNamespace(on_sample=perturb)], overlap=overlap)
        made.train(batches[:2], epochs=1)

    with pytest.raises(RuntimeError, match="overlap=False"):
        raised(in_threads(1, train, True))
    raised(in_threads(1, train, False))


def test_training_resumes_exactly_from_a_checkpoint(batches: Batches, tmp_path: Path) -> None:
    path = tmp_path / "kept.pt"

    def train(g: Any) -> Any:
        straight = engine(g)
        straight.train(batches, epochs=2)
        first = engine(g)
        first.train(batches, epochs=1)
        first.save(path)
        g.barrier()
        again = engine(g, seed=5)
        again.load(path)
        assert (again.state.epoch, again.state.step) == (1, len(batches))
        again.train(batches, epochs=2)
        for one, other in zip(straight.module.parameters(), again.module.parameters(), strict=True):
            assert torch.equal(one, other)
        return again.state.step

    assert raised(in_threads(2, train)) == [2 * len(batches)] * 2
    assert [one.name for one in tmp_path.iterdir()] == ["kept.pt"]


@pytest.mark.parametrize("rate", [0.25, np.float64(0.25), np.float32(0.25), torch.tensor(0.25)])
def test_checkpoint_keeps_learning_rate_of_any_type(rate: Any, tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=rate)
    kept = Engine(nn.Linear(2, 1), nn.functional.mse_loss, optimizer)
    kept.save(tmp_path / "kept.pt")
    optimizer.param_groups[0]["lr"] = 1.0
    kept.load(tmp_path / "kept.pt")
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_hook_can_evaluate_the_module_during_training(batches: Batches) -> None:
    """A layer that is in eval mode during training stays in eval mode afterwards."""
    seen = []

    def validate(state: Any) -> None:
        made.test(batches[:1])

    def look(state: Any) -> None:
        seen.append((state.training, made.module.training, dropout.training, frozen.training))

    dropout, frozen = nn.Dropout(), nn.Dropout()
    hook = SimpleNamespace(on_start=lambda _: frozen.eval(), on_forward=look, on_end_epoch=validate)
    made = engine(hooks=[hook])
    assert isinstance(made.module, nn.Sequential)
    made.module.extend([dropout, frozen])
    made.train(batches[:1], epochs=2)
    assert seen == [(True, True, True, False), (False, False, False, False)] * 2


def test_hook_with_unknown_method_raises() -> None:
    with pytest.raises(ValueError, match=r"on_start, on_start_epoch, .*with on_updat"):
        engine(hooks=[SimpleNamespace(on_updat=print)])


def test_mean_is_weighted_and_is_nan_without_values() -> None:
    mean = Mean()
    assert mean.over() != mean.over()
    mean.add(2.0, 3)
    mean.add(6.0)
    assert mean.over() == 3.0


def test_mean_does_not_keep_the_computation_graph() -> None:
    def over(g: Any) -> tuple[float, type]:
        mean = Mean()
        for x in 2.0, 4.0:
            mean.add(torch.tensor(x, requires_grad=True) * 2)
        return mean.over(g), type(mean.total)

    assert in_threads(2, over) == [(6.0, float)] * 2


def test_train_rejects_an_iterator_for_several_epochs(batches: Batches) -> None:
    made = engine()
    with pytest.raises(ValueError, match="batches must be iterable 2 times"):
        made.train(iter(batches), epochs=2)
    assert made.state.step == 0
    made.train(iter(batches), epochs=1)
    made.train(iter(batches), epochs=2)
    assert made.state.step == 2 * len(batches)
