"""Test the checks of values in a graph: item types, and values that a process must be able to unpickle."""

from __future__ import annotations

import collections.abc
import functools
import io
import threading
import typing
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from support.graph_samples import Animal, Dog, Row, Speaker, T, UserId, only, pass_on, to_int, to_text

from flowchan import In, Out
from flowchan.check.rules import check
from flowchan.check.types import fits
from flowchan.declare.blueprint import Blueprint

# Problem: type


def test_items_of_the_wrong_type_are_reported_with_both_types(graph: Blueprint) -> None:
    graph.source(range(3)).batch(2).map(to_int).sink(print)
    problem = only(graph)
    assert (problem.rule, problem.stage) == ("type", "to_int")
    assert problem.message == (
        "'item' of 'to_int' takes str, but stream 'batch' has items of type list[int]; add a map "
        "between them that converts the items, or correct one of the annotations"
    )


def test_ports_of_the_wrong_type_are_reported(graph: Blueprint) -> None:
    def joins(numbers: In[int], texts: In[str], out: Out[str]) -> None: ...

    texts, numbers = graph.source(range(3)).map(to_text), graph.source(range(3))
    graph.stage(joins, texts, numbers).map(to_text).sink(print)
    assert [problem.message.partition(";")[0] for problem in check(graph)] == [
        "'numbers' of 'joins' takes int, but stream 'to_text' has items of type str",
        "'texts' of 'joins' takes str, but stream 'source-2' has items of type int",
        "'item' of 'to_text' takes int, but stream 'joins' has items of type str",
    ]


def test_reduce_items_are_checked_against_the_functions_second_parameter(graph: Blueprint) -> None:
    def longest(so_far: str, item: int) -> str:
        return so_far

    graph.source(range(3)).reduce(longest)
    assert check(graph) == ()
    graph.source("abc").reduce(longest)
    assert "'item' of 'longest' takes int" in only(graph).message


def test_result_that_is_not_iterable_is_reported(graph: Blueprint) -> None:
    def one() -> int:
        return 1

    def maybe(item: Any) -> list[int] | None: ...

    begin: Any = graph.source
    begin(one).flat_map(to_text).flat_map(maybe).flat_map(Path).sink(print)
    assert [problem.message for problem in check(graph)] == [
        "source iterates over the result of 'one', but that result has type int; return an iterable, or "
        "yield the items",
        "flat_map iterates over the result of 'Path', but that result has type Path; return an "
        "iterable, or yield the items",
    ]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (int, int),
        (Dog, Animal),
        (Animal, Dog),
        (int, float),
        (bool, int),
        (bool, float),
        (int, object),
        (int, Any),
        (int, T),
        (int, int | None),
        (int | str, str),
        (typing.Optional[int], int),  # noqa: UP045
        (list[int], list),
        (list[int], list[str]),
        (list[int], Sequence[int]),
        (Iterator[int], Iterable[int]),
        (Counter[str], Mapping[str, int]),
        (dict[str, int], Row),
        (Row, dict),
        (int, UserId),
        (UserId, int),
        (str, Literal["a"]),
        (Annotated[int, "small"], int),
        (Dog, Speaker),
        (type(to_text), collections.abc.Callable[[int], str]),
        (type[int], type),
        (bytearray, bytes),
        (Fraction, float),
        (type(None), int | None),
        (None, int),
        (int, None),
    ],
)
def test_types_that_may_be_compatible_are_not_reported(given: Any, wanted: Any) -> None:
    assert fits(given, wanted)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (int, str),
        (str, Path),
        (float, int),
        (list[int], int),
        (int, list[int]),
        (int | float, str),
        (int, str | bytes),
        (type(None), int),
        (UserId, str),
        (Annotated[int, "small"], str),
        (tuple[int, str], dict),
    ],
)
def test_incompatible_types_are_reported(given: Any, wanted: Any) -> None:
    assert not fits(given, wanted)


# Problem: pickle

LOCK = threading.Lock()
OWN_MODULE = {"__name__": "__main__", "LOCK": LOCK, "threading": threading}


def made_in_main(source: str) -> Any:
    """Return a function as if a script had defined it.

    The function is pickled by value, with the globals it uses.
    """
    namespace = dict(OWN_MODULE)
    exec(source, namespace)
    return namespace["f"]


class Holder:
    def __init__(self) -> None:
        self.name = "x"
        self.parts = {"lock": threading.Lock()}

    def method(self, item: int) -> int:
        return item

    def __call__(self, item: int) -> int:
        return item


