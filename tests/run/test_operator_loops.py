"""Test loops of operators directly, with a scripted clock or with an output that has ended."""

from __future__ import annotations

from typing import Any, cast

import pytest
from support.scripted_clock import ScriptedClock

from flowchan import Channel, Closed, Drained, Empty
from flowchan.run.worker import operator_loops
from flowchan.run.worker.operator_job import OperatorJob
from flowchan.run.worker.requests import Answering


class TimedInput:
    """Input whose items arrive at fixed times, and whose waits advance the clock."""

    def __init__(self, clock: ScriptedClock, arrivals: dict[float, Any]) -> None:
        self._clock = clock
        self._arrivals = list(arrivals.items())

    def get_many(self, size: int) -> list[Any]:
        return [self.get_more(None)]

    def get_more(self, timeout: float | None) -> Any:
        if not self._arrivals:
            raise Drained
        arrival, item = self._arrivals[0]
        if timeout is not None and arrival > self._clock.now + timeout:
            self._clock.now += timeout
            raise Empty
        self._clock.now = max(self._clock.now, arrival)
        del self._arrivals[0]
        return item


class TimedOutput:
    """Output that records its items and the times of their puts."""

    def __init__(self, clock: ScriptedClock) -> None:
        self._clock = clock
        self.items: list[tuple[float, Any]] = []

    def put(self, item: Any) -> None:
        self.items.append((self._clock.now, item))


@pytest.mark.parametrize(
    ("timeout", "expected"),
    [(10.0, [(10.0, "abc"), (20.0, "def")]), (None, [(20.0, "abcdef")])],
)
def test_timeout_of_a_batch_begins_with_its_first_item(
    timeout: float | None, expected: list[tuple[float, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ScriptedClock()
    monkeypatch.setattr(operator_loops, "time", clock)
    items = TimedInput(clock, {0.0: "a", 4.0: "b", 8.0: "c", 12.0: "d", 16.0: "e", 20.0: "f"})
    out = TimedOutput(clock)
    job = OperatorJob("batch", list, options={"size": 100, "timeout": timeout})
    operator_loops.batch(job, items=cast(Any, items), out=cast(Any, out))
    assert [(at, "".join(batch)) for at, batch in out.items] == expected


class Dropped:
    """Record the dropped items, each of which is reported to its caller."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def drop_item(self, item: Any) -> None:
        self.items.append(item)


@pytest.mark.parametrize(
    ("loop", "options", "dropped"),
    [
        (operator_loops.take, {"n": 3}, "a"),
        (operator_loops.merge, {}, "a"),
        (operator_loops.batch, {"size": 2, "timeout": None}, ["a", "b"]),
    ],
)
def test_item_for_an_ended_output_is_reported_to_its_caller(
    loop: Any, options: dict[str, Any], dropped: Any
) -> None:
    before, after, answering = Channel[Any](10), Channel[Any](10), Dropped()
    before.put_many(["a", "b", "c"])
    after.close()
    job = OperatorJob(loop.__name__, list, options=options, answering=cast(Answering, answering))
    with before.reader() as items, pytest.raises(Closed):
        loop(job, items=items, out=after.writer())
    assert answering.items == [dropped]
