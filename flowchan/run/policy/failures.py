"""Failed items, deaths that count against items, and exceptions that are sent to another process."""

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
"""Exit code of a worker process that asks to be replaced (``Retires``); this does not count as a death."""


class OwnEnd(BaseException):
    """Signal that one of the worker's own channels has closed or broken. The cause has the details.

    A separate class is needed because the user's code may raise the same exceptions for another channel.
    """


class ItemFailed(FlowchanError):
    """Signal inside a worker that the function failed for ``item``.

    A worker raises it if its stage has no errors stream.
    """

    def __init__(self, item: Any) -> None:
        super().__init__(item)
        self.item = item


class Retires(BaseException):
    """Signal that a process should end and be replaced before it processes an item.

    The function of a stage with worker processes raises it, and the replacement starts with the same item.
    This counts neither as a death that the item caused nor as a restart.
    """


class LostError(FlowchanError):
    """Substitute for an exception that cannot be sent to another process; has its text and traceback."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Earlier deaths while processing the first item of a replacement.

    Attributes:
        deaths: Causes of death of earlier workers that processed the item.
        members: Cause of death of the worker that processed a batch member alone, by the member's number.
        tried: True if a worker has survived trying all other members of the batch.
    """

    deaths: tuple[str, ...] = ()
    members: Mapping[int, str] = field(default_factory=dict)
    tried: bool = False


UNSUSPECTED = Suspicion()
"""Used if no worker has died while processing the first item."""


def died_over(deaths: Sequence[str]) -> WorkerDied:
    """Return the error for an item that several workers, one after another, died processing.

    ``deaths`` describes how each of them died.
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

    It is unpickled as the exception itself, with the worker and the traceback in a note. If the exception
    cannot be pickled or unpickled, a :class:`LostError` with the same text takes its place.
    """

    def __init__(self, error: BaseException, where: str = "") -> None:
        self._text = text_of(error)
        # The notes are kept outside the pickled exception, because its __reduce__ may omit them, as that of
        # json's errors does.
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
        # The user's class may raise anything here, but the failure must not get lost.
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
        text = f"<str() raised {type(bad).__name__}>"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
