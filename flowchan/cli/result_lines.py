"""Format the results of a run as lines for a terminal.

A small value is shown whole; for a larger one, the line shows the size and the beginning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

from flowchan.items.text import short
from flowchan.run.observe.report import count

WIDTH = 80


def result_lines(results: Mapping[Any, Any]) -> Iterator[str]:
    """Yield a line for each result, with the name of its stream."""
    if results:
        yield "\nresults"
    for stream, value in results.items():
        begin = f"  {stream.name}: {_size(value)}"
        yield begin + short(value, max(20, WIDTH - len(begin)))


def _size(value: Any) -> str:
    """Return the size of a value that is too long for a line, or an empty string."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        return f"{type(value).__name__} of {' × '.join(map(str, shape)) or '1 number'}, "
    if isinstance(value, Sized) and len(short(value, WIDTH)) == WIDTH:
        unit = _UNITS.get(type(value), "item")
        return f"{count(len(value))} {unit}{'' if len(value) == 1 else 's'}, "
    return ""


_UNITS = {str: "character", bytes: "byte"}
