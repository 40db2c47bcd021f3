"""Access NumPy arrays and torch tensors uniformly, without importing either library."""

from __future__ import annotations

import ctypes
import math
import sys
from typing import Any


def is_tensor(x: Any) -> bool:
    """Return whether ``x`` is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def is_numpy(x: Any) -> bool:
    """Return whether ``x`` is a NumPy array whose elements are not Python objects."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(x, numpy.ndarray) and not x.dtype.hasobject


def is_array(x: Any) -> bool:
    """Return whether ``x`` is an array or tensor. Groups send such values as raw memory."""
    return is_tensor(x) or is_numpy(x)


def is_dense(x: Any) -> bool:
    """Return whether ``x`` is an array or tensor that groups can send.

    Args:
        x: Any value.

    Returns:
        False if the value is neither an array nor a tensor.

    Raises:
        TypeError: The array or tensor does not occupy one block of memory.
    """
    if is_tensor(x):
        if x.is_nested:
            raise TypeError(
                f"x must be a dense tensor, got a nested {_type_of(x)} tensor; pass x.values() and "
                "x.offsets(), or x.to_padded_tensor(…)"
            )
        if x.layout is not sys.modules["torch"].strided:
            kind = str(x.layout).removeprefix("torch.")
            raise TypeError(
                f"x must be a dense tensor, got {described(x)} with layout {kind}; convert it, "
                "for example with "
                ".to_dense()"
            )
        if x.is_quantized:
            raise TypeError(
                f"x must be a dense tensor, got the quantized {described(x)}; pass x.dequantize(), or "
                "x.int_repr() if all members have the same scale"
            )
        if not _has_memory(x):
            raise TypeError(
                f"x must be a tensor with its own memory, got {described(x)} of type "
                f"{type(x).__name__}; pass the tensor that x wraps, for example x.to_local()"
            )
        return True
    if is_numpy(x) and _is_masked(x):
        raise TypeError(
            f"x must be an array without a mask, got the masked {described(x)}; pass x.filled(…), or x.data "
            "and x.mask"
        )
    return is_numpy(x)


def _has_memory(x: Any) -> bool:
    """Return whether an array or tensor has memory; tensor wrappers and freed tensors have none."""
    try:
        return x.device.type == "meta" or not x.nbytes or bool(x.data_ptr())
    except (RuntimeError, AttributeError):  # some wrappers make torch raise one of these errors
        return False


def _is_masked(x: Any) -> bool:
    masked = sys.modules.get("numpy.ma")
    return masked is not None and isinstance(x, masked.MaskedArray)


def size_of(x: Any) -> int | None:
    """Return the size of an array in bytes, or None for other values."""
    return int(x.nbytes) if is_array(x) else None


def described(x: Any) -> str:
    """Return an array's type and shape, such as ``float32[2, 3]``, or the type of another value."""
    if not is_array(x):
        return type(x).__name__
    dtype, shape = kind(x)
    device_text = f" on {x.device}" if is_tensor(x) and x.device.type != "cpu" else ""
    return f"{dtype}[{', '.join(map(str, shape))}]{device_text}"


def kind(x: Any) -> tuple[str, tuple[int, ...]]:
    """Describe the element type and shape of ``x``. Arrays and tensors get the same description."""
    return _type_of(x), tuple(x.shape)


