"""What the group has to know of NumPy arrays and torch tensors, without importing either."""

from __future__ import annotations

import ctypes
import math
import sys
from typing import Any


def is_tensor(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def is_numpy(x: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(x, numpy.ndarray) and not x.dtype.hasobject


def is_array(x: Any) -> bool:
    """Whether its contents are moved as they lie in memory."""
    return is_tensor(x) or is_numpy(x)


def is_dense(x: Any) -> bool:
    """As :func:`is_array`. Raises ``TypeError`` for those whose contents do not lie in memory as they are."""
    if is_tensor(x):
        if x.is_nested:
            raise TypeError(
                f"a group's operations take no nested tensors such as one of {_type_of(x)}: give its "
                ".values() and .offsets(), or .to_padded_tensor(…)"
            )
        if x.layout is not sys.modules["torch"].strided:
            kind = str(x.layout).removeprefix("torch.")
            raise TypeError(
                f"a group's operations take dense tensors, not {described(x)} in the layout {kind}: "
                "convert it, as by .to_dense()"
            )
        if x.is_quantized:
            raise TypeError(
                f"a group's operations take no quantized tensors such as {described(x)}: give its "
                ".dequantize(), or its .int_repr() where all have the same scale"
            )
        if not _has_memory(x):
            raise TypeError(
                f"a group's operations take tensors with memory of their own, not {described(x)} of the type "
                f"{type(x).__name__}, which has none: give the tensor that it stands for, as by .to_local()"
            )
        return True
    if is_numpy(x) and _is_masked(x):
        raise TypeError(
            f"a group's operations take no masked arrays such as {described(x)}: give its .filled(…), or its "
            ".data and its .mask"
        )
    return is_numpy(x)


def _has_memory(x: Any) -> bool:
    """Not of wrappers around tensors, nor of those whose memory was given back."""
    try:
        return x.device.type == "meta" or not x.nbytes or bool(x.data_ptr())
    except (RuntimeError, AttributeError):  # torch's words for some of them
        return False


def _is_masked(x: Any) -> bool:
    masked = sys.modules.get("numpy.ma")
    return masked is not None and isinstance(x, masked.MaskedArray)


def size_of(x: Any) -> int | None:
    """Bytes of an array."""
    return int(x.nbytes) if is_array(x) else None


def described(x: Any) -> str:
    """As ``float32[2, 3]``; values by their types."""
    if not is_array(x):
        return type(x).__name__
    dtype, shape = kind(x)
    place = f" on {x.device}" if is_tensor(x) and x.device.type != "cpu" else ""
    return f"{dtype}[{', '.join(map(str, shape))}]{place}"


def kind(x: Any) -> tuple[str, tuple[int, ...]]:
    """The type of its elements and its shape, written alike for arrays and tensors."""
    return _type_of(x), tuple(x.shape)


def _type_of(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")


def check_out(x: Any, out: Any, parts: int = 1) -> None:
    """Raises ``ValueError`` unless ``out`` can take one of so many parts of what becomes of ``x``."""
    count, has = math.prod(x.shape) // parts, math.prod(out.shape)
    if kind(out)[0] != kind(x)[0] or has != count:
        raise ValueError(f"out must have the type of the input, and {count} elements, not {described(out)}")
    check_place(x, out)
    check_writable(out)


def check_type(call: str, x: Any, other: Any) -> None:
    """Raises ``ValueError`` unless the elements of both are of one type."""
    type_of_x, its = kind(x)[0], kind(other)[0]
    if its != type_of_x:
        raise ValueError(
            f"{call}: what is given and what is filled must be of one type, not {type_of_x} and {its}: "
            "convert one of them"
        )


def check_place(x: Any, out: Any) -> None:
    """Raises ``ValueError`` unless both lie on the same device."""
    place, has = (str(place_of(one) or "cpu") for one in (x, out))
    if has != place:
        raise ValueError(f"out must lie on {place}, as what is given does, not on {has}")


def check_apart(x: Any, out: Any) -> None:
    """Raises ``ValueError`` where a result is written over parts of ``x``, both in one piece, that are still
    to be read. ``out`` may be ``x`` itself, or one of its parts of that size."""
    begins, of_out = _address(x), _address(out)
    overlap = of_out < begins + x.nbytes and begins < of_out + out.nbytes
    if overlap and (of_out - begins) % out.nbytes:
        raise ValueError("x and out overlap, and do not begin alike: give a copy of one")


def _address(x: Any) -> int:
    return int(x.data_ptr() if is_tensor(x) else x.__array_interface__["data"][0])


def check_room(rank: int, given: int, room: int) -> None:
    """Raises ``ValueError`` unless as many bytes as that member gives have a place in its part of ``out``."""
    if given != room:
        raise ValueError(f"rank {rank} gives {given} bytes, and out has room for {room} from it")


def check_writable(x: Any) -> None:
    if is_numpy(x) and not x.flags.writeable:
        raise ValueError(f"the result can't be written into a read-only array: {x!r}")
    strides = x.stride() if is_tensor(x) else x.strides
    if x.nbytes and any(not by and extent > 1 for by, extent in zip(strides, x.shape, strict=True)):
        raise ValueError(
            f"the result can't be written into {described(x)} whose elements share memory, as after expand: "
            "give a copy"
        )


def contiguous(x: Any) -> Any:
    """``x`` itself if it lies in one piece, else a copy that does: :func:`give_back` copies what was written
    there."""
    if is_tensor(x):
        return x.detach().contiguous().resolve_conj().resolve_neg()
    return x if x.flags.c_contiguous else sys.modules["numpy"].ascontiguousarray(x)


def give_back(flat: Any, x: Any) -> Any:
    """Copies what was written into ``flat``, which :func:`contiguous` gave for ``x``, if it is another piece
    of memory; returns ``x``."""
    if is_tensor(x):
        torch = sys.modules["torch"]
        if flat.data_ptr() != x.data_ptr():
            with torch.no_grad():
                x.copy_(flat)
    elif not sys.modules["numpy"].shares_memory(flat, x):
        x[...] = flat.reshape(x.shape)
    return x


def fill(x: Any, value: Any) -> Any:
    """Writes ``value`` into ``x``, and returns ``x``."""
    if is_tensor(x):
        with sys.modules["torch"].no_grad():
            x.copy_(value)
    else:
        x[...] = value
    return x


def of_library(like: Any, x: Any) -> Any:
    """``x`` as an array of that library of which ``like`` is one."""
    if is_tensor(like) and is_numpy(x):
        return sys.modules["torch"].from_numpy(x.copy())  # torch warns of memory that can't be written
    if is_numpy(like) and is_tensor(x):
        return contiguous(x).cpu().numpy()
    return x


def memory(x: Any) -> memoryview:
    """The bytes of one that lies in one piece, to be read and written; of bytes themselves."""
    if is_tensor(x):
        if not is_here(x):
            raise TypeError(f"{described(x)} is not in this machine's memory: copy it, as by .cpu()")
        if not x.nbytes:
            return memoryview(bytearray())
        lent: Any = (ctypes.c_char * x.nbytes).from_address(x.data_ptr())  # by numpy() it could not be
        lent.tensor = x  # resized any more, as FSDP does
        return memoryview(lent).cast("B")
    if is_numpy(x):
        x = x.reshape(-1).view("u1")
    return memoryview(x)


def widened(x: Any) -> Any:
    """A copy in float32 of halves, as which they are added up; anything else itself."""
    if is_tensor(x):
        torch = sys.modules["torch"]
        return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    return x.astype("f4") if x.dtype == "f2" else x


def narrow(x: Any, wide: Any) -> None:
    """Rounds what was added up in float32 once, into the halves ``x``; too large becomes infinite."""
    wide = wide.reshape(x.shape)
    if is_tensor(x):
        fill(x, wide)
    else:
        with sys.modules["numpy"].errstate(over="ignore"):
            x[...] = wide


def is_here(x: Any) -> bool:
    """Whether it lies in this machine's memory."""
    return not is_tensor(x) or x.device.type == "cpu"


def empty_like(x: Any) -> Any:
    return make(like(x))


def divide(x: Any, by: int) -> None:
    """In place."""
    if is_tensor(x):
        x.div_(by)
    else:
        x /= by


def like(x: Any) -> tuple[str, Any, tuple[int, ...]]:
    """What the others need to make one like it; of plain values, where that is possible."""
    if is_tensor(x):
        return "torch", str(x.dtype).removeprefix("torch."), tuple(x.shape)
    return "numpy", x.dtype if x.dtype.kind == "V" else x.dtype.str, tuple(x.shape)


def place_of(x: Any) -> Any:
    """The device of a tensor."""
    return x.device if is_tensor(x) else None


def finish(x: Any) -> None:
    """Returns when its device has done what is to be done to it before another thread, which has a stream of
    its own, uses it."""
    if is_tensor(x) and x.is_cuda:
        sys.modules["torch"].cuda.current_stream(x.device).synchronize()


def make(made: tuple[str, Any, tuple[int, ...]], place: Any = None) -> Any:
    """An empty one, from what :func:`like` said of it; a tensor on the device ``place``."""
    library, dtype, shape = made
    if library == "torch":
        import torch  # another member has a tensor

        return torch.empty(shape, dtype=getattr(torch, dtype), device=place)
    import numpy

    return numpy.empty(shape, dtype)


def part_like(x: Any, parts: int) -> Any:
    """An empty one for one of equal parts of ``x`` along its first dimension."""
    if not x.shape or x.shape[0] % parts:
        raise ValueError(
            f"the first dimension must have as many entries for each of the {parts} members; it is "
            f"{described(x)}"
        )
    library, dtype, shape = like(x)
    return make((library, dtype, (shape[0] // parts, *shape[1:])), place_of(x))


def parts_of(x: Any, parts: int) -> list[Any]:
    """Equal parts of ``x`` in the order in which they lie."""
    count = math.prod(x.shape)
    if count % parts:
        raise ValueError(
            f"out must have as many elements for each of the {parts} members; it is {described(x)}"
        )
    flat = x.reshape(-1) if is_numpy(x) else x.view(-1)
    each = count // parts
    return [flat[i * each : (i + 1) * each] for i in range(parts)]
