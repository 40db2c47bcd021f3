"""Define the format of the messages between a client and a node.

A command is a flat sequence in the command list of a batch. The sequence consists of the template ID, the
command number, the IDs of new outputs, the IDs of inputs, and the scalars. The template determines the number
of outputs, inputs and scalars. All IDs are explicit. If a signal handler or a second thread interrupts a
command, the IDs of later commands therefore stay correct.
"""

from __future__ import annotations

import marshal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

Batch = tuple[int, list[Any], list[int]]
"""Position of the batch in the client's stream of numbers, the commands, and the ids to free after them.

The ids belong to tensors and templates."""


def pack_batch(position: int, commands: Sequence[Any], frees: Sequence[int]) -> bytes:
    """Serialise a batch. Scalars keep their Python types."""
    message: Any = (position, commands, frees)
    return marshal.dumps(message)


def unpack_batch(data: bytes) -> Batch:
    """Deserialise a batch."""
    batch: Batch = marshal.loads(data)
    return batch


@dataclass(frozen=True)
class NodeDevice:
    """Placeholder for the device on which a node runs its kernels."""


@dataclass(frozen=True)
class Slot:
    """Placeholder for an input tensor of a command, by its position."""

    place: int


@dataclass(frozen=True)
class Payload:
    """Placeholder for a scalar of a command, by its position."""

    place: int


class TemplateSpec(NamedTuple):
    """Description of one template's commands, which is sent to the node.

    Attributes:
        operation: Name of the operator with its overload, such as ``aten::add.Tensor``.
        args: Positional arguments with placeholders; lists are tuples.
        kwargs: Keyword arguments with placeholders.
        inputs: Number of input tensors.
        scalars: Number of scalars.
        kept: Indices of the new tensors in the flat results; None for a single new result.
        mutated: Indices of the inputs that the operation modifies.
        dtype: Default dtype at the time when the template was made.
        module: Python module that defines the operator, if the operator is a custom one. The node imports
            this module.
    """

    operation: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: int
    scalars: int
    kept: tuple[int, ...] | None
    mutated: tuple[int, ...]
    dtype: Any
    module: str = ""

    @property
    def outputs(self) -> int:
        """Number of new tensors."""
        return 1 if self.kept is None else len(self.kept)

    @property
    def size(self) -> int:
        """Number of values in a command."""
        return 2 + self.outputs + self.inputs + self.scalars


class TensorForm(NamedTuple):
    """Metadata of a strided tensor.

    Attributes:
        shape: Sizes of the dimensions.
        stride: Strides of the dimensions.
        offset: Offset in the storage.
        dtype: Data type.
        conj: torch's conjugate bit.
        neg: torch's negative bit.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conj: bool
    neg: bool


def form_of(tensor: torch.Tensor) -> TensorForm:
    """Return the metadata of a tensor."""
    offset = int(tensor.storage_offset())
    bits = tensor.is_conj(), tensor.is_neg()
    return TensorForm(tuple(tensor.shape), tensor.stride(), offset, tensor.dtype, *bits)


class NodeReply(NamedTuple):
    """A node's answer to the question with this number."""

    question: int
    value: Any
    failed: bool = False


def flat_results(result: Any) -> list[Any]:
    """Return the leaves of an operation's result, in order."""
    if isinstance(result, (tuple, list)):
        return [leaf for part in result for leaf in flat_results(part)]
    return [result]
