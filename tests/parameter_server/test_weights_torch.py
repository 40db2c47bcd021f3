"""Test ``Weights`` with torch: modules, every dtype, NaN payloads and devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from published_weights import equal_bits, everywhere, reader_of
from support.optional_packages import optional

from flowchan.pipelines import Weights

torch = optional("torch")

pytestmark = pytest.mark.usefixtures("one_compute_thread")

DTYPES = [
    "bfloat16",
    "float16",
    "float32",
    "float64",
    "int8",
    "int64",
    "uint8",
    "bool",
    "complex64",
    "float8_e4m3fn",
]


def network(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))


@everywhere
def test_module_is_published_and_refreshed_with_its_buffers(where: str) -> None:
    trained, model = network(), network(1)
    with torch.no_grad():
        trained(torch.ones(8, 4))  # update the buffers
    with Weights(trained) as weights:
        reader = reader_of(weights, where)
        weights.publish(step=1)
        assert reader.refresh(model) == 1
        assert equal_bits(model.state_dict(), trained.state_dict())
        with torch.no_grad():
            trained[0].weight[1, 2] += 1
        weights.publish(step=2)
        assert (reader.refresh(model), reader.step) == (2, 2)
        assert equal_bits(model.state_dict(), trained.state_dict())
        assert all(parameter.grad is None for parameter in model.parameters())


@everywhere
@pytest.mark.parametrize("name", DTYPES)
def test_weights_preserve_all_bits_of_torch_dtypes(where: str, name: str) -> None:
    dtype = getattr(torch, name, None)
    bits = torch.randint(0, 2 if name == "bool" else 256, (1024,), dtype=torch.uint8)
    trained = {
        "w": bits.view(dtype).reshape(2, -1),
        "scalar": bits[:16].view(dtype)[0],
        "empty": torch.empty(0, 3),
    }
    with Weights(trained) as weights:
        reader = reader_of(weights, where)
        weights.publish()
        reader.refresh()
        assert equal_bits(reader.values, trained)
        trained["w"].view(torch.uint8)[0, :64] = 1
        weights.publish()
        reader.refresh()
        assert equal_bits(reader.values, trained)


@everywhere
def test_refresh_preserves_nan_payloads(where: str) -> None:
    """The weights contain all 16-bit values, including every NaN of ``bfloat16``."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    trained = {"w": torch.zeros(2**16, dtype=torch.bfloat16)}
    with Weights(trained) as weights:
        reader = reader_of(weights, where)
        weights.publish()
        reader.refresh()
        trained["w"][::3] = every[::3]
        weights.publish()
        reader.refresh()
        assert equal_bits(reader.values, trained)
        trained["w"][:] = every
        weights.publish()
        reader.refresh()
        assert equal_bits(reader.values, trained)


@everywhere
def test_refresh_fills_transposed_tensors_and_tensors_that_require_gradients(where: str) -> None:
    trained = {"w": torch.arange(6.0).view(2, 3).t(), "v": torch.ones(3, requires_grad=True)}
    model = {"w": torch.zeros(2, 3).t(), "v": torch.zeros(3, requires_grad=True)}
    with Weights(trained) as weights:
        weights.publish()
        reader_of(weights, where).refresh(model)
    assert equal_bits(model, trained)
    assert model["v"].requires_grad
    assert model["w"].stride() == (1, 3)


def test_arrays_and_tensors_of_equal_dtype_are_interchangeable() -> None:
    with Weights({"w": torch.ones(3)}) as weights:
        weights.publish()
        array = {"w": np.zeros(3, "f4")}
        weights.reader().refresh(array)
        assert array["w"].tolist() == [1, 1, 1]
    with Weights(array) as weights:
        weights.publish()
        tensor = {"w": torch.zeros(3)}
        weights.reader().refresh(tensor)
        assert tensor["w"].tolist() == [1, 1, 1]


def test_weights_reject_tensors_without_plain_memory() -> None:
    for value in (torch.ones(3).to_sparse(), torch.ones(3, device="meta"), {"extra": 1}):
        with pytest.raises(TypeError, match="Weights: w must be a dense torch tensor or a NumPy array"):
            Weights({"w": value})


def test_module_on_a_device_is_published_and_refreshed() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    trained, model = network().cuda(), network(1).cuda()
    with Weights(trained) as weights:
        weights.publish()
        weights.reader().refresh(model)
    assert equal_bits(
        {name: value.cpu() for name, value in model.state_dict().items()},
        {name: value.cpu() for name, value in trained.state_dict().items()},
    )
