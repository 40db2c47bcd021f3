"""Test that a pipe is an ``nn.Module`` with the plain module's layers, parameters and state."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import signal
from typing import Any

import pytest
import torch
from plain import conv, dense, on_both_placements
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.functional import cross_entropy
from trained import batches, in_parts, perceptron

from flowchan import RunError, StageError, WorkerDied
from flowchan.pipelines import Sequential


class Larger(nn.Module):
    """Model that contains a pipe."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))  # type: ignore[no-any-return]


@on_both_placements
def test_names_parameters_buffers_and_state_match_the_plain_module(on: Any) -> None:
    module = conv()
    with Sequential(module, 3, on=on) as pipe:
        assert isinstance(pipe, nn.Module)
        assert [name for name, _ in pipe.named_parameters()] == [
            name for name, _ in module.named_parameters()
        ]
        assert all(map(Tensor.is_set_to, pipe.parameters(), module.parameters()))
        assert [id(one) for one in pipe.buffers()] == [id(one) for one in module.buffers()]
        assert list(pipe.state_dict()) == list(module.state_dict())
        assert list(Larger(pipe).state_dict()) == list(Larger(module).state_dict())
        assert [*pipe.children()] == [*module.children()]
        assert len(pipe) == len(module)
        assert [*pipe] == [*module]
        assert pipe[-1] is module[-1]
        assert [*pipe[2:4]] == [*module[2:4]]


def test_pipe_in_a_model_is_trained_and_saved_with_it() -> None:
    torch.manual_seed(1)
    larger = Larger(Sequential(dense().train()))
    plain = Larger(dense().train())
    plain.load_state_dict(larger.state_dict())
    x, target = torch.randn(8, 6), torch.randint(2, (8,))
    for model in (larger, plain):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        cross_entropy(model(x), target).backward()
        optimizer.step()
    torch.testing.assert_close(dict(larger.state_dict()), dict(plain.state_dict()))
    larger.inner.close()  # type: ignore[operator]


@on_both_placements
def test_training_mode_is_shared_with_the_plain_module(on: Any) -> None:
    module = conv()
    x = torch.randn(12, 1, 8, 8)
    with Sequential(module, 2, on=on, chunks=2) as pipe:
        assert not pipe.training
        whole = nn.Sequential(pipe)
        whole.train()
        assert module.training
        assert all(layer.training for layer in module)
        assert not torch.equal(pipe(x), pipe(x))  # the module has dropout
        module.eval()
        assert not pipe.training
        torch.testing.assert_close(pipe(x), module(x))
        torch.testing.assert_close(pipe(x), pipe(x))


@on_both_placements
def test_dtype_changes_apply_to_the_parts(on: Any) -> None:
    module = dense()
    x = torch.randn(8, 6)
    with Sequential(module, 2, on=on, chunks=2) as pipe:
        pipe(x)
        nn.Sequential(pipe).double()
        assert module[0].weight.dtype == torch.float64
        y = pipe(x.double())
        torch.testing.assert_close(y, module(x.double()))
        y.sum().backward()
        assert module[0].weight.grad.dtype == torch.float64
        with torch.no_grad():
            torch.testing.assert_close(pipe(x.double()), module(x.double()))


@on_both_placements
@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize("variant", ["deepcopy", "pickle", "torch.save"])
def test_copy_is_an_independent_pipe(on: Any, runs: bool, variant: str) -> None:
    x = torch.randn(8, 6)
    with Sequential(dense(), [2, 3], on=on, chunks=2) as pipe:
        expected = pipe(x).detach() if runs else pipe.module(x).detach()
        if variant == "deepcopy":
            other = copy.deepcopy(pipe)
        elif variant == "pickle":
            other = pickle.loads(pickle.dumps(pipe))
        else:
            torch.save(pipe, file := io.BytesIO())
            file.seek(0)
            other = torch.load(file, weights_only=False)
        with torch.no_grad():
            for parameter in pipe.parameters():
                parameter.zero_()
    with other:
        assert other.module._modules is other._modules
        assert repr(other) == repr(pipe)
        torch.testing.assert_close(other(x).detach(), expected)
        other(x).sum().backward()
        assert all(parameter.grad is not None for parameter in other.parameters())
    assert all(parameter.grad is None for parameter in pipe.parameters())


