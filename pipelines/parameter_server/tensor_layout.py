"""Lay out named arrays and tensors in a block of memory."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from flowchan.items.text import shown

ALIGNMENT = 64
"""Alignment of each tensor in bytes."""

Form = Literal["mapping", "tensor", "object"]
"""Kind of state that the user passed: a mapping of tensors, a single tensor, or any other object."""

ONLY = ""
"""Name of a single tensor."""


class Entry(NamedTuple):
    """Type and location of one array or tensor.

    Attributes:
        name: Name of the tensor.
        library: Library of the tensor: ``"torch"`` or ``"numpy"``.
        type_name: Name of the element type in this library.
        shape: Shape of the tensor.
        offset: Offset in the block, in bytes.
        size: Size in bytes.
        slot: Whether the entry is optimizer state, which clients do not see.
    """

    name: str
    library: str
    type_name: str
    shape: tuple[int, ...]
    offset: int
    size: int
    slot: bool = False

    @property
    def dtype(self) -> Any:
        """Return the element type."""
        if self.library == "torch":
            import torch

            return getattr(torch, self.type_name)
        import numpy

        return numpy.dtype(self.type_name)

    def view(self, memory: mmap.mmap, base: int) -> Any:
        """Return a view of the array or tensor in mapped memory.

        Args:
            memory: Mapped memory.
            base: Offset of the block in bytes.
        """
        if self.library == "numpy":
            import numpy

            return numpy.ndarray(self.shape, self.dtype, memory, base + self.offset)
        import torch

        if self.size == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        count = self.size // self.dtype.itemsize
        return torch.frombuffer(memory, dtype=self.dtype, count=count, offset=base + self.offset).view(
            self.shape
        )


class Layout(NamedTuple):
    """Entries of one shard, and the size of its block in bytes."""

    entries: tuple[Entry, ...]
    size: int

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the entries."""
        return tuple(entry.name for entry in self.entries)


def is_array(value: Any) -> bool:
    """Return whether a value is a dense torch tensor or a NumPy array of plain numbers."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return bool(value.layout == torch.strided and not value.is_quantized)
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray):
        return False
    return not value.dtype.hasobject and value.dtype.names is None


def form_of(given: Any) -> Form:
    """Return whether the user passed a mapping, a single tensor or another object."""
    if is_array(given):
        return "tensor"
    is_mapping = isinstance(given, Mapping) and len(given) > 0
    if is_mapping and all(isinstance(name, str) and is_array(value) for name, value in given.items()):
        return "mapping"
    return "object"


def named(given: Any, form: Form) -> dict[str, Any]:
    """Return the tensors by name. A single tensor gets the name ``ONLY``; an object has no tensors."""
    return dict(given) if form == "mapping" else {ONLY: given} if form == "tensor" else {}


def shared_out(tensors: Mapping[str, Any], shards: int) -> list[list[str]]:
    """Distribute tensor names over shards of about equal size, starting with the largest tensor."""
    shares: list[list[str]] = [[] for _ in range(shards)]
    sizes = [0] * shards
    for name in sorted(tensors, key=lambda name: (-size_of(tensors[name]), name)):
        lightest = min(range(shards), key=lambda shard: (sizes[shard], len(shares[shard])))
        shares[lightest].append(name)
        sizes[lightest] += size_of(tensors[name])
    return [[name for name in tensors if name in share] for share in map(set, shares)]


def size_of(value: Any) -> int:
    """Return the size of an array or a tensor in bytes."""
    return int(value.nbytes)


def pushed_size(values: Mapping[str, Any], rows: Mapping[str, Any] | None) -> int:
    """Return the size of pushed tensors in bytes, including row IDs."""
    ids = [rows[name] for name in values] if rows else []
    return sum(size_of(value) for value in [*values.values(), *ids] if hasattr(value, "nbytes"))


def layout_of(tensors: Mapping[str, Any], slots: Mapping[str, Any]) -> Layout:
    """Return the layout of tensors and of their optimizers' slots."""
    entries, end = [], 0
    for name, value in [*tensors.items(), *slots.items()]:
        is_torch = type(value).__module__.partition(".")[0] == "torch" or hasattr(value, "detach")
        type_name = str(value.dtype).removeprefix("torch.") if is_torch else value.dtype.str
        size = size_of(value)
        entries.append(
            Entry(
                name,
                "torch" if is_torch else "numpy",
                type_name,
                tuple(value.shape),
                end,
                size,
                name in slots,
            )
        )
        end = -(-(end + size) // ALIGNMENT) * ALIGNMENT
    return Layout(tuple(entries), end)


def plain(value: Any) -> Any:
    """Detach a tensor and move it to the CPU; return an array unchanged."""
    return value.detach().cpu() if hasattr(value, "detach") else value


def copied(value: Any) -> Any:
    """Return a copy of an array or a tensor."""
    return value.clone() if hasattr(value, "clone") else value.copy()


def chosen(known: Iterable[str], names: Iterable[str] | None, call: str) -> list[str]:
    """Return the chosen names, or all names by default.

    Raises:
        KeyError: The server has no tensor with one of the names.
    """
    known = list(known)
    if names is None:
        return known
    names = [names] if isinstance(names, str) else list(names)
    for name in names:
        if name not in known:
            have = ", ".join(map(repr, known[:5]))
            raise KeyError(f"{call}: names must be names of the server's tensors ({have}), got {shown(name)}")
    return names
