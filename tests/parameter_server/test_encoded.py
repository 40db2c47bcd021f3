"""Test built-in codes and user-defined codes for pushes. Some codes decode the values of all workers
together."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from flowchan.collective.training.gradients import QSGD, TopK
from flowchan.pipelines import ParameterServer
from flowchan.pipelines.parameter_server.encoded import Encoder, gathered
from flowchan.pipelines.parameter_server.push_rules import apply

pytestmark = pytest.mark.usefixtures("one_compute_thread")


def values(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {"w": torch.randn(40, 50).to(dtype), "b": torch.randn(()).to(dtype)}


@pytest.mark.parametrize(("codes", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_half_precision_code_rounds_each_element(codes: str, dtype: torch.dtype) -> None:
    encoded = Encoder().encode(values(), codes)
    for name, x in values().items():
        assert torch.equal(encoded[name].decoded(), x.to(dtype).float())
    assert len(pickle.dumps(encoded["w"].values)) < 40 * 50 * 2 + 1000


def test_topk_code_keeps_one_residual_per_tensor() -> None:
    encoder, total = Encoder(), {name: torch.zeros_like(x) for name, x in values().items()}
    codes = lambda: TopK(0.25)  # noqa: E731
    for _ in range(12):
        for name, one in encoder.encode(values(), codes).items():
            total[name] += one.decoded()
    for name, x in values().items():
        residual = encoder._made[name][1]._residual
        torch.testing.assert_close(total[name] + residual.view(x.shape), 12 * x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_qsgd_code_is_unbiased_and_sends_one_byte_per_element(dtype: torch.dtype) -> None:
    encoder, x = Encoder(), values(dtype)["w"]
    rounds = [encoder.encode({"w": x}, "qsgd")["w"] for _ in range(300)]
    unit = float(torch.linalg.vector_norm(x.double())) / 127
    mean = torch.stack([one.decoded().double() for one in rounds]).mean(0)
    # 6 sigma, plus bfloat16 rounding
    assert float((mean - x.double()).abs().max()) < unit * (0.5 * 6 / 300**0.5 + 0.05)
    assert all(float((one.decoded().double() - x.double()).abs().max()) < unit * 1.05 for one in rounds)
    assert rounds[0].values[0][1].dtype == torch.int8


@pytest.mark.parametrize("levels", [0, 128, 1.5])
def test_qsgd_rejects_an_invalid_number_of_levels(levels: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="QSGD: levels must be"):
        QSGD(levels)


@pytest.mark.parametrize("x", [torch.zeros(3), torch.tensor([0.0, -5.0, 0.0])])
def test_qsgd_preserves_zeros_and_a_single_nonzero_element(x: torch.Tensor) -> None:
    assert torch.allclose(Encoder().encode({"x": x}, "qsgd")["x"].decoded(), x)


class Pickled:
    """A code with pytorch_ps_mpi's interface, whose ``decode`` gets the encoded values of all ranks."""

    def encode(self, x: torch.Tensor) -> dict[str, Any]:
        where = x.nonzero()[:, 0]
        return {"indices": where.tolist(), "values": x[where].numpy(), "note": b"\x29" * 32}

    def decode(self, codes: list[dict[str, Any]], out: torch.Tensor) -> None:
        out.zero_()
        for code in codes:
            out[code["indices"]] += torch.from_numpy(code["values"])
        out /= len(codes)


@pytest.mark.parametrize("codes", [Pickled, Pickled()], ids=["class", "object"])
def test_user_defined_code_may_send_any_picklable_value(codes: Any) -> None:
    x = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    encoded = pickle.loads(pickle.dumps(Encoder().encode({"x": x}, codes)))
    assert torch.equal(encoded["x"].decoded(), x)


def test_decode_receives_the_values_of_all_workers_at_once() -> None:
    """In pytorch_ps_mpi, ``codes`` holds the encoded values of all ranks, so ``decode`` can combine them."""

    class Median:
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return x

        def decode(self, codes: list[torch.Tensor], out: torch.Tensor) -> None:
            out.copy_(torch.stack(codes).median(0).values)

    workers = [Encoder().encode({"x": torch.tensor([x, -x])}, Median) for x in (1.0, 100.0, 3.0)]
    out = torch.zeros(2)
    apply("add", torch.ones(2), gathered(workers)["x"], 1.0, out)
    assert out.tolist() == [4.0, -2.0]


def test_push_averages_gathered_values_and_multiplies_by_scale() -> None:
    workers = [Encoder().encode({"x": torch.tensor([x])}, "fp16") for x in (1.0, 2.0, 6.0)]
    out = torch.zeros(1)
    apply("add", torch.zeros(1), gathered(workers)["x"], 3.0, out)
    assert out.tolist() == [9.0]
    with pytest.raises(ValueError, match="gathered: encodings must have the same tensor names"):
        gathered([workers[0], {}])


def test_encoded_tensor_can_be_pushed_to_an_array() -> None:
    out = np.zeros(2, np.float32)
    apply("copy", out, Encoder().encode({"x": np.array([1.5, 2.0], np.float32)}, "bf16")["x"], 1.0, out)
    assert out.tolist() == [1.5, 2.0]


@pytest.mark.parametrize("codes", ["zip", None, 3])
def test_client_rejects_an_unknown_code(codes: Any) -> None:
    with pytest.raises(
        ValueError, match="push: codes must be 'fp16', 'bf16', 'topk', 'qsgd', a Code or a function"
    ):
        Encoder().encode(values(), codes)


def test_client_rejects_a_function_that_returns_no_code() -> None:
    with pytest.raises(TypeError, match=r"push: codes must create objects with encode\(x\) and decode"):
        Encoder().encode(values(), lambda: 3)


class Lazy:
    """A code that creates its memory in the first call."""

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        self.left = x + getattr(self, "left", 0.0)
        return torch.zeros_like(x)

    def decode(self, values: list[Any], out: torch.Tensor) -> None:
        out.copy_(values[0])


@pytest.mark.parametrize("earlier", [0, 1], ids=["first", "later"])
@pytest.mark.parametrize("make", [lambda: "topk", lambda: Lazy, Lazy], ids=["topk", "class", "object"])
def test_push_that_was_not_sent_does_not_change_the_codes(make: Any, earlier: int) -> None:
    codes, x = make(), torch.arange(4.0)
    with ParameterServer({"w": torch.zeros(4)}, on="thread") as server:
        client, slow = server.client(), server.client()
        slow.pull()
        for _ in range(earlier):
            client.push({"w": x}, codes=codes).wait(60)
        client.push({"w": torch.zeros(4)}).wait(60)
        for _ in range(2):
            with pytest.raises(TimeoutError):
                client.push({"w": x}, codes=codes, max_staleness=0, stale="wait", timeout=0.01)
        client.push({"w": x}, codes=codes).wait(60)
        code = client._encoder._made["w"][1]
        left = code._residual if codes == "topk" else code.left
        assert torch.equal(client.pull()["w"] + left, (earlier + 1) * x)


def test_topk_accepts_an_empty_tensor() -> None:
    with ParameterServer({"w": torch.zeros(4), "none": torch.zeros(0)}, on="thread") as server:
        client = server.client()
        client.push({"w": torch.ones(4), "none": torch.zeros(0)}, codes="topk").wait(60)
        assert client.pull()["w"].sum() == 1
