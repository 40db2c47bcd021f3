"""Test a new operator, which needs only one row in the table and one body.

The checks, both transports, the report, the live view and the pictures must support it without changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from flowchan import Graph, In, Out, Stream
from flowchan.declare.operators import OPERATORS, Operator
from flowchan.declare.placements import PLACEMENTS, Placement
from flowchan.declare.stream import streams_of
from flowchan.declare.stream_handle import origins
from flowchan.run.worker.operator_job import SKIPPED, OperatorJob
from flowchan.viz import to_dot, to_mermaid
from flowchan.viz.live.model import plain_line


def every_other(job: OperatorJob, *, items: In[Any], out: Out[Any]) -> None:
    """Run the new operator: put the results of every other item, beginning with the first."""
    for place, item in enumerate(items):
        if place % 2 == 0:
            try:
                result = job.function(item)
            except BaseException as error:
                result = job.recover(job.function, item, error)
            if result is not SKIPPED:
                out.put(result)


EVERY_OTHER = Operator(
    name="every_other",
    body=f"{__name__}:every_other",
    calls="item",
    per_item=True,
    lets_go="skipped",
    describe=lambda options: "one of 2",
)


@pytest.fixture(autouse=True)
def in_the_table() -> Iterator[None]:
    OPERATORS[EVERY_OTHER.name] = EVERY_OTHER
    yield
    del OPERATORS[EVERY_OTHER.name]


def declare(stream: Stream, function: Any, **options: Any) -> Stream:
    stage = stream.graph._declare(
        EVERY_OTHER.name,
        function=function,
        inputs=origins(stream.graph, stream),
        outputs=[("out", int)],
        errors=True,
        **options,
    )
    return streams_of(stream.graph, stage)[0]


def half(number: int) -> float:
    return 12 / number


@pytest.mark.parametrize("on", [name for name, place in PLACEMENTS.items() if not place.nowhere])
def test_toy_operator_runs_and_is_reported(on: Placement) -> None:
    graph = Graph("toy")
    halves = declare(graph.source([1, 2, 3, 4, 0, 6]), half, on=on)
    kept, failed = halves.collect(), halves.errors.collect()
    run = graph.start()
    results = run.wait()
    assert results[kept] == [12.0, 4.0]
    assert [one.item for one in results[failed]] == [0]
    assert "6 = 2 out + 3 skipped + 1 failed" in run.report()
    assert re.search(r"half (\(bottleneck\) )?6 ", plain_line(run.stats()))


def test_toy_operator_has_several_workers_on_threads() -> None:
    graph = Graph("toy")
    kept = declare(graph.source(range(1, 100)), half, workers=3).collect()
    assert len(graph.run()[kept]) in range(49, 52)


def test_toy_operator_is_checked() -> None:
    graph = Graph("toy")
    declare(graph.source([1]), lambda one, two: one).collect()
    (problem,) = graph.check()
    assert problem.rule == "ports"
    assert problem.message.startswith("every_other calls '<lambda>' with one argument, the item")


def test_toy_operator_rejects_async_functions_without_an_async_body() -> None:
    async def late(number: int) -> int:
        return number

    graph = Graph("toy")
    declare(graph.source([1]), late).collect()
    (problem,) = graph.check()
    assert (problem.rule, problem.message.partition(";")[0]) == (
        "async",
        "every_other does not accept an async function",
    )


def test_toy_operator_is_drawn() -> None:
    graph = Graph("toy")
    declare(graph.source([1], name="numbers"), half).collect()
    for text in (to_dot(graph), to_mermaid(graph)):
        assert "every_other · " in text
        assert "one of 2" in text