@on_both_placements
def test_copy_of_a_running_pipe_shares_no_memory(on: Any) -> None:
    with Sequential(dense(), on=on, chunks=2) as pipe:
        pipe(torch.randn(8, 6))
        twin = copy.deepcopy(pipe.module)
        before = copy.deepcopy(dict(twin.state_dict()))
        with torch.no_grad():
            for parameter in pipe.parameters():
                parameter.zero_()
        torch.testing.assert_close(dict(twin.state_dict()), before)


@on_both_placements
def test_replaced_layers_work_and_added_layers_raise(on: Any) -> None:
    x = torch.randn(8, 6)
    with Sequential(dense(), 2, on=on, chunks=2) as pipe:
        pipe(x)
        for gradients in (True, False):
            with torch.set_grad_enabled(gradients):
                pipe[2] = nn.Linear(16, 16)
                torch.testing.assert_close(pipe(x), pipe.module(x))
                setattr(pipe, "4", nn.Linear(16, 2))
                torch.testing.assert_close(pipe(x), pipe.module(x))
        pipe.module.append(nn.ReLU())
        with pytest.raises(
            ValueError, match=r"the module must still have the 5 layers .*, got 6; create another pipe"
        ):
            pipe(x)


@on_both_placements
def test_changed_attributes_apply_to_the_next_call(on: Any) -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.LeakyReLU(0.1), nn.Linear(6, 6))
    x = torch.randn(8, 6)
    with Sequential(module, 2, on=on, chunks=2) as pipe:
        for gradients in (True, False):
            with torch.set_grad_enabled(gradients):
                pipe(x)
                module[1].negative_slope += 0.5
                torch.testing.assert_close(pipe(x), module(x))


class Ones(nn.Module):
    """Layer that creates a tensor of the default dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.ones(1)


@on_both_placements
def test_parts_use_the_default_dtype_of_the_program(on: Any) -> None:
    with Sequential([Ones(), nn.Identity()], 2, on=on, chunks=2) as pipe:
        assert pipe(torch.ones(4, 2, dtype=torch.float16)).dtype == torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert pipe(torch.ones(4, 2, dtype=torch.float16)).dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)


def test_hooks_on_layers_work_on_threads_and_raise_on_processes() -> None:
    x = torch.ones(4, 6)
    seen: list[int] = []
    for on in ("thread", "process"):
        module = dense()
        with Sequential(module, on=on, chunks=2) as pipe:  # type: ignore[arg-type]
            pipe(x)
            with torch.no_grad():
                pipe(x)
            module[2].register_forward_hook(lambda m, inputs, output: seen.append(len(output)))
            if on == "thread":
                pipe(x)
                assert seen == [2, 2]
                continue
            for use in (lambda: pipe(x), lambda: next(pipe.stream([x])), lambda: torch.no_grad()(pipe)(x)):
                with pytest.raises(
                    ValueError, match=r"layer Linear must not have hooks, .*; use on='thread'"
                ):
                    use()


@on_both_placements
def test_torchs_own_hooks_work_on_processes(on: Any) -> None:
    module = nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 6)), nn.Tanh()).eval()
    x = torch.ones(4, 6)
    with Sequential(module, on=on, chunks=2) as pipe:
        y = pipe(x)
        torch.testing.assert_close(y, module(x))
        y.sum().backward()
        assert module[0].weight_orig.grad is not None


@on_both_placements
def test_functional_call_uses_the_given_parameters(on: Any) -> None:
    module = dense()
    x = torch.randn(8, 6)
    with Sequential(module, on=on, chunks=2) as pipe:
        found = []
        for each in (pipe, module):
            scale = torch.tensor(2.0, requires_grad=True)
            scaled = {name: one.detach() * scale for name, one in module.named_parameters()}
            torch.func.functional_call(each, scaled, x).sum().backward()
            found.append(scale.grad)
        torch.testing.assert_close(*found)
        torch.testing.assert_close(pipe(x), module(x))


class Counts(nn.Module):
    """Layer with two buffers: it writes into one and replaces the other."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("samples", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "meta":
            self.samples += len(x)
            self.mean = 0.5 * self.mean + 0.5 * x.mean(0).detach()
        return x