class Refuses:
    def __init__(self) -> None:
        self.name = "x"

    def __reduce__(self) -> Any:
        raise ValueError("I stay\nhere")


def local(value: Any) -> Any:
    return lambda item: (item, value)


@pytest.mark.parametrize(
    ("function", "path"),
    [
        (local(LOCK), "captured variable 'value' is a _thread.lock"),
        (local([1, LOCK]), "captured variable 'value', element 1 is a _thread.lock"),
        (local(local(LOCK)), "captured variable 'value', captured variable 'value' is a _thread.lock"),
        (local({"x": {LOCK}}), "captured variable 'value', item 'x', element 0 is a _thread.lock"),
        (functools.partial(print, LOCK), "argument 1 is a _thread.lock"),
        (functools.partial(print, file=LOCK), "argument 'file' is a _thread.lock"),
        (functools.partial(local(LOCK)), "function '<lambda>', captured variable 'value' is a _thread.lock"),
        (Holder().method, "attribute 'parts', item 'lock' is a _thread.lock"),
        (Holder(), "its attribute 'parts', item 'lock' is a _thread.lock"),
        (lambda item, held=LOCK: item, "its default of 'held' is a _thread.lock"),
        (lambda item, *, held=LOCK: item, "its default of 'held' is a _thread.lock"),
        (made_in_main("def f(item): return LOCK"), "its global variable 'LOCK' is a _thread.lock"),
        (
            made_in_main("def f(item): return [LOCK for _ in (1, 2)]"),
            "its global variable 'LOCK' is a _thread.lock",
        ),
        (
            made_in_main("def g(): return LOCK\ndef f(item): return g()"),
            "its global variable 'g', global variable 'LOCK' is a _thread.lock",
        ),
        (
            made_in_main("class f:\n  held = LOCK\n  def __call__(self, item): return item"),
            "its class attribute 'held' is a _thread.lock",
        ),
        (local(io.StringIO), None),
        (local(Refuses()), ".Refuses (I stay)"),
        (local(Blueprint("g")), "is a flowchan.declare.blueprint.Blueprint (graph 'g' can't be pickled"),
    ],
)
def test_unpicklable_value_is_named(graph: Blueprint, function: Any, path: str | None) -> None:
    graph.source(range(3)).sink(function, on="process", name="there")
    problems = check(graph)
    if path is None:
        assert problems == ()
        return
    (problem,) = problems
    assert (problem.rule, problem.stage) == ("pickle", "there")
    assert path in problem.message
    assert "can't be sent to a process: its " in problem.message
    assert problem.message.endswith('or use on="thread"')


def test_arguments_of_a_stage_must_be_picklable(graph: Blueprint) -> None:
    graph.stage(pass_on, graph.source(range(3)), on="process", limit=LOCK).sink(print)
    assert only(graph).message.startswith(
        "argument 'limit' can't be sent to a process: it is a _thread.lock ("
    )
    other = Blueprint("other")
    other.source(iter, LOCK, on="process").sink(print)
    assert only(other).message.startswith("argument 1 can't be sent to a process: it is a _thread.lock (")


def test_error_for_a_generator_in_a_process_names_a_remedy(graph: Blueprint) -> None:
    graph.source((n for n in range(3)), on="process").sink(print)
    assert only(graph).message.startswith("source's iterable can't be sent to a process: it is a generator (")
    assert only(graph).message.endswith("pass the function that creates it, and its arguments")


def test_stage_on_threads_accepts_unpicklable_values(graph: Blueprint) -> None:
    graph.source(n for n in range(3)).map(local(LOCK)).sink(print)
    assert check(graph) == ()


def test_lambdas_closures_and_functions_from_main_can_be_sent(graph: Blueprint) -> None:
    stream = graph.source(range(3), on="process").map(lambda item: item, on="process")
    stream = stream.map(local([1, 2]), on="process").map(
        made_in_main("def f(item): return threading"), on="process"
    )
    stream.sink(print)
    assert check(graph) == ()


def test_search_for_the_unpicklable_part_of_a_cyclic_object_ends(graph: Blueprint) -> None:
    loop: list[Any] = []
    loop.extend([loop, LOCK])
    graph.source(range(3)).sink(local(loop), on="process")
    assert "captured variable 'value', element 1 is a _thread.lock" in only(graph).message
