"""Entries of torch's operator database, and samples of their arguments.

An entry is one operator with one kind of check (forward, inplace or backward) and one dtype. Samples are
created on the CPU. :func:`moved` copies a sample to a device. A view is copied with its whole storage, so
that strides, offsets and overlaps stay the same.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

from support.optional_packages import optional

torch = optional("torch")

KINDS = (
    ("forward", "float32"),
    ("inplace", "float32"),
    ("backward", "float32"),
    ("forward", "int64"),
    ("forward", "bool"),
    ("inplace", "int64"),
    ("inplace", "bool"),
    ("forward", "complex64"),
    ("inplace", "complex64"),
    ("backward", "complex64"),
    ("forward", "complex128"),
    ("inplace", "complex128"),
    ("backward", "complex128"),
)
MOST_SAMPLES = {"float32": 4, "int64": 3, "bool": 3, "complex64": 4, "complex128": 4}
SEED = 1
CPU_ARGUMENTS = frozenset({"tensor_split"})
"""Operators whose tensor arguments, except for the input, must be on the CPU for every device."""


class Entry(NamedTuple):
    """One operator of the database with one kind of check and one dtype."""

    kind: str
    dtype: str
    op: Any

    @property
    def name(self) -> str:
        variant = f".{self.op.variant_test_name}" if self.op.variant_test_name else ""
        return f"{self.kind} {self.dtype} {self.op.name}{variant}"


def entries(kind: str, dtype: str) -> list[Entry]:
    """Return the entries of a kind and dtype, sorted by name."""
    from torch.testing._internal.common_methods_invocations import op_db  # this import takes five seconds

    found = []
    for op in op_db:
        supported = getattr(torch, dtype) in op.supported_dtypes("cpu")
        runs = {
            "forward": True,
            "inplace": op.get_inplace() is not None,
            "backward": op.supports_autograd and getattr(torch, dtype) in op.supported_backward_dtypes("cpu"),
        }
        if supported and runs[kind]:
            found.append(Entry(kind, dtype, op))
    return sorted(found, key=lambda entry: entry.name)


def samples(entry: Entry, most: int) -> list[Any]:
    """Return the first samples of an entry. For in-place checks, omit samples that broadcast their input."""
    torch.manual_seed(SEED)
    requires_grad = entry.kind == "backward"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = entry.op.sample_inputs("cpu", getattr(torch, entry.dtype), requires_grad=requires_grad)
        usable = (one for one in found if entry.kind != "inplace" or not one.broadcasts_input)
        return list(itertools.islice(usable, most))


def moved(value: Any, device: Any) -> Any:
    """Copy the tensors in a value to a device, and replace CPU devices with the device."""
    if isinstance(value, torch.Tensor):
        return moved_tensor(value, device)
    if isinstance(value, (list, tuple)):
        parts = [moved(one, device) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {key: moved(one, device) for key, one in value.items()}
    if isinstance(value, torch.device) or value == "cpu":
        return torch.device(device)
    return value


def moved_tensor(tensor: Any, device: Any) -> Any:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)
    plain = tensor.detach()
    conjugated, negated = plain.is_conj(), plain.is_neg()
    plain = torch._neg_view(plain) if negated else plain
    plain = plain.conj() if conjugated else plain
    size = plain.untyped_storage().nbytes() // plain.element_size()
    whole = torch.empty(0, dtype=plain.dtype).set_(plain.untyped_storage(), 0, (size,))
    there = whole.to(device, copy=True).as_strided(plain.shape, plain.stride(), plain.storage_offset())
    there = there.conj() if conjugated else there
    there = torch._neg_view(there) if negated else there
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(there.detach(), tensor.requires_grad)
    return there.detach().requires_grad_(tensor.requires_grad)


def tensors(value: Any) -> Iterator[Any]:
    """Yield the tensors in a value."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors(one)
