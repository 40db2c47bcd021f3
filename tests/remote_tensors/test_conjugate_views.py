"""Test that conjugate and negative views of remote tensors behave like those of local tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from metadata_check import MetadataCheck
from support.optional_packages import optional

from flowchan import Channel

torch = optional("torch")

pytestmark = pytest.mark.usefixtures("one_compute_thread")

Case = Callable[[Any], Any]


def values(count: int = 4) -> Any:
    parts = torch.arange(2.0 * count).reshape(count, 2) - 2.5
    return torch.view_as_complex(parts).reshape(2, -1)


def of(change: Callable[[Any], Any], *views: Callable[[Any], Any]) -> Case:
    """Return a case that changes a view of its argument in place, and returns the argument and the view."""

    def run(x: Any) -> Any:
        view = x
        for one in views:
            view = one(view)
        return x, view, change(view)

    return run


def conj(x: Any) -> Any:
    return x.conj()


def neg(x: Any) -> Any:
    return torch._neg_view(x)


def real(x: Any) -> Any:
    return x.real


def imag(x: Any) -> Any:
    return x.imag


VIEWS: dict[str, tuple[Callable[[Any], Any], ...]] = {
    "conj": (conj,),
    "neg": (neg,),
    "conj real": (conj, real),
    "conj imag": (conj, imag),
    "conj conj": (conj, conj),
    "conj neg": (conj, neg),
    "adjoint": (lambda x: x.mH,),
    "row of conj": (conj, lambda x: x[0]),
    "flat conj": (conj, lambda x: x.view(-1)),
    "conj of column": (lambda x: x[:, 1], conj),
    "conj imag row": (conj, imag, lambda x: x[1]),
    "detached conj": (conj, lambda x: x.detach()),
}

CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda v: v,
    "resolve_conj": lambda v: v.resolve_conj(),
    "change resolved": lambda v: v.resolve_conj().mul_(2),
    "resolve_neg": lambda v: v.resolve_neg(),
    "change both resolved": lambda v: v.resolve_conj().resolve_neg().mul_(2),
    "add_": lambda v: v.add_(1),
    "mul_": lambda v: v.mul_(torch.ones_like(v) * 3),
    "fill_": lambda v: v.fill_(2),
    "zero_": lambda v: v.zero_(),
    "copy_": lambda v: v.copy_(v * 2),
    "copy local": lambda v: v.copy_(torch.full(v.shape, 2.5, dtype=v.dtype)),
    "copy bits": lambda v: torch.zeros_like(v).copy_(v),
    "set part": lambda v: v.__setitem__(0, v[1] * 2),
    "masked_fill_": lambda v: v.masked_fill_(v == v, 4),
    "mul": lambda v: v * v,
    "add number": lambda v: v + 1,
    "out": lambda v: torch.add(v, 1, out=v),
    "clone": lambda v: v.clone(),
    "to": lambda v: v.to(torch.complex128),
    "contiguous": lambda v: v.t().contiguous() if v.dim() == 2 else v[::2].contiguous(),
    "neg": lambda v: -v,
    "sum": lambda v: v.sum(),
    "cat": lambda v: torch.cat([v, v * 2]),
    "list": lambda v: v.tolist(),
    "item": lambda v: v.flatten()[1].item(),
    "data": lambda v: v.data,
    "equal": lambda v: torch.equal(v, v.clone()),
    "cpu": lambda v: v.cpu() + 0,
    "physical": lambda v: v.conj_physical(),
    "split": lambda v: list(v.split(1)),
    "where": lambda v: torch.where(v == v, v, 2 * v),
    "max": lambda v: v.abs().max(0),
    "nonzero": lambda v: v.nonzero(),
    "pack": lambda v: v[v != 0],
}

COMPLEX: dict[str, Case] = {
    "matmul": lambda x: (x.conj() @ x.mH, x.mH @ x, torch.mm(x.conj(), x.t().conj())),
    "dot": lambda x: (torch.vdot(x[0], x[1]), torch.dot(x[0].conj(), x[1])),
    "bmm": lambda x: torch.bmm(x.conj()[None], x.mH[None]),
    "addmm_": lambda x: torch.zeros(2, 2, dtype=x.dtype, device=x.device).conj().addmm_(x.conj(), x.mH),
    "real of conj changes base": lambda x: (x.conj().real.add_(10), x.conj().imag.mul_(3), x),
    "set real": lambda x: (x.conj().real.zero_(), setattr(x.conj(), "imag", x.real), x),
    "view_as_real": lambda x: torch.view_as_real(x.conj().resolve_conj()),
    "view_as_real refuses": lambda x: refused(torch.view_as_real, x.conj()),
    "transpose in place": lambda x: x.conj().t_(),
    "resolved twice": lambda x: x.conj().resolve_conj().conj(),
    "out conj": lambda x: torch.mul(x, 2, out=x.conj()),
    "assigned data": lambda x: assigned(x),
    "set": lambda x: x.conj().set_(x),
    "linalg": lambda x: torch.linalg.solve(x[:, :2].conj(), x[:, :2]),
    "fft": lambda x: torch.fft.ifft(torch.fft.fft(x.conj(), dim=0), dim=0),
    "foreach": lambda x: torch._foreach_add([x.conj(), x], 1),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x.conj()),
    "angle": lambda x: x.conj().angle(),
}


def assigned(x: Any) -> Any:
    """Assign a conjugate view to ``data``, and then a plain tensor."""
    first = torch.zeros_like(x)
    first.data = x.conj()
    second = x.conj()
    second.data = x
    third = x.real
    third.data = x.conj().imag
    return first, first + 1, second, second + 1, third, third + 1


def refused(function: Callable[[Any], Any], x: Any) -> Any:
    with pytest.raises(RuntimeError) as caught:
        function(x)
    return str(caught.value)


def flat(result: Any) -> Iterator[Any]:
    if isinstance(result, (list, tuple)) and not isinstance(result, torch.Size):
        for one in result:
            yield from flat(one)
    else:
        yield result


def seen(result: Any) -> list[Any]:
    """Return what a program sees of a result: the bits, the metadata and the values of each tensor."""
    return [
        (one.is_conj(), one.is_neg(), one.dtype, one.shape, one.stride(), one.detach().cpu().tolist())
        if isinstance(one, torch.Tensor)
        else one
        for one in flat(result)
    ]


@pytest.fixture(params=["plain", "checked"])
def check(request: pytest.FixtureRequest) -> Any:
    """Compare the metadata after each operation, or let the C++ part issue known operations."""
    return MetadataCheck() if request.param == "checked" else contextlib.nullcontext()


def compare(case: Case, nodes: Any, check: Any) -> None:
    with torch.no_grad(), check:
        expected = seen(case(values()))
        for _ in range(2):  # without and with known templates
            assert seen(case(values().to(nodes[0]))) == expected
        if isinstance(check, MetadataCheck):
            assert check.take() == []


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("views", VIEWS)
def test_changed_view_equals_its_local_run(two_nodes: Any, check: Any, views: str, change: str) -> None:
    compare(of(CHANGES[change], *VIEWS[views]), two_nodes, check)


@pytest.mark.parametrize("case", COMPLEX)
def test_complex_operation_equals_its_local_run(two_nodes: Any, check: Any, case: str) -> None:
    compare(COMPLEX[case], two_nodes, check)


@pytest.mark.parametrize("views", VIEWS)
def test_view_in_inference_mode_equals_its_local_run(two_nodes: Any, views: str) -> None:
    case = of(lambda view: (view.resolve_conj(), view * 2, view.sum()), *VIEWS[views])
    with torch.inference_mode():
        assert seen(case(values().to(two_nodes[0]))) == seen(case(values()))


BACKWARD: dict[str, Case] = {
    "conj": lambda x: x.conj(),
    "real": lambda x: x.conj().real,
    "imag": lambda x: x.conj().imag * 2,
    "mul": lambda x: x.conj() * x,
    "matmul": lambda x: x.mH @ x,
    "in place": lambda x: (x * 1).conj().mul_(2j).imag,
    "resolved": lambda x: x.conj().resolve_conj() * (1 + 2j),
    "abs": lambda x: x.conj().abs(),
}


@pytest.mark.parametrize("case", BACKWARD)
def test_gradient_through_a_view_equals_its_local_run(two_nodes: Any, case: str) -> None:
    def run(x: Any) -> Any:
        leaf = x.requires_grad_()
        result = BACKWARD[case](leaf)
        gradient = torch.linspace(1, 2, result.numel()).reshape(result.shape).to(result.dtype)
        (returned,) = torch.autograd.grad(result, leaf, gradient.to(x.device), retain_graph=True)
        result.backward(gradient.to(x.device))
        return result, returned, leaf.grad

    assert seen(run(values().to(two_nodes[0]))) == seen(run(values()))


@pytest.mark.parametrize("views", VIEWS)
def test_view_keeps_its_values_on_other_nodes(two_nodes: Any, views: str) -> None:
    """Like a copy to a CUDA device, a copy to a node is a new tensor without bits."""
    expected = of(lambda view: view, *VIEWS[views])(values())[1]
    view = of(lambda view: view, *VIEWS[views])(values().to(two_nodes[0]))[1]
    moved = view.to(two_nodes[1])
    assert (moved.is_conj(), moved.is_neg()) == (False, False)
    assert (moved * 2).tolist() == (expected * 2).tolist()
    target = torch.zeros_like(expected).to(two_nodes[1])
    target.conj().copy_(view)
    assert target.tolist() == expected.conj().tolist()
    assert expected.to(two_nodes[0]).tolist() == expected.tolist()
    assert not view.cpu().is_conj()
    assert torch.zeros_like(expected).copy_(view).tolist() == expected.tolist()


@pytest.mark.parametrize("views", VIEWS)
def test_view_in_an_item_keeps_its_bits_and_storage(two_nodes: Any, views: str) -> None:
    x, local = values().to(two_nodes[0]), values()
    channel: Any = Channel(across="processes")
    channel.put(of(lambda view: view, *VIEWS[views])(x)[1])
    arrived, expected = channel.get(), of(lambda view: view, *VIEWS[views])(local)[1]
    assert seen(arrived) == seen(expected)
    assert seen([arrived.mul_(2), x]) == seen([expected.mul_(2), local])
