"""Test that tracebacks of flowchan's own errors show the user's line and at most one line of flowchan."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from flowchan import Channel, Graph, GraphError, RunError, hosts
from flowchan.items.tracebacks import ends_at_caller


def frames_of(call: Callable[[], Any], kind: type[BaseException]) -> list[str]:
    """Return the names of the files in the traceback, from the user's call on."""
    with pytest.raises(kind) as caught:
        call()
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    return files[len(files) - files[::-1].index(__file__) :]


def unread() -> None:
    graph = Graph("unread")
    graph.source([1]).map(str)
    graph.run()


def fails() -> None:
    graph = Graph("fails")
    graph.source([0]).map(lambda number: 1 // number).sink(print)
    graph.run()


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: Channel(0), ValueError),
        (lambda: Channel(1, accross="processes"), TypeError),  # type: ignore[call-arg]
        (lambda: Channel(1, across="processes").put([threading.Lock()]), TypeError),
        (lambda: Graph("g").source([1]).map(str, on="gpu"), ValueError),  # type: ignore[call-overload]
        (lambda: Graph("g").source([1]).batch(size=0), ValueError),
        (lambda: Graph("g").merge(), TypeError),
        (lambda: hosts.local(0), ValueError),
        (unread, GraphError),
        (fails, RunError),
    ],
)
def test_traceback_of_an_error_shows_one_line_from_flowchan(
    call: Callable[[], Any], kind: type[BaseException]
) -> None:
    assert len(frames_of(call, kind)) == 1


def test_traceback_of_a_missing_argument_shows_no_flowchan_line() -> None:
    assert frames_of(lambda: Graph("g").source([1]).map(), TypeError) == []  # type: ignore[call-overload]


def test_traceback_of_an_error_in_user_code_is_complete() -> None:
    @ends_at_caller
    def outer(function: Callable[[], Any]) -> Any:
        return inner(function)

    def inner(function: Callable[[], Any]) -> Any:
        return function()

    def user() -> None:
        raise LookupError

    with pytest.raises(LookupError) as caught:
        outer(user)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[1:] == ["outer", "inner", "user"]


def test_rejected_item_has_a_cause_only_if_user_code_raised() -> None:
    class Refuses:
        def __reduce__(self) -> str:
            raise LookupError("nothing to send")

    ch: Channel[Any] = Channel(1, across="processes")
    with pytest.raises(TypeError, match="nothing to send") as caught:
        ch.put(Refuses())
    assert isinstance(caught.value.__cause__, LookupError)
    with pytest.raises(TypeError, match=r"cannot pickle '_thread.lock'") as caught:
        ch.put(threading.Lock())
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_failure_of_a_stage_shows_only_the_users_lines() -> None:
    class Work:
        def __init__(self) -> None:
            raise LookupError

        def __call__(self, item: int) -> int:
            return item

    for work in (Work, lambda number: 1 // number):
        graph = Graph("fails")
        graph.source([0]).map(work).sink(print)
        with pytest.raises(RunError) as caught:
            graph.run()
        cause = caught.value.exceptions[0].__cause__
        assert cause is not None
        assert [frame.filename for frame in traceback.extract_tb(cause.__traceback__)] == [__file__]


def test_death_of_a_worker_has_a_note_without_a_traceback() -> None:
    graph = Graph("dies")
    graph.source([0]).map(lambda _: os._exit(3), on="process", max_deaths=1).sink(print)
    with pytest.raises(RunError) as caught:
        graph.run()
    cause = caught.value.exceptions[0].__cause__
    assert cause is not None
    assert cause.__notes__ == ["in the worker map 1"]
