"""Test the texts of failures, and exceptions that are pickled for another process."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest

from flowchan import WorkerDied
from flowchan.run.policy import seeds
from flowchan.run.policy.failures import ItemFailed, LostError, Portable, died_over, text_of

KILLED, EXITED = "was killed by SIGKILL", "exited with code 3"


@pytest.mark.parametrize(
    ("deaths", "expected"),
    [
        ([KILLED], f"1 worker died while it was processing this item: {KILLED}"),
        (
            [KILLED, KILLED],
            f"2 workers died one after another while processing this item: each {KILLED}",
        ),
        (
            [KILLED, EXITED, KILLED],
            f"3 workers died one after another while processing this item: {KILLED} (2 times); {EXITED}",
        ),
    ],
)
def test_error_for_a_deadly_item_describes_each_death(deaths: list[str], expected: str) -> None:
    error = died_over(deaths)
    assert type(error) is WorkerDied
    assert str(error) == expected


class Mute(Exception):
    def __str__(self) -> str:
        raise KeyError("no text")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("wrong"), "ValueError: wrong"),
        (ValueError(), "ValueError"),
        (Mute(), "Mute: <str() raised KeyError>"),
    ],
)
def test_text_of_an_error_has_type_and_message(error: Exception, expected: str) -> None:
    assert text_of(error) == expected


def test_failed_item_keeps_its_item() -> None:
    assert ItemFailed([1]).item == [1]


def arrived(error: BaseException, where: str = "in worker 1") -> Any:
    return pickle.loads(pickle.dumps(Portable(error, where)))


class NotesLost(Exception):
    def __reduce__(self) -> Any:
        return NotesLost, ()


def test_portable_error_keeps_its_notes_and_names_the_worker() -> None:
    error = NotesLost()
    error.add_note("first")
    found = arrived(error)
    assert type(found) is NotesLost
    assert found.__notes__ == ["first", "in worker 1"]
    assert arrived(error, where="").__notes__ == ["first", f"in {seeds.worker_text()}"]


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def caused(error: Exception) -> Exception:
    error.__cause__ = KeyError("cause")
    return error


def in_context(error: Exception) -> Exception:
    error.__context__ = KeyError("context")
    return error


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (raised(ValueError("wrong")), "Traceback (most recent call last):"),
        (caused(ValueError("wrong")), "KeyError: 'cause'"),
        (in_context(ValueError("wrong")), "KeyError: 'context'"),
    ],
)
def test_portable_error_carries_its_traceback_and_causes(error: Exception, shown: str) -> None:
    (note,) = arrived(error).__notes__
    first, *lines = note.split("\n")
    assert first == "in worker 1:"
    assert shown in lines
    assert lines[-1] == "ValueError: wrong"


class Locked(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def fail(text: str) -> Any:
    raise KeyboardInterrupt(text)


class FailsOnArrival(Exception):
    def __reduce__(self) -> Any:
        return fail, self.args


class BecomesText(Exception):
    def __reduce__(self) -> Any:
        return str, self.args


@pytest.mark.parametrize("kind", [Locked, FailsOnArrival, BecomesText])
def test_error_that_cannot_be_sent_arrives_as_its_text(kind: type[Exception]) -> None:
    found = arrived(kind("wrong"))
    assert type(found) is LostError
    assert str(found) == f"{kind.__name__}: wrong"
    assert found.__notes__ == ["in worker 1"]
