"""Test that modules with their own ``forward`` are traced and cut, and then behave like the plain module."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import GPT, ResNet18
from plain import on_both_placements
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam

from flowchan.pipelines import Sequential
from flowchan.pipelines.sequential.engine.execution import may_draw


def image_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 32, 32, generator=generator), torch.randint(5, (4,), generator=generator)


def text_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(17, (4, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def language_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


MODELS: dict[str, tuple[Callable[[], nn.Module], Any, Any, list[str]]] = {
    "resnet": (ResNet18, image_batch, functional.cross_entropy, ["layer2.0.conv2", "layer4"]),
    "gpt": (GPT, text_batch, language_loss, ["blocks.1", "blocks.2.mlp"]),
}
models = pytest.mark.parametrize("name", MODELS)


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]().double()


def batch(name: str, seed: int = 1) -> tuple[Tensor, Tensor]:
    x, target = MODELS[name][1](torch.Generator().manual_seed(seed))
    return (x.double() if x.is_floating_point() else x), target


def assert_near(module: nn.Module, plain: nn.Module) -> None:
    assert list(module.state_dict()) == list(plain.state_dict())
    for (name, one), other in zip(module.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(
            one, other, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
        )


# --- models ---


@on_both_placements
@models
def test_traced_model_trains_like_the_plain_model(name: str, on: Any) -> None:
    """Use one micro-batch (for batch norm), cuts inside residual connections, and an external optimizer."""
    module, plain = made(name), made(name)
    loss, names = MODELS[name][2:]
    optimizers = [Adam(one.parameters(), lr=0.01) for one in (module, plain)]
    with Sequential(module, names, on=on, chunks=1) as pipe:
        for step in range(10):
            x, target = batch(name, step)
            for one, optimizer in zip((pipe, plain), optimizers, strict=True):
                optimizer.zero_grad()
                loss(one(x), target).backward()
                optimizer.step()
    assert_near(module, plain)


@on_both_placements
@pytest.mark.parametrize("schedule", ["1f1b", "zbh1"])
def test_traced_model_trains_step_by_step(schedule: Any, on: Any) -> None:
    module, plain = made("gpt"), made("gpt")
    loss = language_loss
    optimizer = SGD(plain.parameters(), lr=0.1)
    pipe = Sequential(module, MODELS["gpt"][3], on=on, chunks=4)
    with pipe.trainer(loss=loss, optimizer=lambda own: SGD(own, lr=0.1), schedule=schedule) as training:
        for step in range(10):
            x, target = batch("gpt", step)
            training.step(x, target)
            optimizer.zero_grad()
            loss(plain(x), target).backward()
            optimizer.step()
        torch.testing.assert_close(training.evaluate(x), plain.eval()(x).detach())
    assert_near(module, plain)


@models
def test_traced_model_cut_by_balance_matches_the_plain_model(name: str) -> None:
    module = made(name).eval()
    x, _ = batch(name)
    with Sequential(module, 3, chunks=2) as pipe, torch.no_grad():
        torch.testing.assert_close(pipe(x), module(x))
        assert [y.shape for y in pipe.stream([x, x[:1]])] == [module(x).shape, module(x[:1]).shape]
        assert len(pipe.parts) == 3
    by_memory = Sequential(module, 2, chunks=2, balance="memory", sample=x)
    assert sum(len(part.module) for part in by_memory.parts) == len(by_memory)


@models
def test_traced_pipe_shares_the_state_of_its_module(name: str) -> None:
    module = made(name)
    pipe = Sequential(module, 2)
    assert pipe.module is module
    assert list(pipe.state_dict()) == list(module.state_dict())
    assert [id(one) for one in pipe.parameters()] == [id(one) for one in module.parameters()]
    pipe.eval()
    assert not any(one.training for one in module.modules())
    x, _ = batch(name)
    with torch.no_grad():
        expected = module(x)
        for other in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
            with other:
                torch.testing.assert_close(other(x), expected)
        pipe.float()
        x = x.float() if x.is_floating_point() else x
        with pipe:
            torch.testing.assert_close(pipe(x), module(x))
    assert sorted(vars(module)) == sorted(vars(MODELS[name][0]()))


@models
def test_may_draw_is_false_for_traced_parts_without_randomness(name: str) -> None:
    parts = Sequential(made(name), MODELS[name][3]).parts
    assert [may_draw(part.module) for part in parts] == [
        name == "gpt",
        False,
        False,
    ]  # the first part begins with dropout


def test_parts_can_be_named_in_a_plain_sequential() -> None:
    module = nn.Sequential(*(nn.Linear(3, 3) for _ in range(5)))
    assert [len(part.module) for part in Sequential(module, ["1", "4"]).parts] == [1, 3, 1]


# --- operations of forward ---


class Own(nn.Module):
    """Module that has two layers and runs a given function as its ``forward``."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


class Chosen(nn.Module):
    """Layer that branches on values."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x * 3


class ByMode(nn.Module):
    """Layer that reads ``training`` directly."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (2 if self.training else 3)


