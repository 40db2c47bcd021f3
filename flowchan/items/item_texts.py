"""Format items as short text, for ``flowchan peek``.

An item of a channel between processes is a pickle. :func:`text_of_payload` shows it without its classes: a
stand-in with the name, the arguments and the attributes takes the place of each object. Therefore, no code of
the program runs, and nothing is imported. Objects that count their receivers do not count this process.
"""

from __future__ import annotations

import builtins
import functools
import io
import itertools
import math
import pickle
import reprlib
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from flowchan.items.text import short

WIDEST = 200
"""Maximum length of the text of an item."""
MOST_ELEMENTS = 8
"""An array with more elements than this is shown without its values."""
OBJECT, BYTES, PICKLE = 0, 2, 3
"""Kinds of payloads: the item itself, and kinds of ``frame.hpp``. All others are a pickle with buffers."""


class SeenItem(NamedTuple):
    """Item that a channel contains, as ``Channel._peek`` returns it.

    Attributes:
        number: Number of the item in its channel.
        leased: True if a reader has taken the item and has not finished it.
        size: Size in bytes; 0 in a channel between threads.
        kind: Kind of the payload.
        payload: The item or its bytes; None if they were not copied when the channel was examined.
    """

    number: int
    leased: bool
    size: int
    kind: int
    payload: Any

    def text(self) -> str:
        """Return the item as one line of at most ``WIDEST`` characters."""
        if self.payload is None and self.kind != OBJECT:
            return f"<an item of {self.size:,} bytes>"
        try:
            text = text_of(_content(self.kind, self.payload))
        except Exception as error:  # a damaged pickle may raise anything
            text = f"<can't be shown: {type(error).__name__}: {error}>"
        return cut(text, WIDEST)


def text_of(item: Any) -> str:
    """Return the short repr of an item; arrays and tensors appear as their shape and type."""
    return _texts.repr(item)


def cut(text: str, most: int) -> str:
    """Return a text as one line of at most ``most`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


class _ItemTexts(reprlib.Repr):
    """Formats items as short text. Arrays and tensors appear as their shape and type."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 80
        self.maxtuple = self.maxlist = self.maxdict = self.maxset = 8

    def repr_ndarray(self, array: Any, level: int) -> str:
        return _array_text(array, str(array.dtype))

    def repr_Tensor(self, tensor: Any, level: int) -> str:  # noqa: N802  # reprlib looks up this name
        return _array_text(tensor, str(tensor.dtype).removeprefix("torch."))

    def repr_bytes(self, data: bytes, level: int) -> str:
        most = self.maxstring // 2
        return repr(data) if len(data) <= most else f"{data[:most]!r}... ({len(data):,} bytes)"

    def repr_instance(self, value: Any, level: int) -> str:
        return short(value, WIDEST)


_texts = _ItemTexts()


def _array_text(array: Any, dtype: str) -> str:
    if math.prod(array.shape) <= MOST_ELEMENTS:
        return short(array, WIDEST)
    return _shape_text(type(array).__name__, array.shape, dtype)


def _shape_text(kind: str, shape: Sequence[int], dtype: str) -> str:
    return f"<{kind} {' × '.join(map(str, shape))} {dtype}>"


# --- pickles ---


def _content(kind: int, payload: Any) -> Any:
    """Return the item in a payload, with stand-ins for its objects."""
    if kind == OBJECT:
        return _bare(payload)
    if kind == BYTES:
        return payload
    if kind == PICKLE:
        return _shown(payload)
    at, size = struct.unpack_from("<QQ", payload, 8)
    return _shown(payload[at : at + size])


def _shown(packed: Any) -> Any:
    """Return the value in the result of ``pack``, with stand-ins for its objects."""
    data = packed if isinstance(packed, bytes) else packed[0]
    return _Shower(io.BytesIO(data), buffers=itertools.repeat(b"")).load()


def _bare(item: Any) -> Any:
    """Take a sampled item out of its box; return any other item unchanged."""
    boxed = (type(item).__module__, type(item).__name__) == ("flowchan.items.sampled_item", "SampledItem")
    return item.item if boxed else item


class _StandInType(type):
    """Type of the classes of stand-ins, which are shown by their names."""

    def __repr__(cls) -> str:
        return f"<class {cls.__name__}>"


