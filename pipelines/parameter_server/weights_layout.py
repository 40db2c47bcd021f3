"""Lay out the tensors and arrays of a model in one block of bytes."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flowchan.items.text import shown

_ALIGNMENT = 64
Tensors = Mapping[str, Any]
"""NumPy arrays or torch tensors by name."""
Read = Callable[[memoryview, int], None]
"""Function that fills memory with the bytes of the block from an offset onwards."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor or array in a layout.

    Attributes:
        name: Name of the tensor or array.
        dtype: Data type, from torch or NumPy.
        shape: Shape of the tensor or array.
        offset: Offset of the array's first byte from the start of the block.
        nbytes: Size in bytes.
    """

    name: str
    dtype: Any
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def new(self) -> Any:
        """Return an uninitialized tensor or array with this dtype and shape."""
        if _is_torch_dtype(self.dtype):
            import torch

            return torch.empty(self.shape, dtype=self.dtype)
        import numpy

        return numpy.empty(self.shape, self.dtype)

    def write(self, value: Any, memory: memoryview) -> None:
        """Copy a tensor or array into the block."""
        if not self.nbytes:
            return
        if _is_torch_dtype(self.dtype):
            import torch

            count = self.nbytes // self.dtype.itemsize
            target = torch.frombuffer(memory, dtype=self.dtype, count=count, offset=self.offset)
            target.view(self.shape).copy_(value.detach())
        else:
            import numpy

            numpy.ndarray(self.shape, self.dtype, memory, self.offset)[...] = value


class WeightsLayout:
    """Layout of all tensors and arrays of a model.

    Args:
        call: Name of the calling function, for error messages.
        tensors: Tensors and arrays by name.

    Raises:
        TypeError: A value is not a dense tensor or array.
    """

    def __init__(self, call: str, tensors: Tensors) -> None:
        entries, end = [], 0
        for name, value in tensors.items():
            dtype, shape = _form(call, name, value)
            nbytes = _nbytes(value)
            entries.append(_Entry(name, dtype, shape, end, nbytes))
            end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self._entries = tuple(entries)
        self.size = end
        """Size of the block in bytes, a multiple of 64."""

    def checked(self, call: str, tensors: Tensors) -> Tensors:
        """Return ``tensors`` if their names, dtypes and shapes match the layout.

        Raises:
            TypeError: A value is not a dense tensor or array.
            ValueError: A name, dtype or shape differs.
        """
        ours = [entry.name for entry in self._entries]
        for message, names in (
            ("must contain", _missing(ours, tensors)),
            ("must not contain", _missing(tensors, ours)),
        ):
            if names:
                raise ValueError(
                    f"{call}: the weights {message} {names[0]!r}; they must have the names that were "
                    "passed to Weights"
                )
        for entry in self._entries:
            dtype, shape = _form(call, entry.name, tensors[entry.name])
            if (_dtype_name(dtype), shape) != (_dtype_name(entry.dtype), entry.shape):
                raise ValueError(
                    f"{call}: {entry.name} must have dtype {_dtype_name(entry.dtype)} and shape "
                    f"{entry.shape}, got {_dtype_name(dtype)} and {shape}"
                )
        return tensors

    def new(self) -> dict[str, Any]:
        """Return uninitialized tensors and arrays with this layout."""
        return {entry.name: entry.new() for entry in self._entries}

    def write(self, tensors: Tensors, memory: memoryview) -> None:
        """Copy tensors into the block."""
        for entry in self._entries:
            entry.write(tensors[entry.name], memory)

    def fill(self, tensors: Tensors, read: Read) -> None:
        """Overwrite tensors with the values in a block.

        Args:
            tensors: Tensors and arrays with this layout.
            read: Function that reads from the block.
        """
        for entry in self._entries:
            if not entry.nbytes:
                continue
            target = tensors[entry.name]
            if _is_dense(target):
                read(_bytes_of(target, entry.nbytes), entry.offset)
                continue
            staging = _Entry(entry.name, target.dtype, entry.shape, 0, entry.nbytes).new()
            read(_bytes_of(staging, entry.nbytes), entry.offset)
            if _is_tensor(target):
                target.detach().copy_(staging)
            else:
                target[...] = staging


def tensors_of(call: str, argument: str, source: Any) -> Tensors:
    """Return the tensors of a module or a mapping.

    Raises:
        TypeError: ``source`` is neither a module nor a mapping.
    """
    if isinstance(source, Mapping):
        return source
    if callable(getattr(source, "state_dict", None)):
        return source.state_dict()  # type: ignore[no-any-return]
    raise TypeError(
        f"{call}: {argument} must be an nn.Module or a mapping from names to tensors or arrays, got "
        f"{shown(source)}"
    )


def _missing(names: Iterable[str], among: Iterable[str]) -> list[str]:
    known = set(among)
    return [name for name in names if name not in known]


def _form(call: str, name: str, value: Any) -> tuple[Any, tuple[int, ...]]:
    """Return the dtype and shape of a tensor or array."""
    numpy = sys.modules.get("numpy")
    if _is_tensor(value):
        torch = sys.modules["torch"]
        plain = type(value) in (torch.Tensor, torch.nn.Parameter)
        if plain and value.layout == torch.strided and not value.is_quantized and not value.is_meta:
            return value.dtype, tuple(value.shape)
    elif numpy is not None and isinstance(value, numpy.ndarray) and not value.dtype.hasobject:
        return value.dtype, value.shape
    raise TypeError(
        f"{call}: {name} must be a dense torch tensor or a NumPy array without Python objects, got "
        f"{shown(value)}; leave it out of the weights"
    )


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_torch_dtype(dtype: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(dtype, torch.dtype)


def _dtype_name(dtype: Any) -> str:
    """Return the name that torch and NumPy share for a dtype, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def _nbytes(value: Any) -> int:
    return value.numel() * value.element_size() if _is_tensor(value) else int(value.nbytes)


def _is_dense(value: Any) -> bool:
    """Return whether the elements are in CPU memory, in order and without gaps."""
    if _is_tensor(value):
        return bool(value.is_cpu and value.is_contiguous() and not value.is_conj() and not value.is_neg())
    return bool(value.flags.c_contiguous and value.flags.writeable)


def _bytes_of(value: Any, nbytes: int) -> memoryview:
    """Return the writable memory of a dense tensor or array."""
    address = value.data_ptr() if _is_tensor(value) else value.__array_interface__["data"][0]
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
