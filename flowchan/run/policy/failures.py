"""Represent failed items, deaths caused by items, and exceptions that are sent between processes."""

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
"""Exit code of a worker process that asks for a replacement (``Retires``) and has not died."""


class OwnEnd(BaseException):
    """Raised in a worker if one of the worker's channels has closed or broken; the cause has the details.

    User code may raise the same exceptions about other channels. The ends of the worker's channels therefore
    need a separate class.
    """


class ItemFailed(FlowchanError):
    """Raised in a worker when its function has failed on ``item``.

    Only workers of a stage without an ``errors`` stream raise it.
    """

    def __init__(self, item: Any) -> None:
        super().__init__(item)
        self.item = item


class Retires(BaseException):
    """Raised to have the worker's process replaced before it processes an item.

    The function of a stage with worker processes may raise it. The replacement then starts with the same
    item. Neither ``max_deaths`` nor the restart limit counts such a replacement.
    """


class LostError(FlowchanError):
    """Takes the place of an exception that cannot be pickled, with its text and traceback."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Earlier deaths of workers on the first item that a replacement receives.

    Attributes:
        deaths: How earlier workers died while processing the item.
        members: How workers died while processing a batch member alone, by the member's number.
        tried: True if a worker has tried all other members of the batch and survived.
    """

    deaths: tuple[str, ...] = ()
    members: Mapping[int, str] = field(default_factory=dict)
    tried: bool = False


UNSUSPECTED = Suspicion()
"""Value for a first item on which no earlier worker has died."""


def died_over(deaths: Sequence[str]) -> WorkerDied:
    """Return the error for an item on which several workers have died.

    ``deaths`` describes the death of each worker.
    """
    ends = Counter(deaths)
    if len(ends) == 1 and len(deaths) > 1:
        how = f"each {deaths[0]}"
    else:
        how = "; ".join(f"{end} ({count} times)" if count > 1 else end for end, count in ends.items())
    many = f"{len(deaths)} workers died one after another while processing this item"
    one = "1 worker died while it was processing this item"
    return WorkerDied(f"{one if len(deaths) == 1 else many}: {how}")


class Portable:
    """Picklable form of an exception.

    It unpickles as the exception itself, with the worker and the traceback in a note. If the exception cannot
    be pickled or unpickled, a :class:`LostError` with its text takes its place.
    """

    def __init__(self, error: BaseException, where: str = "") -> None:
        self._text = text_of(error)
        # Send the notes outside the pickled exception, because its __reduce__() may omit them, as
        # JSONDecodeError.__reduce__() does.
        note = where or f"in {seeds.worker_text()}"
        if error.__traceback__ or error.__cause__ or error.__context__:
            note += ":\n" + "".join(traceback.format_exception(error)).rstrip()
        self._notes = [*getattr(error, "__notes__", ()), note]
        self._data: bytes | None
        import cloudpickle  # imported late, because it is slow to import

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
        # The user's class may raise anything during unpickling, but the failure must not be lost.
        except BaseException:
            error = None
    if not isinstance(error, BaseException):
        error = LostError(text)
    failed: BaseException = error
    failed.__notes__ = notes
    return failed


def text_of(error: BaseException) -> str:
    """Return an exception's type and message, even if the exception's ``__str__`` raises."""
    try:
        text = str(error)
    except BaseException as bad:
        text = f"<str() raised {type(bad).__name__}>"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