def _type_of(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")


def check_out(call: str, x: Any, out: Any, parts: int = 1) -> None:
    """Raise ``ValueError`` unless ``out`` can hold one of ``parts`` equal parts of the result for ``x``."""
    count, has = math.prod(x.shape) // parts, math.prod(out.shape)
    if kind(out)[0] != kind(x)[0] or has != count:
        raise ValueError(f"{call}: out must have {count} elements of the input's type, got {described(out)}")
    check_place(call, x, out)
    check_writable(call, "x" if out is x else "out", out)


def check_type(call: str, x: Any, other: Any) -> None:
    """Raise ``ValueError`` unless ``x`` and ``other`` have the same element type."""
    type_of_x, its = kind(x)[0], kind(other)[0]
    if its != type_of_x:
        raise ValueError(
            f"{call}: inputs and outputs must have the same element type, got {type_of_x} and {its}; convert "
            "one of them"
        )


def check_place(call: str, x: Any, out: Any) -> None:
    """Raise ``ValueError`` unless ``x`` and ``out`` are on the same device."""
    device_text, has = (str(place_of(one) or "cpu") for one in (x, out))
    if has != device_text:
        raise ValueError(f"{call}: out must be on {device_text} like the input, got {has}")


def check_overlap(call: str, x: Any, out: Any) -> None:
    """Raise ``ValueError`` if writing to ``out`` would overwrite elements of ``x`` that are still needed.

    Both arrays must be contiguous. ``out`` may be ``x`` itself or one of its equal parts.
    """
    begins, of_out = _address(x), _address(out)
    overlap = of_out < begins + x.nbytes and begins < of_out + out.nbytes
    if overlap and (of_out - begins) % out.nbytes:
        raise ValueError(
            f"{call}: x and out must not overlap unless out is x or a part of x; pass a copy of x"
        )


def _address(x: Any) -> int:
    return int(x.data_ptr() if is_tensor(x) else x.__array_interface__["data"][0])


def check_size(call: str, rank: int, given: int, size: int) -> None:
    """Raise ``ValueError`` unless the ``given`` bytes from ``rank`` fill its part of ``out`` exactly."""
    if given != size:
        raise ValueError(
            f"{call}: out must have room for exactly the {given} bytes from rank {rank}, got room for {size}"
        )


def check_writable(call: str, argument: str, x: Any) -> None:
    """Raise ``ValueError`` if the array is read-only or its elements overlap in memory."""
    if is_numpy(x) and not x.flags.writeable:
        raise ValueError(f"{call}: {argument} must be writable, got a read-only {described(x)}; pass a copy")
    strides = x.stride() if is_tensor(x) else x.strides
    if x.nbytes and any(not by and extent > 1 for by, extent in zip(strides, x.shape, strict=True)):
        raise ValueError(
            f"{call}: {argument} must not have elements that share memory, as the result of expand() does, "
            f"got {described(x)}; pass a copy"
        )


def contiguous(x: Any) -> Any:
    """Return ``x`` if it is contiguous, otherwise a contiguous copy.

    :func:`give_back` copies its contents back into ``x``.
    """
    if is_tensor(x):
        return x.detach().contiguous().resolve_conj().resolve_neg()
    return x if x.flags.c_contiguous else sys.modules["numpy"].ascontiguousarray(x)


def give_back(flat: Any, x: Any) -> Any:
    """Copy ``flat`` into ``x`` unless they share memory, and return ``x``.

    ``flat`` is the result of :func:`contiguous` for ``x``.
    """
    if is_tensor(x):
        torch = sys.modules["torch"]
        if flat.data_ptr() != x.data_ptr():
            with torch.no_grad():
                x.copy_(flat)
    elif not sys.modules["numpy"].shares_memory(flat, x):
        x[...] = flat.reshape(x.shape)
    return x


def fill(x: Any, value: Any) -> Any:
    """Write ``value`` into ``x`` and return ``x``."""
    if is_tensor(x):
        with sys.modules["torch"].no_grad():
            x.copy_(value)
    else:
        x[...] = value
    return x


def of_library(like: Any, x: Any) -> Any:
    """Convert ``x`` to an array of the same library as ``like``."""
    if is_tensor(like) and is_numpy(x):
        return sys.modules["torch"].from_numpy(x.copy())  # copied, because torch warns about read-only memory
    if is_numpy(like) and is_tensor(x):
        return contiguous(x).cpu().numpy()
    return x


def memory(x: Any) -> memoryview:
    """Return a writable view of a contiguous array's bytes, or a view of a bytes object."""
    if is_tensor(x):
        if not is_here(x):
            raise TypeError(f"{described(x)} must be in main memory; copy it, for example with .cpu()")
        if not x.nbytes:
            return memoryview(bytearray())
        # Do not use numpy(): FSDP resizes the tensor later, and the view that numpy() returns would prevent
        # this.
        lent: Any = (ctypes.c_char * x.nbytes).from_address(x.data_ptr())
        lent.tensor = x
        return memoryview(lent).cast("B")
    if is_numpy(x):
        x = x.reshape(-1).view("u1")
    return memoryview(x)


def widened(x: Any) -> Any:
    """Convert a half-precision array to float32; return any other array unchanged.

    Half-precision arrays are summed in float32.
    """
    if is_tensor(x):
        torch = sys.modules["torch"]
        return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    return x.astype("f4") if x.dtype == "f2" else x


def narrow(x: Any, wide: Any) -> None:
    """Round a float32 result into the half-precision array ``x``.

    Values that are too large become infinite.
    """
    wide = wide.reshape(x.shape)
    if is_tensor(x):
        fill(x, wide)
    else:
        with sys.modules["numpy"].errstate(over="ignore"):
            x[...] = wide


def is_here(x: Any) -> bool:
    """Return whether ``x`` is in main memory rather than on a device."""
    return not is_tensor(x) or x.device.type == "cpu"


def empty_like(x: Any) -> Any:
    """Create an empty array with the type, shape and device of ``x``."""
    return make(like(x))


def divide(x: Any, by: int) -> None:
    """Divide the elements of the contiguous array ``x`` in place.

    Like the core, this function divides the real and the imaginary part of a complex number separately. NumPy
    and torch would multiply both parts by ``1 / by``, which rounds twice.
    """
    if is_tensor(x):
        (sys.modules["torch"].view_as_real(x) if x.is_complex() else x).div_(by)
    else:
        real = x.view(x.real.dtype) if x.dtype.kind == "c" else x
        real /= by


def like(x: Any) -> tuple[str, Any, tuple[int, ...]]:
    """Describe the library, type and shape of ``x``, for :func:`make`."""
    if is_tensor(x):
        return "torch", str(x.dtype).removeprefix("torch."), tuple(x.shape)
    return "numpy", x.dtype if x.dtype.kind == "V" else x.dtype.str, tuple(x.shape)


def place_of(x: Any) -> Any:
    """Return a tensor's device, or None for an array."""
    return x.device if is_tensor(x) else None


def finish(x: Any) -> None:
    """Wait until the device has finished the work on ``x`` queued in the current CUDA stream.

    After that, another thread with another CUDA stream may use the tensor.
    """
    if is_tensor(x) and x.is_cuda:
        sys.modules["torch"].cuda.current_stream(x.device).synchronize()


def make(made: tuple[str, Any, tuple[int, ...]], device_text: Any = None) -> Any:
    """Create an empty array from a description by :func:`like`.

    A tensor is created on the device ``device_text``.
    """
    library, dtype, shape = made
    if library == "torch":
        import torch  # this process may not have imported torch yet

        return torch.empty(shape, dtype=getattr(torch, dtype), device=device_text)
    import numpy

    return numpy.empty(shape, dtype)


def part_like(call: str, x: Any, parts: int) -> Any:
    """Create an empty array for one of ``parts`` equal parts of ``x`` along the first dimension."""
    if not x.shape or x.shape[0] % parts:
        raise ValueError(
            f"{call}: the first dimension of x must be divisible by {parts}, the number of members, got "
            f"{described(x)}"
        )
    library, dtype, shape = like(x)
    return make((library, dtype, (shape[0] // parts, *shape[1:])), place_of(x))


def parts_of(call: str, x: Any, parts: int) -> list[Any]:
    """Divide ``x`` into ``parts`` equal flat parts in memory order."""
    count = math.prod(x.shape)
    if count % parts:
        raise ValueError(
            f"{call}: the number of elements of out must be divisible by {parts}, the number of members, "
            f"got {described(x)}"
        )
    flat = x.reshape(-1) if is_numpy(x) else x.view(-1)
    each = count // parts
    return [flat[i * each : (i + 1) * each] for i in range(parts)]