class Noisy(nn.Module):
    """Layer that draws random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * torch.rand(4)


def structures(self: Any, x: Any) -> Any:
    left, right = x["left"], x["right"][0]
    y = self.one(left) * self.scale
    return {"out": [self.two(y + right), y], "none": None}


def in_place(self: Any, x: Tensor) -> Tensor:
    y = self.one(x)
    kept = y * 2
    y += 1
    return self.two(y) + kept


FORWARDS: dict[str, Any] = {
    "residual": lambda self, x: self.two(self.one(x).relu() + x) + x,
    "twice": lambda self, x: self.two(self.one(self.two(self.one(x)))),
    "sizes": lambda self, x: self.two(self.one(x).view(x.shape[0], -1)) + torch.ones(x.size(0), 1),
    "constant": lambda self, x: self.two(self.one(x) + torch.arange(4.0)) @ torch.eye(4),
    "slices": lambda self, x: torch.cat([self.two(self.one(x)[:, :]), x[..., :2]], dim=1),
    "in place": in_place,
    "unused": lambda self, x: (self.one(x), self.two(x))[1],
}


@pytest.mark.parametrize("name", FORWARDS)
def test_operations_between_layers_run_in_their_parts(name: str) -> None:
    torch.manual_seed(0)
    module = Own(FORWARDS[name])
    x = torch.randn(6, 4)
    plain = copy.deepcopy(module)
    expected = plain(x.clone())
    expected.square().sum().backward()
    with Sequential(module, 2, chunks=3) as pipe:
        y = pipe(x.clone())
        torch.testing.assert_close(y, expected)
        y.square().sum().backward()
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_traced_inputs_and_outputs_can_be_nested() -> None:
    module = Own(structures)
    x = {"left": torch.randn(6, 4), "right": [torch.randn(6, 4)]}
    with Sequential(module, 2, chunks=3) as pipe:
        torch.testing.assert_close(pipe(x), module(x))


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor, scale: float = 2.0) -> Tensor:
        return self.two(self.one(x) + y) * scale


def test_traced_pipe_accepts_only_required_arguments() -> None:
    module, x, y = Several(), torch.randn(6, 4), torch.randn(6, 4)
    with Sequential(module, 2, chunks=2) as pipe:
        torch.testing.assert_close(pipe(x, y=y), module(x, y))
        torch.testing.assert_close(pipe(x, y), module(x, y))
        with pytest.raises(Exception, match="must be called with exactly the arguments x, y; pass these"):
            pipe(x)


@pytest.mark.parametrize("layer", [Chosen, ByMode, Noisy])
def test_layer_that_cannot_be_traced_is_not_split(layer: Any) -> None:
    torch.manual_seed(0)
    inner = layer()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.inner, self.two = nn.Linear(4, 4), inner, nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.inner(self.one(x))) + x  # type: ignore[no-any-return]

    module, x = Outer(), torch.randn(6, 4)
    with Sequential(module, ["two"], chunks=1) as pipe:
        for mode in (True, False):
            module.train(mode)
            torch.testing.assert_close(pipe(x), module(x))


# --- unsupported modules ---


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (
            lambda self, x: self.two(x) if x.sum() > 0 else self.one(x),
            TypeError,
            "forward of Own cannot be traced",
        ),
        (
            lambda self, x: self.two(self.one(x)) * (1 + self.training),
            TypeError,
            "operations differ between calls or modes",
        ),
        (
            lambda self, x: self.two(self.one(x)) + torch.rand(4),
            TypeError,
            "operations differ between calls or modes",
        ),
        (lambda self, x: x, ValueError, "module must have at least one layer"),
    ],
)
def test_forward_that_cannot_be_traced_raises_with_the_remedy(
    function: Any, error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        Sequential(Own(function), 2)


def test_incomplete_trace_raises_with_the_first_batch() -> None:
    module = Own(lambda self, x: self.two(self.one(x)) if isinstance(x, Tensor) else self.one(self.two(x)))
    with (
        pytest.raises(ValueError, match="and the module itself give different outputs"),
        Sequential(module, 2) as pipe,
    ):
        pipe(torch.randn(6, 4))
    with (
        pytest.raises(ValueError, match="and the module itself give different outputs"),
        Sequential(module, 2).trainer(loss=functional.mse_loss) as training,
    ):
        training.step(torch.randn(6, 4), torch.randn(6, 4))


@pytest.mark.parametrize("names", [["layer5"], ["layer2", "nothing"]])
def test_unknown_layer_name_raises_with_the_known_names(names: list[str]) -> None:
    with pytest.raises(ValueError, match=r"parts must name layers that forward\(\) calls \('conv1', 'bn1'"):
        Sequential(ResNet18(), names)


@pytest.mark.parametrize("names", [["layer3", "layer2"], ["layer2", "layer2"], ["conv1"]])
def test_names_out_of_order_raise(names: list[str]) -> None:
    with pytest.raises(
        ValueError, match="must name layers in the order in which they run, excluding the first"
    ):
        Sequential(ResNet18(), names)


@pytest.mark.parametrize("names", [["3", "2"], ["2", "2"], ["0"]])
def test_names_out_of_order_in_a_sequential_raise(names: list[str]) -> None:
    with pytest.raises(ValueError, match="must name layers in the module's order, excluding the first"):
        Sequential(nn.Sequential(*(nn.Linear(3, 3) for _ in range(5))), names)


def test_layer_replaced_after_tracing_raises() -> None:
    module = Own(FORWARDS["residual"])
    with Sequential(module, 2) as pipe:
        pipe(torch.randn(6, 4))
        module.two = nn.Linear(4, 4)
        with pytest.raises(RuntimeError, match="has changed since it was traced"):
            pipe(torch.randn(6, 4))


def test_hooks_of_traced_modules_raise() -> None:
    module = ResNet18()
    module.layer1.register_forward_hook(lambda *_: None)
    with pytest.raises(
        ValueError, match="layer Sequential of module has forward hooks, which the parts would not call"
    ):
        Sequential(module, 2)


def test_other_threads_can_use_modules_during_tracing() -> None:
    other, x, stop, found = (
        nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
        torch.randn(2, 4),
        threading.Event(),
        [],
    )

    def use() -> None:
        while not stop.is_set():
            found.append(other(x))

    thread = threading.Thread(target=use)
    thread.start()
    try:
        for _ in range(3):
            Sequential(GPT(), 2)
    finally:
        stop.set()
        thread.join()
    assert all(type(y) is Tensor for y in found)
