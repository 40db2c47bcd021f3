"""Transfer data frames and images to other processes as Arrow buffers.

The buffers are sent separately from the pickle. The buffers are copied once, into the channel, and the
receiver reads them in place. Arrow's own types need this only for slices of tables, because the pickle of a
slice contains the whole table. For Polars frames and series and for Pillow images, a pickle would contain a
copy of all data. Without pyarrow, or for a type that Arrow lacks, objects are pickled in the way of their
library, which copies the data.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pickle import PickleBuffer
from typing import Any

LIBRARIES = ("polars", "pyarrow", "PIL.Image")
"""Modules that define the supported types."""
_TYPES: tuple[tuple[str, str, str, Callable[[Any], Any]], ...]
"""For each type: its module, its name, another name that the module must have, and the reducer. Versions of
the module that are too old lack the other name."""
_RAW = {"L": "L", "RGB": "RGBX", "RGBA": "RGBA", "CMYK": "CMYK"}
"""For each image mode, the raw mode in which Pillow stores the pixels."""


def reducers() -> Iterator[tuple[Any, Callable[[Any], Any]]]:
    """Yield the types of the loaded libraries, each with its reducer."""
    if not _has_arrow():
        return
    for module, name, needed, reduce in _TYPES:
        # While a module is still being imported, its types may be undefined.
        loaded = sys.modules.get(module)
        if hasattr(loaded, name) and hasattr(loaded, needed):
            yield getattr(loaded, name), reduce


@functools.cache
def _has_arrow() -> bool:
    return importlib.util.find_spec("pyarrow") is not None


def _reduce_table(table: Any) -> Any:
    import pyarrow

    if table.nbytes >= 0.5 * table.get_total_buffer_size():
        return table.__reduce_ex__(5)
    sink = pyarrow.BufferOutputStream()  # the stream contains only the slice's own data
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write(table)
    return _rebuild_table, (PickleBuffer(sink.getvalue()), isinstance(table, pyarrow.RecordBatch))


def _rebuild_table(buffer: Any, is_batch: bool) -> Any:
    import pyarrow

    reader = pyarrow.ipc.open_stream(pyarrow.py_buffer(buffer))
    return reader.read_next_batch() if is_batch else reader.read_all()


def _reduce_frame(frame: Any) -> Any:
    import polars

    types = repr(frame.dtypes)
    # Arrow would store objects as addresses, and it has no Int128.
    if "Object" in types or "Int128" in types:
        return frame.__reduce_ex__(5)
    table = frame.to_arrow(compat_level=polars.CompatLevel.newest())
    return _rebuild_frame, (table, frame.height)


def _rebuild_frame(table: Any, height: int) -> Any:
    import polars

    if not table.num_columns:
        return polars.DataFrame(height=height)
    return polars.from_arrow(table, rechunk=False)


def _reduce_series(series: Any) -> Any:
    return _rebuild_series, (series.to_frame(),)


def _rebuild_series(frame: Any) -> Any:
    return frame.to_series()


def _reduce_image(image: Any) -> Any:
    import pyarrow

    image.load()
    raw = _RAW.get(image.mode)
    if raw is None or 0 in image.size:
        return image.__reduce_ex__(5)
    try:
        pixels = pyarrow.array(image)
    except ValueError:  # a large image consists of several memory blocks
        pixels = pyarrow.Array.from_buffers(
            pyarrow.uint8(),
            image.width * image.height * len(raw),
            [None, pyarrow.py_buffer(image.tobytes("raw", raw))],
        )
    return _rebuild_image, (pixels, image.mode, image.size, image.info)


def _rebuild_image(pixels: Any, mode: str, size: tuple[int, int], info: dict[Any, Any]) -> Any:
    from PIL import Image

    image = Image.fromarrow(pixels, mode, size)
    image.readonly = 1  # Pillow then copies the image before changing it
    image.info = info
    return image


_TYPES = (
    ("pyarrow", "Table", "ipc", _reduce_table),
    ("pyarrow", "RecordBatch", "ipc", _reduce_table),
    ("polars", "DataFrame", "CompatLevel", _reduce_frame),
    ("polars", "Series", "CompatLevel", _reduce_series),
    ("PIL.Image", "Image", "fromarrow", _reduce_image),
)
