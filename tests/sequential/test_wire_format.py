"""Test that micro-batches arrive unchanged through a channel between processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flowchan import Channel
from flowchan.pipelines.sequential.parts import Part
from flowchan.pipelines.sequential.wire_format import closed, expect_reading, only_reads, opened, received

pytestmark = pytest.mark.filterwarnings("ignore:The given buffer is not writable")

KINDS = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
VALUES = {
    **{str(kind): (torch.arange(200_000) % 3).to(kind).reshape(20, -1) for kind in KINDS},
    "little": torch.randn(3, 1),
    "empty": torch.empty(0, 4),
    "no dimension": torch.tensor(7.0),
    "with gaps": torch.randn(400, 100)[:, ::2],
    "turned": torch.randn(400, 100).T,
    "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
    "negative of an imaginary part": torch.randn(4, dtype=torch.complex64).conj().imag,
    "sparse": torch.eye(4).to_sparse(),
}


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("name", VALUES)
def test_tensor_arrives_unchanged(name: str, reads: bool) -> None:
    value = VALUES[name]
    arrived = crossed(value, reads)
    assert arrived.dtype == value.dtype
    assert arrived.layout == value.layout
    assert torch.equal(arrived.to_dense(), value.to_dense())


def test_nested_value_arrives_unchanged() -> None:
    arrived = crossed({"a": torch.ones(3), "b": (torch.zeros(3), "text")}, reads=False)
    assert torch.equal(arrived["a"], torch.ones(3))
    assert torch.equal(arrived["b"][0], torch.zeros(3))
    assert arrived["b"][1] == "text"


def test_parameter_still_requires_grad_on_arrival() -> None:
    assert crossed(nn.Parameter(torch.ones(3)), reads=False).requires_grad
    assert crossed(torch.ones(3).requires_grad_(), reads=False).requires_grad


def test_received_micro_batch_is_complete() -> None:
    channel: Channel[Any] = Channel(across="processes")
    value, form = closed(torch.ones(200_000))
    channel.put((5, 2, 8, value, {"skip": torch.ones(2)}, ((1.0, 2.5),), form))
    micro = received(channel.get())
    assert micro[:3] == (5, 2, 8)
    assert torch.equal(micro.value, torch.ones(200_000))
    assert torch.equal(micro.skips["skip"], torch.ones(2))
    assert micro.events == ((1.0, 2.5),)


@pytest.mark.parametrize("elements", [4, 200_000])
def test_receiver_can_change_its_copy(elements: int) -> None:
    """The item in the channel must not change, because another worker may take it again."""
    channel: Channel[Any] = Channel(across="processes")
    channel.put(closed(torch.zeros(elements)))
    memory, form = channel.get()
    opened(memory, form, only_reads=False).add_(1)
    assert not opened(memory, form, only_reads=False).any()


def test_part_that_only_reads_its_input_gets_no_copy() -> None:
    channel: Channel[Any] = Channel(across="processes")
    channel.put(closed(torch.zeros(200_000)))
    memory, form = channel.get()
    first, second = (opened(memory, form, only_reads=True) for _ in range(2))
    assert first.data_ptr() == second.data_ptr()


class Own(nn.Linear):
    """User-defined layer, which may write into its input."""


@pytest.mark.parametrize(
    ("layers", "reads"),
    [
        ([nn.Linear(2, 2), nn.ReLU(inplace=True)], True),
        ([nn.Sequential(nn.Conv2d(1, 1, 1))], True),
        ([nn.ReLU(inplace=True), nn.Linear(2, 2)], False),
        ([nn.Flatten(), nn.ReLU(inplace=True)], False),
        ([Own(2, 2)], False),
    ],
)
def test_only_reads_depends_on_the_first_layer(layers: list[nn.Module], reads: bool) -> None:
    assert only_reads(Part(0, nn.Sequential(*layers))) == reads


def test_reading_a_received_tensor_does_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    expect_reading()
    crossed(torch.zeros(200_000), reads=True)
    assert not recwarn.list


def crossed(value: Any, reads: bool) -> Any:
    channel: Channel[Any] = Channel(across="processes")
    channel.put(closed(value))
    arrived, form = channel.get()
    channel.close()
    return arrived if form is None else opened(arrived, form, reads)
