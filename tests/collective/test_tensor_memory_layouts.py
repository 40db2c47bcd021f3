"""Test the memory layouts of tensor arguments, but only where tensors differ from arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.group_members import refused
from support.optional_packages import optional

torch = optional("torch")

pytestmark = pytest.mark.usefixtures("one_compute_thread")


def negated() -> Any:
    """Return a tensor with the value -2, whose memory contains 2."""
    return torch.tensor([1 + 2j]).conj().imag


def test_lazily_negated_tensor_is_sent_with_its_values(run: Any) -> None:
    def body(g: Any) -> Any:
        spread = g.broadcast(negated() if g.rank == 0 else torch.zeros(1)).item()
        return g.allreduce(negated(), out=torch.zeros(1)).item(), g.allreduce(negated()).item(), spread

    assert run(2, body) == [(-4, -4, -2)] * 2


def test_result_fills_noncontiguous_tensor(run: Any) -> None:
    def body(g: Any) -> Any:
        out = torch.zeros(2, 8)[:, :4]
        g.allgather(torch.full((4,), g.rank + 1.0), out=out)
        return out.tolist()

    assert run(2, body) == [[[1.0] * 4, [2.0] * 4]] * 2


def on_other_device(length: int) -> Any:
    return torch.empty(length, device="meta")


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: g.allreduce(torch.ones(4), out=on_other_device(4)), "out must be on cpu like the input"),
        (lambda g: g.reduce_scatter(torch.ones(4), out=on_other_device(2)), "out must be on cpu"),
        (lambda g: g.allgather(torch.ones(4), out=on_other_device(8)), "out must be on cpu"),
        (lambda g: g.allgather(torch.ones(4), out=[on_other_device(4)] * 2), "out must be on cpu"),
        (lambda g: g.alltoall([torch.ones(4)] * 2, out=[on_other_device(4)] * 2), "out must be on cpu"),
        (lambda g: g.allreduce(torch.ones(1).expand(4)), "must not have elements that share memory"),
    ],
    ids=range(6),
)  # fmt: skip
def test_tensor_that_cannot_hold_the_result_raises(run: Any, call: Callable[..., Any], message: str) -> None:
    refused(run, call, message)


def test_tensor_on_unsupported_device_raises_before_sending(run: Any) -> None:
    def body(g: Any) -> Any:
        if g.rank == 0:
            with pytest.raises(TypeError, match="allgather: x must be in main memory or on a CUDA device"):
                g.allgather(on_other_device(4))
        return g.allreduce(1)

    assert run(2, body) == [2, 2]


def freed() -> Any:
    found = torch.ones(4)
    found.untyped_storage().resize_(0)
    return found


def masked() -> Any:
    return optional("torch.masked").masked_tensor(torch.ones(4), torch.tensor([True, False] * 2))


def faked() -> Any:
    return optional("torch._subclasses.fake_tensor").FakeTensorMode().from_tensor(torch.ones(4))


def nested(layout: Any) -> Any:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


@pytest.mark.each_pair
@pytest.mark.parametrize("call", ["allreduce", "broadcast", "allgather", "gather", "reduce_scatter"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            freed,
            r"must be a tensor with its own memory, got float32\[4\] of type Tensor",
        ),
        (masked, "of type MaskedTensor; pass the tensor that x wraps"),
        (faked, "of type FakeTensor; pass the tensor that x wraps"),
        (lambda: nested(torch.jagged), "got a nested float32 tensor; pass x.values()"),
        (lambda: nested(torch.strided), "got a nested float32 tensor; pass x.values()"),
        (lambda: torch.eye(2).to_sparse(), "must be a dense tensor, got"),
    ],
    ids=["freed", "masked", "faked", "jagged", "nested", "sparse"],
)
@pytest.mark.filterwarnings("ignore")  # ignores torch's own warnings
def test_tensor_without_memory_raises(run: Any, call: str, make: Any, message: str) -> None:
    """Members must not read from address zero."""

    def body(g: Any) -> Any:
        with pytest.raises(TypeError, match=message):
            getattr(g, call)(make())
        return g.allreduce(1)

    assert run(2, body) == [2, 2]
