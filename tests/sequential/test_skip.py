"""Test skip connections and their gradients: in the plain module, within a part, and across parts."""

from __future__ import annotations

import copy
import re
import threading
from typing import Any

import pytest
import torch
from plain import on_both_placements
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from trained import OPTIMIZERS, assert_same_state, batches, in_parts, schedules, train_plainly

from flowchan import RunError, StageError
from flowchan.pipelines.sequential import Pop, Sequential, Stash


class Block(nn.Module):
    """User-defined layer that contains a ``Stash`` or ``Pop``."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def u_net() -> nn.Sequential:
    """Return thirteen layers with nested skips, some within one part and some across several."""
    torch.manual_seed(0)
    return nn.Sequential(
        Stash("input"),
        nn.Linear(6, 10),
        nn.Tanh(),
        Block(Stash("wide")),
        nn.Linear(10, 5),
        nn.Tanh(),
        Stash("narrow"),
        nn.Linear(5, 5),
        Pop("narrow"),
        nn.Linear(5, 10),
        Pop("wide", torch.mul),
        Block(Pop("input", joined)),
        nn.Linear(16, 4),
    )


def joined(x: Tensor, skip: Tensor) -> Tensor:
    return torch.cat([x, skip], dim=1)


def written_out(module: nn.Sequential, x: Tensor) -> Tensor:
    """Compute the output of :func:`u_net` without skip layers."""
    wide = torch.tanh(module[1](x))
    narrow = torch.tanh(module[4](wide))
    up = module[9](module[7](narrow) + narrow) * wide
    out: Tensor = module[12](torch.cat([up, x], dim=1))
    return out


def test_skips_work_in_the_plain_module() -> None:
    module = u_net()
    ((x, _),) = batches([8])
    assert torch.equal(module(x), written_out(module, x))


@pytest.mark.parametrize(("on", "parts"), [("thread", 1), ("thread", 5), ("thread", 13), ("process", 3)])
def test_inference_with_skips_matches_the_plain_module(on: Any, parts: int) -> None:
    module = u_net()
    ((x, _),) = batches([10])
    with Sequential(module, parts, on=on, chunks=4) as pipe:
        torch.testing.assert_close(pipe(x), module(x).detach())


@schedules
@pytest.mark.parametrize("recompute", [False, True])
def test_training_with_skips_matches_the_plain_module(
    schedule: Any, parts: int, workers: int, recompute: bool
) -> None:
    module = u_net()
    plain, losses = train_plainly(module, OPTIMIZERS["sgd"], batches([8, 7, 3]))
    options = {"schedule": schedule, "workers": workers, "recompute": recompute}
    with in_parts(module, parts, optimizer=OPTIMIZERS["sgd"], **options) as training:
        found = [float(training.step(*each)) for each in batches([8, 7, 3])]
    assert found == pytest.approx(losses, rel=1e-5)
    assert_same_state(module, plain)


def test_training_with_skips_on_processes_matches_the_plain_module() -> None:
    module = u_net()
    plain, _ = train_plainly(module, OPTIMIZERS["adam"], batches([8, 7]))
    with in_parts(module, [2, 3, 3, 5], "process", optimizer=OPTIMIZERS["adam"]) as training:  # type: ignore[arg-type]
        for each in batches([8, 7]):
            training.step(*each)
    assert_same_state(module, plain)


def test_gradients_flow_through_the_skip_connection() -> None:
    """The values of the layers in between are multiplied by zero."""

    def only_skip(x: Tensor, skip: Tensor) -> Tensor:
        return 0 * x + skip

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 4), Stash("a"), nn.Linear(4, 4), nn.Tanh(), Pop("a", only_skip))
    plain = copy.deepcopy(module)
    ((x, target),) = batches([9])
    with in_parts(module, 5) as training:
        training.step(x, target)
    cross_entropy(plain(x), target).backward()
    assert module[0].weight.grad.abs().sum() > 0  # type: ignore[union-attr]
    for actual, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, other.grad)


def test_pop_in_the_plain_module_returns_the_last_stash() -> None:
    module = nn.Sequential(Stash("a"), nn.Hardtanh(0, 1), Stash("a"), nn.Hardtanh(5, 6), Pop("a"))
    # 5 plus 1, the value that was stashed last
    assert module(torch.full((2, 1), 3.0)).tolist() == [[6.0], [6.0]]


def test_nested_stash_that_replaces_another_raises() -> None:
    module = nn.Sequential(Stash("a"), nn.Hardtanh(0, 1), Block(Stash("a")), Pop("a"))
    x = torch.full((2, 1), 3.0)
    with (
        Sequential(module, 2) as pipe,
        pytest.raises(StageError, match=r"Stash\('a'\): a value with this name is already stashed"),
    ):
        pipe(x)
    assert torch.equal(module(x), module(x))  # the plain module cannot detect the end of a batch


def test_second_pop_raises() -> None:
    module = nn.Sequential(Stash("a"), Pop("a"), Pop("a"))
    with pytest.raises(RuntimeError, match=r"Pop\('a'\): no value is stashed; put a Stash\('a'\) before it"):
        module(torch.ones(2, 1))


def test_pop_without_a_stash_names_its_part() -> None:
    module = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4), Block(Pop("lost")))
    ((x, target),) = batches([8])
    training = in_parts(module, 3)
    with (
        training,
        pytest.raises(
            RunError, match=r"part 2 \(layer '2'\), step F0 \(micro-batch 0 of 4\): .*Pop\('lost'\)"
        ),
    ):
        training.step(x, target)


WRONG: dict[str, tuple[list[nn.Module], str]] = {
    "nothing before": ([nn.ReLU(), Pop("a")], "layer '1', Pop('a'), must have its own Stash('a') before it"),
    "another name": (
        [Stash("b"), Pop("a"), Pop("b")],
        "layer '1', Pop('a'), must have its own Stash('a') before it",
    ),
    "behind it": ([Pop("a"), Stash("a")], "layer '0', Pop('a'), must have its own Stash('a') before it"),
    "popped already": (
        [Stash("a"), Pop("a"), Pop("a")],
        "layer '2', Pop('a'), must have its own Stash('a') before it",
    ),
    "never popped": ([Stash("a"), nn.ReLU()], "layer '0', Stash('a'), has no Pop('a') after it"),
    "stashed again": ([Stash("a"), Pop("a"), Stash("a")], "layer '2', Stash('a'), has no Pop('a') after it"),
    "stashed twice": (
        [Stash("a"), Stash("a"), Pop("a")],
        "layer '1', Stash('a'), repeats the Stash in layer '0' without",
    ),
    "nested": (
        [nn.Sequential(nn.ReLU(), Stash("a")), nn.ReLU()],
        "layer '0.1', Stash('a'), has no Pop('a') after it",
    ),
}


@pytest.mark.parametrize(("layers", "message"), WRONG.values(), ids=WRONG)
def test_unpaired_stash_or_pop_raises_at_once(layers: list[nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^Sequential: {re.escape(message)}"):
        Sequential(layers)


def test_stash_and_pop_inside_user_layers_work() -> None:
    x = torch.full((2, 1), 3.0)
    hidden_stash = nn.Sequential(Block(Stash("a")), nn.Sequential(nn.Hardtanh(0, 1), Pop("a")))
    hidden_pop = nn.Sequential(nn.Sequential(Stash("a"), nn.Hardtanh(0, 1)), Block(Pop("a")))
    hidden_pair = nn.Sequential(
        Stash("a"), Block(nn.Sequential(Stash("b"), Pop("b"), nn.Hardtanh(0, 0.5))), Pop("a")
    )
    for module in (hidden_stash, hidden_pop, hidden_pair):
        with Sequential(module, 2) as pipe:
            assert torch.equal(pipe(x), module(x))


def test_stash_rejects_a_tuple() -> None:
    with pytest.raises(TypeError, match=r"Stash\('a'\): x must be a tensor or None, got an object of"):
        Stash("a")((torch.ones(1),))


def test_threads_have_separate_skip_stores() -> None:
    seen: list[Any] = []

    def alone() -> None:
        try:
            Pop("mine")(torch.ones(1))
        except RuntimeError as error:
            seen.append(error)

    Stash("mine")(torch.ones(1))
    other = threading.Thread(target=alone)
    other.start()
    other.join()
    assert len(seen) == 1
    assert Pop("mine")(torch.ones(1)).item() == 2


def test_repr_shows_the_skip_name() -> None:
    assert repr(nn.Sequential(Stash("a"), Pop("a"))) == "Sequential(\n  (0): Stash('a')\n  (1): Pop('a')\n)"


class Aside(nn.Module):
    """Layer that stashes ``None`` and returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.stash = Stash("nothing")

    def forward(self, x: Tensor) -> Tensor:
        assert self.stash(None) is None
        return x


def first(x: Tensor, stashed: Any) -> Tensor:
    """Assert that the stashed value is ``None``."""
    assert stashed is None
    return 2 * x


@on_both_placements
def test_stash_accepts_none(on: Any) -> None:
    module = nn.Sequential(Aside(), nn.Linear(6, 6), nn.Identity(), Pop("nothing", first))
    x = torch.randn(8, 6)
    with Sequential(module, 4, on=on, chunks=2) as pipe:
        y = pipe(x)
        torch.testing.assert_close(y, module(x))
        y.sum().backward()
        with torch.no_grad():
            torch.testing.assert_close(pipe(x), module(x))
