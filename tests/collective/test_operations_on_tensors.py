"""Test operations on tensors, but only where tensors differ from arrays."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.group_members import in_threads, over_hosts, raised
from support.optional_packages import optional

torch = optional("torch")

pytestmark = [
    pytest.mark.usefixtures("one_compute_thread"),
    pytest.mark.filterwarnings("ignore:ComplexHalf"),
]


def test_float16_values_are_summed_in_float32_and_rounded_once(run: Any) -> None:

    def normal(rank: int, length: int, dtype: Any) -> Any:
        return torch.randn(length, generator=torch.Generator().manual_seed(rank)).to(dtype)

    def body(g: Any) -> dict[str, Any]:
        found = {}
        for dtype in (torch.float16, torch.bfloat16):
            for length in (7, 300_000):
                found[f"{dtype} {length}"] = g.allreduce(normal(g.rank, length, dtype)).float().numpy()
        return found

    for found in run(4, body):
        for dtype in (torch.float16, torch.bfloat16):
            for length in (7, 300_000):
                total = torch.zeros(length)
                for rank in range(4):
                    total += normal(rank, length, dtype).float()
                assert (found[f"{dtype} {length}"] == total.to(dtype).float().numpy()).all()


def test_complex_tensor_mean_has_equal_bits_on_several_hosts(run: Any) -> None:
    parts = [np.random.default_rng(rank).standard_normal(2000) for rank in range(3)]

    def body(g: Any) -> Any:
        x = torch.view_as_complex(torch.from_numpy(parts[g.rank].reshape(-1, 2)))
        return torch.view_as_real(g.allreduce(x, op="mean")).numpy().tobytes()

    assert run(3, body) == [((parts[0] + parts[1] + parts[2]) / 3).tobytes()] * 3


def test_noncontiguous_tensors_are_reduced_in_place(run: Any) -> None:

    def body(g: Any) -> Any:
        x = np.arange(20.0).reshape(4, 5)
        t = torch.arange(20.0).reshape(4, 5)
        g.allreduce(x[:, 1])
        g.allreduce(t.T)
        g.broadcast(x[:, 2] if g.rank == 0 else x[:, 2].copy())
        return x[:, 1].tolist(), t.tolist(), x[0].tolist()

    for x, t, row in run(2, body):
        assert x == [2.0, 12.0, 22.0, 32.0]
        assert t == (2 * np.arange(20.0).reshape(4, 5)).tolist()
        assert row == [0.0, 2.0, 2.0, 3.0, 4.0]


def test_tensors_of_every_type_can_be_gathered_and_broadcast(run: Any) -> None:
    dtypes = [
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype)
        and not str(dtype).startswith(("torch.q", "torch.bits", "torch.int", "torch.uint"))
    ] + [torch.int8, torch.int64, torch.uint8, torch.uint32]

    def body(g: Any) -> bool:
        for dtype in dtypes:
            try:
                x = torch.arange(16, dtype=torch.uint8).add(16 * g.rank).view(dtype)
            except RuntimeError:
                continue  # even torch cannot create such a tensor
            shown = g.allgather(x)
            assert [part.dtype for part in shown] == [dtype, dtype]
            assert shown[1].view(torch.uint8).tolist() == list(range(16, 32))
            assert g.broadcast(x, root=1).view(torch.uint8).tolist() == list(range(16, 32))
        return True

    assert all(run(2, body))


def test_array_and_tensor_of_one_type_can_be_combined() -> None:
    """Arrays and tensors can also be combined across hosts."""

    def body(g: Any) -> Any:
        x = torch.ones(2) if g.rank else np.ones(2, "f4")
        g.allreduce(x)
        return g.broadcast(x + g.rank, root=1).tolist()

    assert raised(over_hosts(2, body)) == [[3.0, 3.0]] * 2


def odd_tensors() -> dict[str, Any]:
    dense = torch.eye(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that some types are experimental or deprecated
        return {
            "sparse_coo; convert it, for example with .to_dense()": dense.to_sparse(),
            "sparse_csr; convert it, for example with .to_dense()": dense.to_sparse_csr(),
            "pass x.dequantize()": torch.quantize_per_tensor(dense, 0.1, 0, torch.quint8),
        }


def test_tensors_that_are_not_dense_raise_with_remedy() -> None:
    """A member that passes such a tensor raises before anything is sent."""
    odd = odd_tensors()

    calls: list[Callable[[Any, Any], Any]] = [
        lambda g, x: g.allreduce(x),
        lambda g, x: g.allreduce(torch.eye(2), out=x),
        lambda g, x: g.reduce(x),
        lambda g, x: g.broadcast(x),
        lambda g, x: g.allgather(x),
        lambda g, x: g.allgather(torch.eye(2), out=[x, x]),
        lambda g, x: g.gather(x),
        lambda g, x: g.reduce_scatter(x),
        lambda g, x: g.alltoall([x, x], out=[torch.eye(2)] * 2),
        lambda g, x: g.receive(1 - g.rank, out=x),
    ]

    def body(g: Any) -> int:
        for message, x in odd.items():
            for call in calls:
                with pytest.raises(TypeError, match=re.escape(message)):
                    call(g, x)
        return int(g.allreduce(1))

    assert raised(in_threads(2, body)) == [2, 2]
    assert raised(over_hosts(2, body)) == [2, 2]


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("dtype", "remedy"),
    [("float8_e4m3fn", "float32"), ("float8_e5m2", "float32"), ("complex32", "complex64")],
)
def test_type_that_cannot_be_combined_raises_with_the_remedy(run: Any, dtype: str, remedy: str) -> None:
    message = (
        f"elements of type torch.{dtype} cannot be combined by sum; convert them first, for "
        f"example to {remedy}"
    )

    def body(g: Any) -> int:
        x = torch.zeros(2).to(getattr(torch, dtype))
        for call in (g.allreduce, g.reduce, g.reduce_scatter):
            with pytest.raises(TypeError, match=message):
                call(x)
        return int(g.allreduce(1))

    assert run(2, body) == [2, 2]
