"""Failures as values: what an ``errors`` stream carries, and how an exception reaches another process whole."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

from flowchan.errors import FlowchanError
from flowchan.transport import codec


@dataclass(frozen=True, slots=True)
class Failed:
    """An item for which a stage's function raised. ``error`` is the last exception, after ``attempts`` calls."""

    item: Any
    error: BaseException
    attempts: int


class ItemFailed(FlowchanError):
    """Inside a worker: the function raised for ``item`` and nobody reads its errors, so the worker ends."""

    def __init__(self, item: Any) -> None:
        super().__init__(item)
        self.item = item


class LostError(FlowchanError):
    """Stands for an exception that can't be sent to another process; its text and traceback are kept."""


def portable(error: BaseException) -> BaseException:
    """``error`` in a form that survives the way to another process: itself with its traceback as a note, or a
    :class:`LostError` with the same text where pickling or unpickling it fails."""
    text = "".join(traceback.format_exception(error)).rstrip()
    note = f"in the worker:\n{text}"
    try:
        copy = codec.loads(codec.dumps(error))
        whole = type(copy) is type(error)
    except BaseException:
        whole = False
    if not whole:
        error = LostError(f"{type(error).__name__}: {error}")
    error.add_note(note)
    return error


def short(item: Any, most: int = 120) -> str:
    """The text of an item for messages."""
    try:
        text = repr(item)
    except Exception as error:
        text = f"<{type(item).__name__} whose repr raises {type(error).__name__}>"
    return text if len(text) <= most else f"{text[: most - 3]}..."
