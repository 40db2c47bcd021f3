"""What torchgpipe 0.0.7 tests, asked of ``Sequential``: ``GPipe(module, balance, chunks=n)`` is
``Sequential(module, parts=balance, chunks=n)``. Each test has the name it has there, and none of its code.
Its tests of balance and skips are in ``test_torchgpipe_balance.py``.

Spelled differently, as the test says:

``test_public_attrs``
    ``balance`` and ``devices`` are in ``parts``; numbers are no texts, and checked.
``test_too_few_devices``, ``test_devices``
    As many devices as parts, else a ``ValueError``.
``test_checkpoint_mode``, ``test_checkpoint_mode_when_chunks_1``
    ``recompute=``, always or never.
``test_checkpoint_eval``
    What is kept does not depend on the mode: without a graph nothing is.
``test_exception``, ``test_exception_no_hang``
    A ``StageError`` names part and micro-batch; theirs is its cause.
``test_input_varargs``
    Several arguments are the first layer's, which may refuse them.
``test_deny_moving``
    The parts' tensors are the module's: types and values may change, not devices.
``test_named_children``
    Layers keep their names.
``test_verify_module_non_sequential``, ``test_verify_module_duplicate_*``
    Are no errors.
``test_inplace_*``
    What comes in is not changed, so all three give what the plain module gives.

Left out:

``test_exception_early_stop_asap``
    How much the other parts have done when one fails is not promised.
``test_recommend_auto_balance``
    Where to cut is measured if it is not said.
``test_convert_deferred_batch_norm``, ``test_optimize``
    No layer is replaced by another kind.
``test_detect_checkpointing_recomputing*``
    A layer is not told that it is called again.
``test_tuple_wait``, ``test_copy``, ``test_stream``
    Are about streams of CUDA; a part has one.
``test_phony``, ``test_dependency``, ``test_pipeline``, ``test_worker``, ``test_microbatch``
    Test inner parts of theirs.
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
    pytest.mark.filterwarnings("ignore:Sequential. in .* parts:RuntimeWarning"),
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
    """A pipe of the module and its twin give the same, with the same gradients."""
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


# test_gpipe.py


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
    """How often it goes forward."""

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


# test_bugs.py


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Applies(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Identity.apply(x)  # type: ignore[no-any-return,no-untyped-call]


def test_python_autograd_function() -> None:
    x = torch.rand(42, requires_grad=True)
    with Sequential([Applies(), Applies()], [1, 1], recompute=True) as pipe:
        y = pipe(x)
        y.sum().backward()
    torch.testing.assert_close(y, x)
    torch.testing.assert_close(x.grad, torch.ones(42))


def test_parallel_randoms() -> None:
    """What is dropped going back is what was dropped going forward."""
    torch.manual_seed(0)
    x = torch.ones(100, 10, requires_grad=True)
    with Sequential([nn.Dropout(), nn.Dropout()], [1, 1], chunks=10, recompute=True) as pipe:
        y = pipe(x)
        y.norm().backward()
    assert x.grad is not None
    assert torch.equal(y == 0, x.grad == 0)


# test_inplace.py


@pytest.mark.parametrize("name", ["on_requires_grad", "on_not_requires_grad"])
def test_inplace(name: str) -> None:
    module = nn.Sequential(nn.ReLU(inplace=True))
    if name == "on_requires_grad":
        module.insert(0, nn.Linear(1, 1))
    x, twin = torch.rand(6, 1) - 0.5, copy.deepcopy(module)
    kept = x.clone()
    with Sequential(module, len(module), recompute=True, chunks=2) as pipe:
        torch.testing.assert_close(pipe(x), twin(x.clone()))
    assert torch.equal(x, kept)


class AddsInPlace(nn.Module):
    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        first, second = both
        second.add_(1)
        return first * second


def test_inplace_incorrect_grad() -> None:
    """There it is 3, as the addition is done again."""
    first, second = torch.tensor([1.0], requires_grad=True), torch.tensor([1.0])
    with Sequential([AddsInPlace()], [1], recompute=True) as pipe:
        pipe((first, second)).backward()
    assert first.grad is not None
    assert (first.grad.item(), second.item()) == (2, 1)


# test_transparency.py, test_checkpoint.py


@recomputing
def test_simple_linears(recompute: bool) -> None:
    module = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 4), nn.Linear(4, 2), nn.Linear(2, 1))
    twin = copy.deepcopy(module)
    assert_like(module, twin, torch.rand(8, 1), parts=[2, 2], chunks=4, recompute=recompute)


class Logs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, log: list[str]) -> Tensor:
        ctx.name, ctx.log = name, log
        log.append(f"{name}:forward")
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        ctx.log.append(f"{ctx.name}:backward")
        return gradient, None, None


class LogsItself(nn.Module):
    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__()
        self.name, self.log = name, log

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "meta":
            return x
        return Logs.apply(x, self.name, self.log)  # type: ignore[no-any-return,no-untyped-call]


def test_serial_checkpoints() -> None:
    log: list[str] = []
    layers = [LogsItself("a", log), LogsItself("b", log)]
    with Sequential(layers, [1, 1], chunks=1, recompute=True) as pipe:
        pipe(torch.rand(1, requires_grad=True)).backward()
    # the last part goes back at once, and keeps what it has
    assert log in (
        ["a:forward", "b:forward", "b:forward", "b:backward", "a:forward", "a:backward"],
        ["a:forward", "b:forward", "b:backward", "a:forward", "a:backward"],
    )


def test_not_requires_grad_and_with_parameter() -> None:
    with Sequential([nn.Tanh()], [1], recompute=True) as pipe:
        assert not pipe(torch.rand(1)).requires_grad
    with Sequential(one_layer(), [1], recompute=True) as pipe:
        pipe(torch.rand(1, 1)).backward()
        gradients(pipe)


@recomputing
def test_random_in_checkpoint(recompute: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 3, requires_grad=True)
    with Sequential([nn.Dropout(p=0.5)], [1], chunks=1, recompute=recompute) as pipe:
        y = pipe(x)
        y.norm().backward()
    assert x.grad is not None
    assert torch.equal(y == 0, x.grad == 0)


# test_deferred_batch_norm.py


def tilted() -> Tensor:
    x = torch.rand(16, 3, 8, 8)
    x *= torch.tensor([1.0, 10.0, 100.0]).view(1, 3, 1, 1)
    return x + 2.0 ** torch.arange(16).view(16, 1, 1, 1) / 100


def plainly(module: nn.Module, x: Tensor, chunks: int) -> Tensor:
    return torch.cat([module(piece) for piece in x.tensor_split(chunks)])


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("wanted", [True, False])
def test_transparency_and_input_requiring_grad(chunks: int, wanted: bool) -> None:
    plain = nn.Sequential(nn.BatchNorm2d(3))
    module, x = copy.deepcopy(plain), tilted().requires_grad_(wanted)
    other = x.detach().clone().requires_grad_(wanted)
    with Sequential(module, [1], chunks=chunks) as pipe:
        y = pipe(x)
        y.mean().backward()
    expected = plainly(plain, other, chunks)
    expected.mean().backward()
    torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(gradients(module), gradients(plain), atol=1e-4, rtol=1e-4)
    if wanted:
        torch.testing.assert_close(x.grad, other.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_stats(momentum: float | None) -> None:
    plain = nn.Sequential(nn.BatchNorm2d(3, momentum=momentum))
    module, x = copy.deepcopy(plain), tilted()
    with Sequential(module, [1], chunks=4) as pipe:
        pipe(x)
    plain(x)
    torch.testing.assert_close(module.state_dict(), plain.state_dict(), atol=1e-4, rtol=1e-4)


def test_eval() -> None:
    plain = nn.Sequential(nn.BatchNorm2d(3)).train()
    plain(tilted())
    module, x = copy.deepcopy(plain.eval()), tilted()
    with Sequential(module, [1], chunks=4) as pipe:
        torch.testing.assert_close(pipe(x), plain(x))
    torch.testing.assert_close(module.state_dict(), plain.state_dict())


def test_conv_bn() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)).double()
    module, x = copy.deepcopy(plain), tilted().double()
    with Sequential(module, [1, 1], chunks=4) as pipe:
        pipe(x).square().mean().backward()
    plainly(plain, x, 4).square().mean().backward()
    torch.testing.assert_close(gradients(module), gradients(plain))
