"""Test ``Sequential`` with the cases from ``test_gpipe.py`` in torchgpipe 0.0.7.

``Sequential(module, parts=balance, chunks=n)`` corresponds to ``GPipe(module, balance, chunks=n)``. Each test
has the name of the original test but none of its code. A pipe's results are in
``test_torchgpipe_results.py``; balance and skips are in ``test_torchgpipe_balance.py``.

The following cases differ from the originals:

``test_public_attrs``
    ``parts`` holds ``balance`` and ``devices``; numbers must not be strings, and they are checked.
``test_too_few_devices``, ``test_devices``
    ``devices`` must have one entry for each part; otherwise ``ValueError`` is raised.
``test_checkpoint_mode``, ``test_checkpoint_mode_when_chunks_1``
    ``recompute=`` is always or never.
``test_checkpoint_eval``
    The stored activations do not depend on the mode; without a graph, nothing is stored.
``test_exception``, ``test_exception_no_hang``
    A ``StageError`` names the part and the micro-batch; the original exception is its cause.
``test_input_varargs``
    Several arguments go to the first layer, which may reject them.
``test_deny_moving``
    The parts share the module's tensors: their types and values may change, but not their devices.
``test_named_children``
    Layers keep their names.
``test_verify_module_non_sequential``, ``test_verify_module_duplicate_*``
    These modules are valid.

The following cases are left out:

``test_exception_early_stop_asap``
    When a part fails, it is not specified how far the other parts get.
``test_recommend_auto_balance``
    By default, layers are measured to balance the parts.
``test_tuple_wait``, ``test_copy``, ``test_stream``
    They test CUDA streams; a part has one stream.
``test_phony``, ``test_dependency``, ``test_pipeline``, ``test_worker``, ``test_microbatch``
    They test internals of torchgpipe.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowchan import StageError
from flowchan.pipelines import Sequential

pytestmark = [
    pytest.mark.usefixtures("one_compute_thread"),
    pytest.mark.filterwarnings("ignore:Sequential. with .* parts:RuntimeWarning"),
]

recomputing = pytest.mark.parametrize("recompute", [False, True], ids=["never", "always"])


class Wrong(Exception):
    pass


class Pass(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


class Raises(nn.Module):
    def forward(self, *_: Any) -> Tensor:
        raise Wrong


def one_layer() -> nn.Sequential:
    return nn.Sequential(nn.Linear(1, 1))


def gradients(module: nn.Module) -> list[Tensor]:
    found = []
    for one in module.parameters():
        assert one.grad is not None
        found.append(one.grad)
    return found


def assert_like(module: nn.Module, twin: nn.Module, *inputs: Tensor, **options: Any) -> None:
    """Check that a pipe around the module gives the same outputs and gradients as the module's twin."""
    theirs = [one.detach().clone().requires_grad_() for one in inputs]
    with Sequential(module, **options) as pipe:
        y = pipe(*inputs) if len(inputs) == 1 else pipe(inputs)
        y.mean().backward()
    expected = twin(*theirs) if len(inputs) == 1 else twin(theirs)
    expected.mean().backward()
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(gradients(module), gradients(twin))
    for one, other in zip(inputs, theirs, strict=True):
        assert not one.requires_grad or torch.allclose(one.grad, other.grad)  # type: ignore[arg-type]


# --- test_gpipe.py ---


def test_parameters() -> None:
    module = one_layer()
    assert list(Sequential(module, [1]).parameters()) == list(module.parameters()) != []


