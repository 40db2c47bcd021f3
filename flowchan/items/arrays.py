"""Transfer arrays, tensors and memory views to other processes.

The contents are sent separately from the pickle, and the receiver reads them in place.

| item | arrives as |
|---|---|
| NumPy array | a read-only array; ``array.copy()`` returns a writable one |
| torch tensor on the CPU | a writable tensor; pages that are written become private copies |
| ``memoryview`` | a read-only ``memoryview`` |
| torch tensor after ``share_memory_()`` | a tensor in the same memory: all processes see each write |
| Polars frame or series, Arrow table, Pillow image | the same type, read in place (``arrow.py``) |
| torch tensor on a CUDA device | a copy on the same device (``transport/device/transfer.py``) |

Each array or tensor is sent separately. Two views of the same memory arrive as two arrays, but an object that
occurs twice in an item arrives once. An array with gaps between its elements arrives without them. A tensor
computed under autograd is rejected, because its autograd graph cannot be sent. A leaf that requires a
gradient still requires one after it arrives.
"""

from __future__ import annotations

import copyreg
import math
import struct
import sys
from collections.abc import Callable, Sequence
from pickle import PickleBuffer
from typing import Any, Literal

from flowchan._core import View
from flowchan.errors import Closed
from flowchan.items import arrow, shared_tensors
from flowchan.transport.device import transfer

MOST_LENT = 2**63
"""A number of bytes that no channel's memory can reach."""

# memoryview.cast accepts only these format codes, so only these can be received.
_CODES = "bBcdfhHiIlLnNqQ?"

_Reducers = dict[Any, Callable[[Any], Any]]
_made: _Reducers = {}
_made_from: tuple[int, ...] = ()
_LIBRARIES = ("numpy", "torch", *arrow.LIBRARIES)


def reducers() -> _Reducers:
    """Return the dispatch table for a pickler.

    The table contains flowchan's reducers for the libraries that are loaded, and all reducers that the
    program has registered.
    """
    global _made, _made_from
    state = len(copyreg.dispatch_table), *[name in sys.modules for name in _LIBRARIES]
    if state != _made_from:
        table: _Reducers = {**copyreg.dispatch_table, memoryview: _reduce_memoryview, View: _reduce_view}
        # While another thread is still importing a module, a type of the module may be undefined. There
        # cannot be instances of that type yet.
        if array := getattr(sys.modules.get("numpy"), "ndarray", None):
            table[array] = _reduce_array
        if tensor := getattr(sys.modules.get("torch"), "Tensor", None):
            table[tensor] = _reduce_tensor
        if storage := getattr(sys.modules.get("torch"), "UntypedStorage", None):
            table[storage] = shared_tensors.reduce_storage
        table.update(arrow.reducers())
        _made, _made_from = table, state
    return _made


def _reduce_memoryview(view: memoryview) -> Any:
    code = view.format
    if code[:1] == "<" and sys.byteorder == "little":  # ctypes writes the byte order as "<"
        code = code[1:]
    if len(code) != 1 or code not in _CODES or struct.calcsize(f"@{code}") != view.itemsize:
        raise TypeError(
            f"the format of a memoryview that is sent must be one of {', '.join(_CODES)}, got "
            f"{view.format!r}; send view.cast('B') or an array"
        )
    return _rebuild_memoryview, (
        PickleBuffer(view if view.c_contiguous else view.tobytes()),
        code,
        view.shape,
    )


def _rebuild_memoryview(buffer: Any, code: str, shape: Sequence[int]) -> memoryview:
    view = memoryview(buffer).toreadonly().cast("B")
    if view.nbytes:
        return view.cast(code, shape)  # type: ignore[call-overload, no-any-return]
    return memoryview(bytes(struct.calcsize(f"@{code}"))).cast(code)[:0]  # type: ignore[call-overload, no-any-return]


def _reduce_view(view: View) -> Any:
    return _same, (PickleBuffer(view),)


def _same(buffer: Any) -> Any:
    return buffer


def _reduce_array(array: Any) -> Any:
    dtype, flags = array.dtype, array.flags
    if dtype.kind not in "biufcmMSU":
        return array.__reduce_ex__(5)
    if not flags.forc:
        array = array.copy(order="C")
    # NumPy does not export datetimes as buffers, so they are sent as integers. As datetimes, they would be
    # pickled at half the speed.
    fortran = flags.fnc
    memory = array.T if fortran else array
    if dtype.kind in "mM":
        memory = memory.view("i8")
    return _rebuild_array, (PickleBuffer(memory), dtype.str, array.shape, "F" if fortran else "C")


def _rebuild_array(buffer: Any, dtype: str, shape: tuple[int, ...], order: Literal["C", "F"]) -> Any:
    import numpy

    return numpy.ndarray(shape, dtype, buffer, order=order)


