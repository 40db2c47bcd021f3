"""What is particular about the memory of tensors that a call is given; the rest is told of arrays, by
test_memory_given.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.group_members import refused
from support.optional_packages import optional

torch = optional("torch")

pytestmark = pytest.mark.usefixtures("one_compute_thread")


def negated() -> Any:
    """-2, which lies in memory as 2."""
    return torch.tensor([1 + 2j]).conj().imag


def test_a_tensor_that_only_says_that_it_is_negative_is_taken_as_such(run: Any) -> None:
    def body(g: Any) -> Any:
        spread = g.broadcast(negated() if g.rank == 0 else torch.zeros(1)).item()
        return g.allreduce(negated(), out=torch.zeros(1)).item(), g.allreduce(negated()).item(), spread

    assert run(2, body) == [(-4, -4, -2)] * 2


def test_a_result_comes_into_a_tensor_that_does_not_lie_in_one_piece(run: Any) -> None:
    def body(g: Any) -> Any:
        out = torch.zeros(2, 8)[:, :4]
        g.allgather(torch.full((4,), g.rank + 1.0), out=out)
        return out.tolist()

    assert run(2, body) == [[[1.0] * 4, [2.0] * 4]] * 2


def elsewhere(length: int) -> Any:
    return torch.empty(length, device="meta")


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda g: g.allreduce(torch.ones(4), out=elsewhere(4)), "out must lie on cpu, as what is given"),
        (lambda g: g.reduce_scatter(torch.ones(4), out=elsewhere(2)), "out must lie on cpu"),
        (lambda g: g.allgather(torch.ones(4), out=elsewhere(8)), "out must lie on cpu"),
        (lambda g: g.allgather(torch.ones(4), out=[elsewhere(4)] * 2), "out must lie on cpu"),
        (lambda g: g.alltoall([torch.ones(4)] * 2, out=[elsewhere(4)] * 2), "out must lie on cpu"),
        (lambda g: g.allreduce(torch.ones(1).expand(4)), "share memory, as after expand: give a copy"),
    ],
    ids=range(6),
)  # fmt: skip
def test_a_tensor_that_can_not_take_the_result_is_refused(
    run: Any, call: Callable[..., Any], said: str
) -> None:
    refused(run, call, said)


def test_a_tensor_elsewhere_is_refused_before_anything_is_sent(run: Any) -> None:
    def body(g: Any) -> Any:
        if g.rank == 0:
            with pytest.raises(
                TypeError, match="allgather takes arrays and tensors in this machine's memory"
            ):
                g.allgather(elsewhere(4))
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
    ("make", "said"),
    [
        (
            freed,
            r"take tensors with memory of their own, not float32\[4\] of the type Tensor, which has",
        ),
        (masked, "of the type MaskedTensor, which has none: give the tensor that it stands for"),
        (faked, "of the type FakeTensor, which has none: give the tensor that it stands for"),
        (lambda: nested(torch.jagged), "take no nested tensors such as one of float32: give its .values()"),
        (lambda: nested(torch.strided), "take no nested tensors such as one of float32: give its .values()"),
        (lambda: torch.eye(2).to_sparse(), "take dense tensors, not"),
    ],
    ids=["freed", "masked", "faked", "jagged", "nested", "sparse"],
)
@pytest.mark.filterwarnings("ignore")  # torch's own of such tensors
def test_a_tensor_without_memory_of_its_own_is_refused(run: Any, call: str, make: Any, said: str) -> None:
    """And nobody reads at no address."""

    def body(g: Any) -> Any:
        with pytest.raises(TypeError, match=said):
            getattr(g, call)(make())
        return g.allreduce(1)

    assert run(2, body) == [2, 2]
