"""Test that unsupported tensors and functions raise a one-line error that names them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.optional_packages import optional

from flowchan.pipelines import RemoteNodes

torch = optional("torch")
pytestmark = pytest.mark.usefixtures("one_compute_thread")


@pytest.fixture
def vector() -> Iterator[Any]:
    """Provide a vector on a node."""
    with RemoteNodes(1) as nodes:
        yield torch.ones(3, device=nodes[0])


def sparse() -> Any:
    return torch.eye(3).to_sparse()


@pytest.mark.parametrize(
    ("refused", "name"),
    [
        (lambda vector: vector.to_sparse(), "aten::_to_sparse"),
        (lambda vector: sparse().to(vector.device), "sparse_coo"),
        (lambda vector: torch.sparse.mm(sparse(), vector.unsqueeze(1)), "aten::_sparse_addmm"),
        (lambda vector: torch.quantize_per_tensor(vector, 0.1, 0, torch.quint8), "aten::quantize_per_tensor"),
    ],
)
def test_tensors_without_strides_are_refused_by_name(
    vector: Any, refused: Callable[[Any], Any], name: str
) -> None:
    with pytest.raises(RuntimeError, match="remote tensors must be strided") as caught:
        refused(vector)
    assert name in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert (vector + 1).tolist() == [2, 2, 2]


def test_dtensor_of_a_remote_tensor_is_refused(vector: Any) -> None:
    distributed = optional("torch.distributed", "torch")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        with pytest.raises(TypeError, match="DTensor: remote tensors cannot be distributed"):
            DTensor.from_local(vector, mesh)
    finally:
        distributed.destroy_process_group()


def test_conjugate_and_zero_tensors_arrive_as_values(vector: Any) -> None:
    complex_vector = torch.complex(vector, 2 * vector)
    assert torch.view_as_real(complex_vector.conj().resolve_conj()).tolist() == [[1, -2]] * 3
    assert torch._efficientzerotensor((2,), device=vector.device).tolist() == [0, 0]


def test_inference_mode_runs_composite_operators(vector: Any) -> None:
    with torch.inference_mode():
        assert torch.equal(vector, torch.ones_like(vector))
        assert torch.nn.functional.linear(vector, torch.ones(2, 3, device=vector.device)).tolist() == [3, 3]
