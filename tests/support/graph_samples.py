"""Define functions, types and graphs that the tests of graph checks share."""

from __future__ import annotations

from typing import Any, NewType, Protocol, TypedDict, TypeVar

import pytest

from flowchan import In, Out
from flowchan.check.rules import check
from flowchan.declare.blueprint import Blueprint
from flowchan.declare.operators import OPERATORS
from flowchan.declare.stream import Stream
from flowchan.declare.stream_handle import origins
from flowchan.declare.values import Output, Stage
from flowchan.errors import Problem

T = TypeVar("T")
UserId = NewType("UserId", int)


class Animal: ...


class Dog(Animal): ...


class Speaker(Protocol):
    def speak(self) -> str: ...


class Row(TypedDict):
    id: int


def to_text(item: int) -> str:
    return str(item)


def to_int(item: str) -> int:
    return int(item)


def pass_on(items: In[int], out: Out[int], limit: int) -> None: ...


def only(graph: Blueprint) -> Problem:
    (problem,) = check(graph)
    return problem


def rules(graph: Blueprint) -> list[str]:
    return [problem.rule for problem in check(graph)]


def by_hand(graph: Blueprint, name: str, *inputs: Stream, capacity: Any = 64) -> None:
    """Declare a stage directly, because no operator would declare it."""
    ports = tuple(str(port) for port in range(len(inputs)))
    output = Output(name, "out", None, capacity)
    read = origins(graph, *inputs)
    graph._add(Stage(name, OPERATORS["zip"], graph.where, inputs=read, input_ports=ports, outputs=(output,)))


def handle(graph: Blueprint, name: str) -> Stream:
    return Stream(graph, name, "out", name)


@pytest.fixture
def graph() -> Blueprint:
    return Blueprint("test")
