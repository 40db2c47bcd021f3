"""Failures of items, deaths over items, and exceptions that cross to another process."""

from __future__ import annotations

import pickle
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowchan.errors import FlowchanError, WorkerDied
from flowchan.run.policy import seeds

RETIRED = 79
"""Exit code of a worker's process that asks to be replaced and does not count as dead (Retires)."""


class OwnEnd(BaseException):
    """Signal that the worker's own channels have closed or broken; the cause has the details.

    It differs from exceptions of the user's code, which may report the end of another channel.
    """


class ItemFailed(FlowchanError):
    """Signal inside a worker that the function failed for ``item``.

    A worker raises it if no errors stream receives the failure.
    """

    def __init__(self, item: Any) -> None:
        super().__init__(item)
        self.item = item


class Retires(BaseException):
    """Signal that a process should end and be replaced instead of working on an item.

    The function of a stage on processes raises it, and the replacement begins with the same item. That counts
    neither as a death of the item nor as a restart.
    """


class LostError(FlowchanError):
    """Replacement for an exception that cannot be sent to another process, with its text and traceback."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Deaths over the first item of a replacement.

    Attributes:
        deaths: How earlier workers died over the item, each in words.
        members: How a worker died over one member of the batch alone, by the number of the member.
        tried: Whether a worker has tried all other members of the batch without dying.
    """

    deaths: tuple[str, ...] = ()
    members: Mapping[int, str] = field(default_factory=dict)
    tried: bool = False


UNSUSPECTED = Suspicion()
"""No worker has died over the first item."""


def died_over(deaths: Sequence[str]) -> WorkerDied:
    """Return the error of an item over which workers died in these ways, one after the other."""
    ends = Counter(deaths)
    if len(ends) == 1 and len(deaths) > 1:
        how = f"each {deaths[0]}"
    else:
        how = "; ".join(f"{end} ({count} times)" if count > 1 else end for end, count in ends.items())
    many = f"{len(deaths)} workers died while they worked on this item, one after the other"
    one = "1 worker died while it worked on this item"
    return WorkerDied(f"{one if len(deaths) == 1 else many}: {how}")


class Portable:
    """Exception on its way to another process.

    It arrives as the exception itself, with worker and traceback in a note. If it cannot be pickled here or
    rebuilt there, it arrives as a :class:`LostError` with the same text.
    """

    def __init__(self, error: BaseException, where: str = "") -> None:
        self._text = text_of(error)
        # Kept outside the pickle, because an exception's __reduce__ may omit its notes (json's does).
        note = where or f"in {seeds.worker_text()}"
        if error.__traceback__ or error.__cause__ or error.__context__:
            note += ":\n" + "".join(traceback.format_exception(error)).rstrip()
        self._notes = [*getattr(error, "__notes__", ()), note]
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
        # The user's class decides which exception this is; the failure must not get lost.
        except BaseException:
            error = None
    if not isinstance(error, BaseException):
        error = LostError(text)
    failed: BaseException = error
    failed.__notes__ = notes
    return failed


def text_of(error: BaseException) -> str:
    """Return the type and message of an exception, even if its ``__str__`` raises."""
    try:
        text = str(error)
    except BaseException as bad:
        text = f"<its text raises {type(bad).__name__}>"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