class StandIn(metaclass=_StandInType):
    """Object that shows the name, the arguments and the attributes of another one."""

    def __new__(cls, *arguments: Any, **attributes: Any) -> StandIn:
        """Keep the arguments, whatever they are."""
        new = object.__new__(cls)
        new._arguments, new._attributes = [*arguments], attributes
        return new

    def __init__(self, *_: Any, **__: Any) -> None:
        self._arguments: list[Any]
        self._attributes: dict[Any, Any]

    def __setstate__(self, state: Any) -> None:
        """Keep the attributes. An object with slots has a pair of dictionaries, or a list of values."""
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self._attributes |= part
            elif part is not None:
                self._arguments += part if isinstance(part, list) else [part]

    def __call__(self, *arguments: Any, **attributes: Any) -> StandIn:
        """Stand in for the result of a function."""
        return StandIn(*arguments, **attributes)

    def append(self, item: Any) -> None:
        """Keep an element of a list."""
        self._arguments.append(item)

    def extend(self, items: Any) -> None:
        """Keep elements of a list."""
        self._arguments += items

    def __setitem__(self, key: Any, value: Any) -> None:
        self._attributes[key] = value

    @reprlib.recursive_repr()
    def __repr__(self) -> str:
        parts = [text_of(argument) for argument in self._arguments]
        parts += [f"{key}={text_of(value)}" for key, value in self._attributes.items()]
        return f"{type(self).__name__}({', '.join(parts)})"


class _Literal(NamedTuple):
    """Text that is shown as it is."""

    shown: str

    def __repr__(self) -> str:
        return self.shown


@functools.lru_cache(1024)
def _stand_in(name: str) -> type[StandIn]:
    made: Any = _StandInType(name, (StandIn,), {})
    return made  # type: ignore[no-any-return]


class _Shower(pickle.Unpickler):
    """Unpickler that calls only classes from a few standard modules."""

    def find_class(self, module: str, name: str) -> Any:
        if (known := _KNOWN.get((module, name))) is not None:
            return known
        if module == "builtins" and isinstance(found := getattr(builtins, name, None), type):
            return found
        if (
            module in _REAL
            or (module, name) in _REAL_NAMES
            or (module.partition(".")[0] == "numpy" and "numpy" in sys.modules)
        ):
            return super().find_class(module, name)
        return _stand_in(name)


_REAL = {
    "_codecs", "collections", "copyreg", "datetime", "decimal", "fractions", "pathlib", "uuid",
}  # fmt: skip
"""Modules whose classes have no side effects, so the unpickler creates real objects of these classes."""
_REAL_NAMES = {("flowchan", "Failed"), ("flowchan", "Window")}

_NUMPY_KINDS = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex"}


def _shown_array(buffer: Any, dtype: Any, shape: Sequence[int], order: str) -> _Literal:
    text = str(dtype)
    if text[1:2] in _NUMPY_KINDS:
        kind = _NUMPY_KINDS[text[1]]
        text = kind if kind == "bool" else f"{kind}{8 * int(text[2:])}"
    return _Literal(_shape_text("ndarray", shape, text))


def _shown_tensor(buffer: Any, dtype: Any, shape: StandIn, *_: Any) -> _Literal:
    (sizes,) = shape._arguments
    return _Literal(_shape_text("Tensor", sizes, dtype.__name__))


def _shown_class(module: str, named: str | None, mark: Any, maker: Any, kind: Any, name: str, *_: Any) -> Any:
    return _stand_in(name)


_KNOWN: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy._core.numeric", "_frombuffer"): _shown_array,
    ("numpy.core.numeric", "_frombuffer"): _shown_array,
    ("flowchan.items.arrays", "_rebuild_array"): _shown_array,
    ("flowchan.items.arrays", "_rebuild_memoryview"): lambda buffer, code, shape: _Literal(
        _shape_text("memoryview", shape, code)
    ),
    ("flowchan.items.arrays", "_rebuild_tensor"): _shown_tensor,
    ("flowchan", "unpack"): _shown,
    ("flowchan.items.main_code", "unpack_class"): _shown,
    ("flowchan.items.main_code", "_make_class"): _shown_class,
    ("flowchan.items.sampled_item", "SampledItem"): lambda item, marks: item,
    ("flowchan.run.worker.requests", "Request"): lambda question, item, board: item,
    ("flowchan.run.worker.requests", "_arrived"): lambda question, packed, board: _shown(packed),
}
"""Substitutes for the functions that flowchan's own pickles call."""
