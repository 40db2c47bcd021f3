"""Test which stages have a fixed number of workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flowchan import Graph, In
from flowchan.declare.fixed_workers import fixed_workers
from flowchan.hosts import local


async def later(number: int) -> int:
    return number


def ports(numbers: In[int]) -> None:
    pass


@pytest.mark.parametrize(
    ("declare", "text"),
    [
        (lambda numbers: numbers.map(abs, name="stage"), ""),
        (lambda numbers: numbers.sink(abs, on="process", workers=2, name="stage"), ""),
        (lambda numbers: numbers.batch(2, name="stage"), "a batch"),
        (lambda numbers: numbers.graph.stage(ports, numbers, name="stage"), "a stage"),
        (lambda numbers: numbers.map(abs, key=abs, name="stage"), "a map with key="),
        (lambda numbers: numbers.map(later, name="stage"), "a map with an async def function"),
        (lambda numbers: numbers.map(abs, on=local(1), name="stage"), "a map on hosts"),
        (
            lambda numbers: numbers.map(abs, on="process", gpus=1, name="stage"),
            "a map with gpus=1 for each worker",
        ),
        (
            lambda numbers: numbers.map(abs, workers=2, name="stage").allreduce("sum"),
            "a map with an output or input for each worker",
        ),
    ],
)
def test_fixed_number_of_workers_has_a_description(declare: Callable[[Any], Any], text: str) -> None:
    graph = Graph("fixed")
    declare(graph.source(range(3)))
    assert fixed_workers(graph.stage_named("stage")) == text
