"""Test that derivatives of remote operations equal local ones, and that misuse raises torch's own errors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from support.optional_packages import optional
from training_cases import made

from flowchan.pipelines import RemoteNodes

torch = optional("torch")


@pytest.fixture(scope="module")
def nodes(two_nodes: RemoteNodes) -> RemoteNodes:
    return two_nodes


def same(function: Callable[[Any, Any], Any], nodes: RemoteNodes) -> bool:
    """Return whether ``function`` gives the same tensors for two inputs on a node as for local inputs."""
    torch.manual_seed(0)
    x, w = torch.randn(4, 3), torch.randn(3, 3)
    expected = flat(function(x.clone(), w.clone()))
    found = flat(function(x.to(nodes[1]), w.to(nodes[1])))
    assert len(found) == len(expected) > 0
    assert {one.device for one in found} == {nodes[1]}
    return all(torch.equal(one.cpu(), other) for one, other in zip(found, expected, strict=True))


def flat(result: Any) -> list[Any]:
    return [result] if isinstance(result, torch.Tensor) else [one for part in result for one in flat(part)]


def gradients(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a function that computes ``function`` and the gradients of its sum."""

    def run(x: Any, w: Any) -> Any:
        x.requires_grad_()
        w.requires_grad_()
        result = function(x, w)
        return result, torch.autograd.grad(result.sum(), (x, w))

    return run


def in_place(x: Any, w: Any) -> Any:
    y = x @ w
    y[:, 1].mul_(2)
    y[0] += w[0]
    y.t()[2].sub_(1)
    return y.exp()


def through_views(x: Any, w: Any) -> Any:
    y = x.t().reshape(2, 6)[:, ::2].unsqueeze(0).expand(3, 2, 3)
    return (y * w.view(9)[:3]).diagonal(dim1=0, dim2=2).flip(1)


def leaf_views(x: Any, w: Any) -> Any:
    base = torch.zeros_like(x)
    base[:2].copy_(x[:2] @ w)
    base[2:].add_(x[2:] * 3)
    return base.sin()