def test_public_attrs() -> None:
    pipe = Sequential(one_layer(), (1,), devices=("cpu",), chunks=42)
    assert [(len(part.module), part.device) for part in pipe.parts] == [(1, torch.device("cpu"))]
    assert pipe.chunks == 42
    with pytest.raises(TypeError, match="chunks"):
        Sequential(one_layer(), [1], chunks=42.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("balance", [[2], [1, 1]])
def test_sequential_like(balance: list[int]) -> None:
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    pipe = Sequential(nn.Sequential(first, second), balance)
    assert len(pipe) == 2
    assert list(pipe) == [first, second]
    assert (pipe[0], pipe[1], pipe[-1], pipe[-2]) == (first, second, second, first)
    with pytest.raises(IndexError):
        pipe[2]


@pytest.mark.parametrize("balance", [[1], [3]])
def test_balance_wrong_length(balance: list[int]) -> None:
    with pytest.raises(ValueError, match="parts"):
        Sequential([nn.Linear(1, 1), nn.Linear(1, 1)], balance)


@pytest.mark.parametrize("balance", [[0, 2], [-1, 3]])
def test_balance_less_than_1(balance: list[int]) -> None:
    with pytest.raises(ValueError, match="parts"):
        Sequential([nn.Linear(1, 1), nn.Linear(1, 1)], balance)


@pytest.mark.parametrize("chunks", [0, -1])
def test_chunks_less_than_1(chunks: int) -> None:
    with pytest.raises(ValueError, match="chunks"):
        Sequential(one_layer(), [1], chunks=chunks)


def test_too_few_devices() -> None:
    with pytest.raises(ValueError, match="devices"):
        Sequential([nn.Linear(1, 1) for _ in range(4)], [1, 1, 1, 1], devices=["cpu"])


@pytest.mark.parametrize("size", [7, 2], ids=["indivisible", "small"])
def test_batch_size_indivisible_and_small(size: int) -> None:
    with Sequential(one_layer(), [1], chunks=4) as pipe, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pipe(torch.rand(size, 1)).shape == (size, 1)


class Counts(nn.Module):
    """A layer that counts its forward calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 2


@recomputing
@pytest.mark.parametrize("chunks", [1, 2])
def test_checkpoint_mode_and_when_chunks_1(recompute: bool, chunks: int) -> None:
    counts = Counts()
    with Sequential([nn.Linear(1, 1), counts], [2], chunks=chunks, recompute=recompute) as pipe:
        y = pipe(torch.rand(2, 1))
        before = counts.calls
        y.sum().backward()
    assert (before, counts.calls) == (chunks, 2 * chunks if recompute else chunks)


def test_checkpoint_mode_invalid() -> None:
    with pytest.raises(TypeError, match="recompute"):
        Sequential(one_layer(), [1], recompute="INVALID_CHECKPOINT")  # type: ignore[arg-type]


def test_checkpoint_eval() -> None:
    counts = Counts()
    with Sequential([nn.Linear(1, 1), counts], [2], chunks=2, recompute=True).eval() as pipe:
        with torch.no_grad():
            pipe(torch.rand(2, 1))
        assert counts.calls == 2


def test_no_grad() -> None:
    seen: list[Tensor] = []

    def see(module: nn.Module, x: Any, y: Tensor) -> None:
        if not y.is_meta:
            seen.append(y)

    with Sequential(one_layer(), [1], chunks=2) as pipe, torch.no_grad():
        pipe[0].register_forward_hook(see)
        assert pipe(torch.rand(2, 1)).grad_fn is None
    assert [y.grad_fn for y in seen] == [None, None]


@pytest.mark.parametrize("layers", [[Raises()], [Pass(), Pass(), Raises()]], ids=["", "no_hang"])
def test_exception_and_exception_no_hang(layers: list[nn.Module]) -> None:
    with Sequential(layers, len(layers), chunks=3) as pipe, pytest.raises(StageError) as caught:
        pipe(torch.rand(3))
    assert isinstance(caught.value.__cause__, Wrong)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, both: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        first, second = both
        return self.a(first), self.b(second)


def test_input_pair() -> None:
    first, second = torch.rand(10, 1, requires_grad=True), torch.rand(10, 1, requires_grad=True)
    with Sequential([Two()], [1], chunks=2) as pipe:
        y, z = pipe((first, second))
        (y + z).mean().backward()
    assert first.grad is not None
    assert second.grad is not None


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(1, 1)

    def forward(self, only: tuple[Tensor]) -> tuple[Tensor]:
        (x,) = only
        return (self.a(x),)


def test_input_singleton() -> None:
    x = torch.rand(10, 1, requires_grad=True)
    with Sequential([One()], [1], chunks=2) as pipe:
        (y,) = pipe((x,))
        y.mean().backward()
        gradients(pipe)
    assert x.grad is not None


def test_input_varargs() -> None:
    with Sequential(one_layer(), [1]) as pipe, pytest.raises((TypeError, StageError)):
        pipe(torch.rand(1, 1), torch.rand(1, 1))


class Hello(nn.Module):
    def __init__(self, beside: bool = False) -> None:
        super().__init__()
        self.beside = beside

    def forward(self, x: Tensor) -> Any:
        return (x, "hello") if self.beside else "hello"


@pytest.mark.parametrize("beside", [False, True], ids=["", "tuple"])
def test_non_tensor_and_non_tensor_tuple(beside: bool) -> None:
    x = torch.rand(1)
    with Sequential([Hello(beside)], [1]) as pipe:
        with pytest.raises((TypeError, StageError), match=r"hello|str"):
            pipe(x)
        with pytest.raises(TypeError, match=r"hello|str"):
            pipe((x, "hello") if beside else "hello")


@recomputing
@pytest.mark.parametrize("chunks", [1, 2])
def test_deferred_batch_norm_and_params(recompute: bool, chunks: int) -> None:
    plain = nn.Sequential(nn.BatchNorm2d(3))
    module = copy.deepcopy(plain)
    x = torch.rand(4, 3, 10, 10)
    with Sequential(module, [1], chunks=chunks, recompute=recompute) as pipe:
        pipe(x).mean().backward()
    plain(x).mean().backward()
    torch.testing.assert_close(module.state_dict(), plain.state_dict())
    if chunks == 1:
        torch.testing.assert_close(gradients(module), gradients(plain))


def test_devices() -> None:
    with pytest.raises(ValueError, match="devices"):
        Sequential([nn.Linear(1, 1) for _ in range(3)], [1, 1, 1], devices=["cpu"] * 5)
    pipe = Sequential([nn.Linear(1, 1) for _ in range(3)], [1, 1, 1], devices=["cpu"] * 3)
    assert [part.device for part in pipe.parts] == [torch.device("cpu")] * 3


def test_partitions() -> None:
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    pipe = Sequential([first, second], [1, 1])
    assert [list(part.module) for part in pipe.parts] == [[first], [second]]


def test_deny_moving() -> None:
    module = one_layer()
    pipe = Sequential(module, [1])
    assert pipe.double() is pipe
    assert module[0].weight.dtype is torch.float64


def test_empty_module() -> None:
    with pytest.raises((TypeError, ValueError), match="layer"):
        Sequential(nn.Sequential(), [])


def test_named_children() -> None:
    layers = {"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}
    module = nn.Sequential()
    for name, layer in layers.items():
        module.add_module(name, layer)
    pipe = Sequential(module, [1, 1])
    assert dict(pipe.named_children()) == layers
    assert set(pipe.state_dict()) == {"a.weight", "a.bias", "b.weight", "b.bias"}
    assert pipe.a is layers["a"]


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.a(x).tanh())  # type: ignore[no-any-return]


def test_verify_module_non_sequential() -> None:
    module = Adds()
    assert_like(module, copy.deepcopy(module), torch.rand(4, 2), parts=["b"], chunks=2)


@pytest.mark.parametrize("parameters", [False, True], ids=["children", "parameters_in_distinct_children"])
def test_verify_module_duplicate(parameters: bool) -> None:
    first = nn.Linear(2, 2)
    second = nn.Linear(2, 2) if parameters else first
    second.weight = first.weight
    module = nn.Sequential(first, nn.Tanh(), second)
    assert_like(module, copy.deepcopy(module), torch.rand(4, 2), parts=[2, 1], chunks=2)