@on_both_placements
@pytest.mark.parametrize("gradients", [True, False])
def test_buffer_changes_of_a_layer_reach_the_program(on: Any, gradients: bool) -> None:
    module = nn.Sequential(nn.Linear(6, 6), Counts())
    plain = copy.deepcopy(module)
    x = torch.randn(8, 6)
    with Sequential(module, [1, 1], on=on, chunks=2) as pipe, torch.set_grad_enabled(gradients):
        for _ in range(2):
            pipe(x)
            for piece in x.split(4):
                plain(piece)
        torch.testing.assert_close(dict(pipe.state_dict()), dict(plain.state_dict()))


@on_both_placements
def test_batch_norm_statistics_cover_the_whole_batch(on: Any) -> None:
    module = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6))
    plain = copy.deepcopy(module)
    x = torch.randn(12, 6)
    with Sequential(module, 3, on=on, chunks=4, recompute=True) as pipe:
        for gradients in (True, False):
            with torch.set_grad_enabled(gradients):
                y = pipe(x)
                plain[0](x)
                if gradients:
                    y.sum().backward()
        torch.testing.assert_close(dict(pipe[0].state_dict()), dict(plain[0].state_dict()))
        assert pipe[2].num_batches_tracked == 2


def test_shared_memory_is_freed_with_its_last_tensor() -> None:
    from flowchan.pipelines.sequential import shared_memory

    gc.collect()
    before = set(shared_memory._blocks)
    pipe = Sequential(dense(), on="process")
    pipe(torch.randn(8, 6))
    assert len(set(shared_memory._blocks) - before) == 1
    pipe.close()
    weight = pipe[0].weight.detach()
    del pipe
    gc.collect()
    assert weight.isfinite().all()
    assert len(set(shared_memory._blocks) - before) == 1
    del weight
    gc.collect()
    assert set(shared_memory._blocks) == before


@pytest.mark.skipif(
    not hasattr(torch.UntypedStorage, "_swap_data_ptr_"),
    reason="this version of torch cannot move a storage in place: install a newer torch",
)
def test_tensors_that_share_memory_with_a_parameter_still_do() -> None:
    module = dense()
    flat = torch.randn(16 * 6 + 16)
    module[0].weight.data = flat[: 16 * 6].view(16, 6)
    module[0].bias.data = flat[16 * 6 :]
    with Sequential(module, on="process", chunks=2) as pipe:
        x = torch.randn(8, 6)
        pipe(x)
        flat.zero_()
        assert not module[0].weight.any()
        torch.testing.assert_close(pipe(x), module(x))


class Dies(nn.Module):
    """Layer that kills its process if a value is not finite."""

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "meta" and not x.isfinite().all():
            os.kill(os.getpid(), signal.SIGKILL)
        return x


def test_process_that_dies_in_a_call_is_named_and_replaced() -> None:
    x = torch.ones(8, 6)
    with Sequential([nn.Linear(6, 6), Dies(), nn.Linear(6, 6)], [1, 1, 1], on="process", chunks=2) as pipe:
        y = pipe(x).sum()
        with pytest.raises(StageError) as raised:
            pipe(x * float("nan"))
        assert raised.value.stage == "part 1"
        assert isinstance(raised.value.__cause__, WorkerDied)
        with pytest.raises(StageError):  # the graph was lost with the dead process
            y.backward()
        pipe(x).sum().backward()
        assert pipe[0].weight.grad is not None


# --- step-by-step training ---


def test_training_step_rejects_an_input_that_requires_grad() -> None:
    ((x, target),) = batches([8])
    with in_parts(perceptron(), 2) as training:
        with pytest.raises(
            ValueError, match=r"x must not require grad.*compute the loss yourself from pipe\(x\)"
        ):
            training.step(nn.Linear(6, 6)(x), target)
        assert float(training.step(x, target)) > 0  # training can still continue


