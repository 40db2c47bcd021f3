"""How an item's failure ends a worker, and how an exception reaches another process whole."""

from __future__ import annotations

import pickle
import traceback
from typing import Any

from flowchan.errors import FlowchanError
from flowchan.run.policy import seeds

RETIRED = 79
"""The exit code of a worker's process that another is to replace, without having died (Retires)."""


class ItemFailed(FlowchanError):
    """Inside a worker: the function raised for ``item`` and nobody reads its errors, so the worker ends."""

    def __init__(self, item: Any) -> None:
        super().__init__(item)
        self.item = item


class Retires(BaseException):
    """What the function of a stage on processes raises in place of working on an item: its process ends, and
    the one that takes its place begins with that item. That is no death: it counts neither against the item
    nor as a restart."""


class LostError(FlowchanError):
    """Stands for an exception that can't be sent to another process; its text and traceback are kept."""


class Portable:
    """An exception on its way to another process. It arrives there as the exception itself, with its worker
    and traceback as a note; or as a :class:`LostError` with the same text, where it can't be pickled here or
    not rebuilt there."""

    def __init__(self, error: BaseException, where: str = "") -> None:
        whole = "".join(traceback.format_exception(error)).rstrip()
        self._text = text_of(error)
        # Beside the pickle, because an exception's own __reduce__ may leave its notes out (json's does).
        where = where or f"in {seeds.told()}"
        self._notes = [*getattr(error, "__notes__", ()), f"{where}:\n{whole}"]
        self._data: bytes | None
        import cloudpickle  # slow to import

        try:
            self._data = cloudpickle.dumps(error, protocol=5)
        except BaseException:
            self._data = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self._data, self._text, self._notes)


def _arrive(data: bytes | None, text: str, notes: list[str]) -> BaseException:
    error: Any = None
    if data is not None:
        try:
            error = pickle.loads(data)
        # the user's class decides what this raises, and the failure must not be lost by it
        except BaseException:
            error = None
    if not isinstance(error, BaseException):
        error = LostError(text)
    failed: BaseException = error
    failed.__notes__ = notes
    return failed


def text_of(error: BaseException) -> str:
    """Type and message of an exception, whatever its ``__str__`` does."""
    try:
        text = str(error)
    except BaseException as bad:
        text = f"<its text raises {type(bad).__name__}>"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
