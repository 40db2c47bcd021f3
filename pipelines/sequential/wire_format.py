"""How a micro-batch travels between processes: as a plain tuple, with the memory of its tensor beside it.

Between two micro-batches a part has computed with megabytes of parameters, so whatever runs then is no longer
in the core's caches and takes five or ten times as long as in a loop of its own. So what runs is little: a
tensor goes as its memory, the name of its type and its shape, past the pickling of tensors. All others,
within tuples and dictionaries for example, go as they always do.

What arrives through a channel may be changed, so a large tensor gets a private mapping of its memory: a page
fault for every few pages that are read, and as much again when it goes. A part that begins with a layer which
only reads its input does without, and reads where the part before, or the program, has written.
"""

from __future__ import annotations

import warnings
from pickle import PickleBuffer
from typing import Any

import torch
from torch import Tensor

from flowchan._core import View
from flowchan.pipelines.sequential.parts import Part, may_write
from flowchan.pipelines.sequential.tensor_trees import Micro

_NAMES = {
    kind: str(kind).removeprefix("torch.")
    for kind in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip
_KINDS = {name: kind for kind, name in _NAMES.items()}

Form = tuple[str, tuple[int, ...]] | None
"""Type and shape of a tensor of which only the memory travels; ``None`` for any other value."""

Sent = tuple[int, int, int, Any, dict[str, Tensor | None], tuple[tuple[float, float], ...], Form]
"""A :class:`Micro` on its way: its fields, and the form of its value."""


def closed(value: Any) -> tuple[Any, Form]:
    """The value as it goes into the channel to another process, and its form."""
    if type(value) is not Tensor or not _is_plain(value):
        return value, None
    memory = PickleBuffer(View.of(value.data_ptr(), value.nbytes, value))
    return memory, (_NAMES[value.dtype], tuple(value.shape))


def _is_plain(tensor: Tensor) -> bool:
    """Whether memory, type and shape are all there is to a tensor."""
    return (
        tensor.dtype in _NAMES
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not (tensor.requires_grad or tensor.is_neg() or tensor.__dict__)
        and tensor.data_ptr() != 0
    )


def opened(memory: Any, form: tuple[str, tuple[int, ...]], only_reads: bool) -> Tensor:
    """The tensor that came out of the channel. ``only_reads``: it is not going to be changed."""
    name, shape = form
    if not only_reads:
        memory = memory.private() if isinstance(memory, View) else bytearray(memory)  # little comes as bytes
    return torch.frombuffer(memory, dtype=_KINDS[name]).view(shape)


def received(item: Sent) -> Micro:
    """What came out at the end, for the program to do with as it likes."""
    *fields, form = item
    micro = Micro(*fields)
    return micro if form is None else micro._replace(value=opened(micro.value, form, only_reads=False))


def only_reads(part: Part) -> bool:
    """Whether a part leaves what it gets as it is."""
    return not may_write(part.module)


def expect_reading() -> None:
    """torch says, once in each process, that it has no tensors that can't be changed. That is known."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.frombuffer(b"0", dtype=torch.uint8)