@on_both_placements
@pytest.mark.parametrize(
    "loss",
    [
        lambda output, target: cross_entropy(output, target, reduction="sum"),
        lambda output, target: cross_entropy(output, target, weight=torch.tensor([9.0, 1.0, 0.1, 1.0])),
        lambda output, target: (output @ output.t()).logsumexp(1).mean(),
    ],
)
def test_loss_other_than_a_mean_raises_in_the_first_step(on: Any, loss: Any) -> None:
    ((x, target),) = batches([11])
    with (
        in_parts(perceptron(), 3, on, loss=loss, optimizer=None) as training,
        pytest.raises(RunError) as raised,
    ):
        training.step(x, target)
    assert "loss must be a mean over samples, got " in str(raised.value)
    assert "or compute the loss yourself from pipe(x)" in str(raised.value)


def test_loss_with_parameters_raises() -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return cross_entropy(output * self.scale, target)

    with pytest.raises(ValueError, match="loss must not have parameters that require grad"):
        Sequential(perceptron()).trainer(loss=Learned())


def test_layer_change_during_training_on_processes_raises() -> None:
    module = perceptron()
    ((x, target),) = batches([8])
    with in_parts(module, 2, "process") as training:
        training.step(x, target)
        module.double()
        with pytest.raises(RuntimeError, match="a layer has changed since training began"):
            training.step(x.double(), target)


@on_both_placements
def test_graph_built_before_training_raises_in_backward(on: Any) -> None:
    module = perceptron()
    ((x, target),) = batches([8])
    with Sequential(module, 2, on=on, chunks=2) as pipe:
        outputs = [pipe(x), module(x)]
        with pipe.trainer(loss=cross_entropy, optimizer=lambda p: torch.optim.SGD(p, 0.1)) as training:
            training.step(x, target)
        for output in outputs:
            with pytest.raises((RuntimeError, StageError), match="modified by an inplace operation"):
                output.sum().backward()


# --- unsupported uses raise ---


def test_jit_trace_of_a_pipe_raises() -> None:
    with (
        Sequential(dense()) as pipe,
        pytest.raises(RuntimeError, match=r"trace the plain module, pipe\.module"),
    ):
        torch.jit.trace(pipe, torch.randn(2, 6))


@on_both_placements
def test_forward_mode_derivatives_raise(on: Any) -> None:
    with Sequential(dense(), on=on) as pipe, forward_ad.dual_level():
        x = forward_ad.make_dual(torch.ones(2, 6), torch.ones(2, 6))
        for gradients in (True, False):
            with (
                torch.set_grad_enabled(gradients),
                pytest.raises(
                    RuntimeError, match=r"forward-mode derivatives are not supported; use pipe\.module"
                ),
            ):
                pipe(x)


def test_autocast_around_training_raises() -> None:
    ((x, target),) = batches([8])
    with (
        in_parts(perceptron(), 2) as training,
        torch.autocast("cpu"),
        pytest.raises(RuntimeError, match=r"autocast does not reach the parts; .*autocast=…"),
    ):
        training.step(x, target)


def test_hooks_added_to_the_sequential_later_raise() -> None:
    with Sequential(dense()) as pipe:
        pipe.module.register_forward_hook(lambda *_: None)
        for use in (lambda: pipe(torch.ones(2, 6)), lambda: pipe.stream([torch.ones(2, 6)])):
            with pytest.raises(ValueError, match="module has forward hooks"):
                use()


@on_both_placements
def test_compile_leaves_a_pipe_unchanged(on: Any) -> None:
    module, x = dense(), torch.randn(8, 6)
    with Sequential(module, 2, on=on) as pipe:
        head = nn.Linear(3, 2)
        for compiled, plain in (
            (torch.compile(pipe, backend="eager"), module),
            (torch.compile(nn.Sequential(pipe, head), backend="eager"), nn.Sequential(module, head)),
        ):
            torch.testing.assert_close(compiled(x), plain(x))
            compiled(x).sum().backward()
    assert all(one.grad is not None for one in module.parameters())
    torch._dynamo.reset()