def _reduce_tensor(tensor: Any) -> Any:
    import torch

    kind = tensor.device.type
    if tensor.requires_grad and not tensor.is_leaf:
        raise TypeError(
            f"a tensor of shape {tuple(tensor.shape)} is part of an autograd graph "
            f"(grad_fn={type(tensor.grad_fn).__name__}); send tensor.detach()"
        )
    if (
        tensor.layout != torch.strided
        or kind not in ("cpu", "cuda")
        or tensor.is_quantized
        or tensor.__dict__
    ):
        return tensor.__reduce_ex__(5)
    if kind == "cpu" and shared_tensors.is_shared(tensor):
        return shared_tensors.reduce_tensor(tensor)
    data = tensor.detach().resolve_conj().resolve_neg()
    if not _is_dense(data):
        data = data.contiguous()
    size = data.numel() * data.element_size()
    if size and not data.data_ptr():  # the storage was freed or has never been allocated
        return tensor.__reduce_ex__(5)
    if kind == "cuda":
        form = data.dtype, tuple(data.shape), data.stride(), tensor.requires_grad
        return transfer.reduce(data, form, size, "cuda")
    memory = View.of(data.data_ptr(), size, data)
    return _rebuild_tensor, (
        PickleBuffer(memory),
        data.dtype,
        data.shape,
        data.stride(),
        tensor.requires_grad,
    )


def _is_dense(tensor: Any) -> bool:
    """Return whether the elements fill their memory without gaps or overlaps, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


tensors_in_place = False
"""Whether received tensors stay in the memory of their channel instead of private pages.

A process may set this if it forks no child that uses these tensors, because both would share their memory.
The nodes of remote tensors set it, because mapping and reading private pages would cost as much as copying
the tensor.
"""


def _writable(view: View) -> View:
    return view if tensors_in_place else view.private()


def _rebuild_tensor(buffer: Any, dtype: Any, shape: Any, stride: Any, requires_grad: bool) -> Any:
    import torch

    if len(memory := memoryview(buffer)) == 0:
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
    else:
        # torch has no read-only tensors, so this process needs memory that it may write to.
        own = _writable(buffer) if isinstance(buffer, View) else bytearray(memory)
        tensor = torch.frombuffer(own, dtype=torch.uint8).view(dtype).as_strided(shape, stride)
    return tensor.requires_grad_(requires_grad)


def loan(  # noqa: D417 - a method of channels and ports
    self: Any, shape: int | Sequence[int], dtype: Any = "float64", timeout: float | None = None
) -> Any:
    """Allocate an array in the channel's memory, to be filled and then put.

    ``put`` then does not copy the array, which may be the whole item or a part of it. The contents of the new
    array are undefined. After the put, the channel owns the array: a NumPy array becomes read-only, and a
    tensor must not be modified. The memory of an array that is never put returns to the channel. Only one
    such array per item is sent in place. ``put`` copies any further ones. On a channel between threads, this
    method returns an ordinary array.

    Args:
        shape: Number of elements in each dimension, or one int.
        dtype: A NumPy dtype (default ``"float64"``), or a torch dtype for a tensor.
        timeout: Seconds to wait for free memory. Default: no limit.

    Returns:
        A NumPy array, or a torch tensor if ``dtype`` is a torch dtype.

    Raises:
        Full: No memory became free within ``timeout`` seconds.
        Closed: The channel is closed.
        ChannelError: Raised by ``put``, if the array has already been put.
        TypeError: ``dtype`` contains Python objects.
        ValueError: ``shape`` is not a non-negative integer or a sequence of them.

    Example:
        >>> from flowchan import Channel
        >>> channel = Channel(across="processes")
        >>> array = channel.loan((2, 3))
        >>> array[:] = 1
        >>> channel.put(array)
        >>> float(channel.get().sum())
        6.0
    """
    sizes = _checked((shape,) if isinstance(shape, int) else shape)
    torch = sys.modules.get("torch")
    as_torch = torch is not None and isinstance(dtype, torch.dtype)
    if not as_torch:
        import numpy

        dtype = numpy.dtype(dtype)
        if dtype.hasobject:
            raise TypeError(
                f"loan: dtype must not contain Python objects, got {dtype!r}; objects can't be in "
                "shared memory"
            )
    channel = getattr(self, "channel", self)
    if not channel.transport.copies:
        if channel.closed:
            raise Closed(f"{channel!r} is closed; no more items can be put")
        return torch.empty(sizes, dtype=dtype) if torch and as_torch else numpy.empty(sizes, dtype)
    view = self._loan(min(math.prod(sizes) * dtype.itemsize, MOST_LENT), timeout)
    if torch and as_torch:
        return (
            torch.frombuffer(view, dtype=dtype).view(sizes)
            if math.prod(sizes)
            else torch.empty(sizes, dtype=dtype)
        )
    array = numpy.ndarray(sizes, dtype, buffer=view)
    view.lent(array)
    return array


def _checked(shape: Sequence[int]) -> tuple[int, ...]:
    for size in shape:
        if isinstance(size, bool) or not hasattr(size, "__index__") or size < 0:
            raise ValueError(f"loan: shape must contain only non-negative ints, got {shape!r}")
    return tuple(shape)