class Doubled(torch.autograd.Function):  # type: ignore[misc]
    """Function with a user-defined backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 2 + ctx.saved_tensors[0] * 0


@pytest.mark.parametrize(
    "function", [in_place, through_views, leaf_views, lambda x, w: Doubled.apply(x @ w)],
    ids=["in place", "views", "in place through views", "own function"],
)  # fmt: skip
def test_gradients_equal_local_ones(nodes: RemoteNodes, function: Callable[[Any, Any], Any]) -> None:
    assert same(gradients(function), nodes)


def test_second_derivatives_equal_local_ones(nodes: RemoteNodes) -> None:
    def run(x: Any, w: Any) -> Any:
        x.requires_grad_()
        w.requires_grad_()
        first = torch.autograd.grad((x @ w).tanh().sum(), (x, w), create_graph=True)
        return first, torch.autograd.grad(sum(one.pow(2).sum() for one in first), (x, w))

    assert same(run, nodes)


def test_gradients_accumulate_and_hooks_run(nodes: RemoteNodes) -> None:
    def run(x: Any, w: Any) -> Any:
        w.requires_grad_()
        seen: list[Any] = []
        w.register_hook(lambda grad: seen.append(grad) or grad * 2)
        for _ in range(3):
            (x @ w).square().sum().backward()
        return w.grad, seen

    assert same(run, nodes)


TRANSFORMS: dict[str, Callable[[Any, Any], Any]] = {
    "grad": lambda x, w: torch.func.grad(lambda one: (x @ one).tanh().sum())(w),
    "grad and value": lambda x, w: torch.func.grad_and_value(lambda one: (x @ one).tanh().sum())(w),
    "vmap": lambda x, w: torch.func.vmap(lambda row: (row @ w).softmax(0))(x),
    "per-sample grad": lambda x, w: torch.func.vmap(
        torch.func.grad(lambda one, row: (row @ one).sin().sum()), (None, 0)
    )(w, x),
    "vjp": lambda x, w: torch.func.vjp(lambda one: (x @ one).exp(), w)[1](torch.ones_like(x)),
    "jvp": lambda x, w: torch.func.jvp(lambda one: (x @ one).exp(), (w,), (torch.ones_like(w),)),
    "jacrev": lambda x, w: torch.func.jacrev(lambda one: (x @ one).sin())(w),
    "jacfwd": lambda x, w: torch.func.jacfwd(lambda one: (x @ one).sin())(w),
    "hessian": lambda x, w: torch.func.hessian(lambda one: (x @ one).sin().sum())(w),
    "functionalize": lambda x, w: torch.func.functionalize(in_place)(x, w),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_function_transforms_equal_local_ones(nodes: RemoteNodes, name: str) -> None:
    assert same(TRANSFORMS[name], nodes)


def test_forward_mode_equals_local_forward_mode(nodes: RemoteNodes) -> None:
    def run(x: Any, w: Any) -> Any:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            return tuple(torch.autograd.forward_ad.unpack_dual((dual @ w).tanh()))

    assert same(run, nodes)


def test_functional_call_and_stacked_modules_equal_local_ones(nodes: RemoteNodes) -> None:
    models = [made("mlp", seed)[0].eval() for seed in (1, 2)]
    x = made("mlp")[1][0][0]

    def run(device: Any) -> Any:
        moved = [copy.deepcopy(model).to(device) for model in models]
        parameters, buffers = torch.func.stack_module_state(moved)

        def call(weights: Any, state: Any, given: Any) -> Any:
            return torch.func.functional_call(moved[0], (weights, state), (given,))

        single = torch.func.functional_call(moved[0], dict(moved[1].state_dict()), (x.to(device),))
        return single, torch.func.vmap(call, (0, 0, None))(parameters, buffers, x.to(device))

    assert all(torch.equal(one.cpu(), other) for one, other in zip(run(nodes[0]), run("cpu"), strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("preserved", [False, True])
def test_checkpoint_equals_local_checkpoint(nodes: RemoteNodes, reentrant: bool, preserved: bool) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(4, 3), torch.randn(3, 3)

    def block(a: Any, b: Any) -> Any:
        return torch.nn.functional.dropout(a @ b, 0.5 if preserved else 0.0).tanh()

    def run(device: Any) -> list[Any]:
        a, b = x.to(device).requires_grad_(), w.to(device).requires_grad_()
        torch.manual_seed(7)
        result = torch.utils.checkpoint.checkpoint(
            block, a, b, use_reentrant=reentrant, preserve_rng_state=preserved
        )  # fmt: skip
        drawn = torch.rand(2, device=device)
        result.sum().backward()
        return [
            result.detach().cpu(),
            drawn.cpu(),
            a.grad.cpu(),
            b.grad.cpu(),
            torch.rand(2, device=device).cpu(),
        ]

    assert all(map(torch.equal, run(nodes[1]), run("cpu")))


def test_backward_crosses_nodes(nodes: RemoteNodes) -> None:
    torch.manual_seed(0)
    x, first, second = torch.randn(4, 3), torch.randn(3, 3), torch.randn(3, 3)

    def run(here: Any, there: Any) -> list[Any]:
        a, w, v = (
            x.to(here).requires_grad_(),
            first.to(here).requires_grad_(),
            second.to(there).requires_grad_(),
        )
        middle = (a @ w).tanh().to(there)
        back = ((middle @ v).sin() + middle).to(here)
        loss = (back * a).mean()
        loss.backward()
        return [loss.detach(), a.grad, w.grad, v.grad]

    found = run(nodes[0], nodes[1])
    assert [one.device for one in found] == [nodes[0], nodes[0], nodes[0], nodes[1]]
    assert all(torch.equal(one.cpu(), other) for one, other in zip(found, run("cpu", "cpu"), strict=True))


def test_backward_crosses_to_the_program(nodes: RemoteNodes) -> None:
    x = torch.arange(3.0, requires_grad=True)
    (x.to(nodes[0]).square().cpu() * 2).sum().backward()
    assert torch.equal(x.grad, torch.arange(3.0) * 4)


def test_model_on_two_nodes_equals_the_local_model(nodes: RemoteNodes) -> None:
    model, batches = made("mlp")
    local = copy.deepcopy(model)
    first, second = model[:2].to(nodes[0]), model[2:].to(nodes[1])
    torch.manual_seed(1)
    second(first(batches[0][0].to(nodes[0])).to(nodes[1])).sum().backward()
    torch.manual_seed(1)
    local(batches[0][0]).sum().backward()
    pairs = zip(model.parameters(), local.parameters(), strict=True)
    assert all(torch.equal(one.grad.cpu(), other.grad) for one, other in pairs)


def test_inference_mode_makes_inference_tensors(nodes: RemoteNodes) -> None:
    with torch.inference_mode():
        x = torch.ones(2, 3, device=nodes[0])
        y = torch.nn.functional.linear(x, x).relu_()
    assert y.is_inference()
    assert torch.equal(y.cpu(), torch.full((2, 2), 3.0))
    w = torch.ones(2, 2, device=nodes[0], requires_grad=True)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        w @ y


def test_backward_after_a_saved_tensor_changed_raises(nodes: RemoteNodes) -> None:
    x = torch.ones(3, device=nodes[0], requires_grad=True)
    y = x.exp()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_view_of_a_changed_tensor_counts_its_versions(nodes: RemoteNodes) -> None:
    x = torch.ones(3, device=nodes[0])
    view = x[1:]
    before = view._version
    x.mul_(2)
    assert view._version == before + 1
    assert view.cpu().tolist() == [2, 2]


def test_in_place_operation_on_a_leaf_raises(nodes: RemoteNodes) -> None:
    x = torch.ones(3, device=nodes[0], requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        x.add_(1)
    with torch.no_grad():
        x.add_(1)
    assert x.tolist() == [2, 2, 2]


def test_second_backward_without_retained_graph_raises(nodes: RemoteNodes) -> None:
    x = torch.ones(3, device=nodes[0], requires_grad=True)
    loss = x.exp().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_anomaly_mode_finds_a_nan_in_backward(nodes: RemoteNodes) -> None:
    x = torch.zeros(3, device=nodes[0], requires_grad=True)
    with (
        pytest.warns(UserWarning, match="Anomaly Detection"),
        torch.autograd.detect_anomaly(),
        pytest.warns(UserWarning, match="Error detected in"),
        pytest.raises(RuntimeError, match="returned nan values"),
    ):
        (x.sqrt() * 0).sum().backward()


def test_backward_in_a_thread_equals_backward_here(nodes: RemoteNodes) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def run(seed: int) -> Any:
        x = torch.full((3,), float(seed), device=nodes[seed % 2], requires_grad=True)
        x.square().sum().backward()
        return x.grad.cpu()

    with ThreadPoolExecutor(4) as threads:
        assert [one.tolist() for one in threads.map(run, range(8))] == [[2.0 * seed] * 3 for seed in range(8)]
