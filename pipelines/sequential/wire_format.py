"""Define the format of micro-batches between processes: a tuple, with the tensor's memory kept separate.

A part computes with megabytes of parameters between two messages. The parameters evict all code from the
core's caches. The code that sends and receives is therefore five to ten times slower than in a tight loop.
For this reason, this path is kept short. A tensor is sent as its memory, the name of its dtype and its shape,
without being pickled. All other values, such as tensors inside tuples and dictionaries, are pickled.

A receiver may change a value from a channel. A large tensor therefore gets a private mapping of its memory.
Mapping costs one page fault for every few pages that are read, and unmapping takes about as long again.
If the first layer of a part only reads its input, the part avoids the mapping and reads the memory that the
sender has written.
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
"""Dtype and shape of a tensor that is sent as plain memory; ``None`` for any other value."""

Sent = tuple[int, int, int, Any, dict[str, Tensor | None], tuple[tuple[float, float], ...], Form]
"""The fields of a :class:`Micro`, and the form of its value."""


def closed(value: Any) -> tuple[Any, Form]:
    """Return the objects that are sent to another process in place of a value, and the value's form."""
    if type(value) is not Tensor or not _is_plain(value):
        return value, None
    memory = PickleBuffer(View.of(value.data_ptr(), value.nbytes, value))
    return memory, (_NAMES[value.dtype], tuple(value.shape))


def _is_plain(tensor: Tensor) -> bool:
    """Return True if memory, dtype and shape describe the tensor completely."""
    return (
        tensor.dtype in _NAMES
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not (tensor.requires_grad or tensor.is_neg() or tensor.__dict__)
        and tensor.data_ptr() != 0
    )


def opened(memory: Any, form: tuple[str, tuple[int, ...]], only_reads: bool) -> Tensor:
    """Return the received tensor. If ``only_reads`` is true, the receiver never changes the tensor."""
    name, shape = form
    if not only_reads:
        # The receiver may change the tensor, so give it private memory. A large value is a view of shared
        # memory, and a small value is bytes.
        memory = memory.private() if isinstance(memory, View) else bytearray(memory)
    return torch.frombuffer(memory, dtype=_KINDS[name]).view(shape)


def received(item: Sent) -> Micro:
    """Return a received micro-batch whose value the program may change."""
    *fields, form = item
    micro = Micro(*fields)
    return micro if form is None else micro._replace(value=opened(micro.value, form, only_reads=False))


def only_reads(part: Part) -> bool:
    """Return True if the part never changes its input in place."""
    return not may_write(part.module)


def expect_reading() -> None:
    """Suppress torch's warning about read-only tensors, by triggering the warning in advance."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.frombuffer(b"0", dtype=torch.uint8)
