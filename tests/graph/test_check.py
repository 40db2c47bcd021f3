"""The check of a declared graph: each rule finds what it is for, says it well, and raises no false alarm."""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import io
import threading
import typing
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, NewType, Protocol, TypedDict, TypeVar

import psutil
import pytest

from flowchan._core import In, Out
from flowchan.check import check, raise_for
from flowchan.check_types import fits
from flowchan.errors import GraphError
from flowchan.graph import Blueprint
from flowchan.stage import Output, Problem, Stage
from flowchan.stream import Stream

T = TypeVar("T")
UserId = NewType("UserId", int)


class Animal: ...


class Dog(Animal): ...


class Speaks(Protocol):
    def speak(self) -> str: ...


class Row(TypedDict):
    id: int


def to_text(item: int) -> str:
    return str(item)


def to_int(item: str) -> int:
    return int(item)


def pass_on(items: In[int], out: Out[int], limit: int) -> None: ...


@pytest.fixture
def graph() -> Blueprint:
    return Blueprint("test")


def only(graph: Blueprint) -> Problem:
    (problem,) = check(graph)
    return problem


def rules(graph: Blueprint) -> list[str]:
    return [problem.rule for problem in check(graph)]


def by_hand(graph: Blueprint, name: str, *inputs: Stream, capacity: Any = 64) -> None:
    """A stage that the verbs would not declare."""
    ports = tuple(str(port) for port in range(len(inputs)))
    output = Output(name, "out", None, capacity)
    graph._add(Stage(name, "zip", graph.where, inputs=inputs, input_ports=ports, outputs=(output,)))


def handle(graph: Blueprint, name: str) -> Stream:
    return Stream(graph, name, "out", name)


# The whole


def test_a_graph_that_can_run_has_no_problem(graph: Blueprint) -> None:
    numbers, rest = graph.source(range(3)).tee(2)
    total = numbers.map(to_text, on="process", workers=2).map(lambda text: len(text), on="process").reduce(max, 0)
    graph.merge(rest, graph.input()).batch(3).unbatch().sink(print)
    total.errors.sink(print)
    assert check(graph) == ()
    raise_for(graph)


def test_all_problems_are_found_at_once_in_the_order_of_declaration(graph: Blueprint) -> None:
    lock = threading.Lock()
    start = graph.source(range(3), name="start")
    start.map(lambda item: (lock, item), on="process", name="locked")
    start.map(to_int, name="typed").sink(print)
    start.map(to_text, name="typed").sink(lambda: None, name="none")
    assert [(problem.stage, problem.rule) for problem in check(graph)] == [
        ("start", "read-twice"),
        ("locked", "unread"),
        ("locked", "pickle"),
        ("typed", "type"),
        ("typed", "duplicate"),
        ("none", "ports"),
    ]


def test_raise_for_lists_every_problem_with_the_users_line(graph: Blueprint) -> None:
    start = graph.source(range(3))
    start.map(to_int)
    with pytest.raises(GraphError) as raised:
        raise_for(graph)
    assert raised.value.problems == check(graph)
    text = str(raised.value)
    assert text.startswith("graph 'test' has 2 problems:\n")
    where = graph.stages[1].where
    assert where.file == __file__
    assert text.count(f"  {where}: stage 'to_int': ") == 2


def test_a_thousand_stages_are_checked(graph: Blueprint) -> None:
    stream = graph.source(range(3))
    for _ in range(500):
        stream = stream.map(to_text, on="process", capacity=1).map(lambda item: int(item))
    stream.sink(print)
    assert check(graph) == ()


# empty, duplicate, foreign


def test_a_graph_without_stages_is_empty(graph: Blueprint) -> None:
    problem = only(graph)
    assert problem.rule == "empty"
    assert str(problem) == f"{graph.where}: graph 'test' has no stages; begin it with graph.source(…)"


def test_a_graph_without_a_source_is_empty(graph: Blueprint) -> None:
    by_hand(graph, "a", handle(graph, "a"))
    assert rules(graph) == ["empty", "cycle"]


def test_a_name_given_twice_is_reported_with_its_first_owner(graph: Blueprint) -> None:
    graph.source(range(3), name="same").batch(3, name="same").sink(print)
    first = graph.stages[0].where
    problems = [problem for problem in check(graph) if problem.rule == "duplicate"]
    assert [problem.message for problem in problems] == [
        f"the name 'same' is taken by the source at {first}; give another name="
    ]


def test_a_name_given_twice_leads_to_no_other_problem(graph: Blueprint) -> None:
    graph.source(range(3), name="same").map(to_text, name="same").sink(print)
    assert rules(graph) == ["duplicate"]


def test_channels_of_one_name_are_reported(graph: Blueprint) -> None:
    left, right = graph.source(range(3)).tee(2)
    left.batch(3, name="tee.1").sink(print)
    right.sink(print)
    assert only(graph).message == (
        f"its channel 'tee.1' is named like one of stage 'tee' at {graph.stages[1].where}; "
        "give one of the stages another name="
    )


def test_a_stream_of_another_graph_is_reported_with_its_home(graph: Blueprint) -> None:
    other = Blueprint("other")
    strange = other.source("abc", name="letters")
    graph.source(range(3)).zip(strange).sink(print)
    problem = only(graph)
    assert (problem.rule, problem.stage) == ("foreign", "zip")
    assert f"stream 'letters' of another graph, 'other' declared at {other.where}" in problem.message


def test_a_stream_that_nobody_writes_is_reported(graph: Blueprint) -> None:
    graph.merge(graph.source(range(3)), handle(graph, "nothing")).sink(print)
    assert (only(graph).rule, only(graph).message) == (
        "foreign",
        "reads stream 'nothing', but no stage of graph 'test' writes it",
    )


# cycle


def test_a_cycle_is_reported_as_its_loop(graph: Blueprint) -> None:
    start = graph.source(range(3), name="start")
    by_hand(graph, "a", start, handle(graph, "c"))
    by_hand(graph, "b", handle(graph, "a"))
    by_hand(graph, "c", handle(graph, "b"))
    problem = only(graph)
    assert (problem.rule, problem.stage) == ("cycle", "a")
    assert "a → b → c → a" in problem.message


def test_each_cycle_is_reported_once(graph: Blueprint) -> None:
    graph.source(range(3)).sink(print)
    by_hand(graph, "self", handle(graph, "self"))
    by_hand(graph, "a", handle(graph, "b"))
    by_hand(graph, "b", handle(graph, "a"))
    loops = [problem.message for problem in check(graph) if problem.rule == "cycle"]
    assert ["self → self" in loops[0], "a → b → a" in loops[1], len(loops)] == [True, True, 2]


def test_a_stage_before_a_cycle_is_no_part_of_the_loop(graph: Blueprint) -> None:
    by_hand(graph, "late", handle(graph, "z"))
    by_hand(graph, "y", handle(graph, "z"), handle(graph, "x"))
    by_hand(graph, "z", handle(graph, "y"))
    by_hand(graph, "x")
    loops = [problem.message for problem in check(graph) if problem.rule == "cycle"]
    assert len(loops) == 1
    assert "loop: y → z → y;" in loops[0]


def test_branches_that_meet_again_are_no_cycle(graph: Blueprint) -> None:
    left, right = graph.source(range(3)).tee(2)
    left.map(to_text).zip(right).sink(print)
    assert check(graph) == ()


# unread, read-twice


def test_an_unread_output_is_reported_with_the_remedy(graph: Blueprint) -> None:
    left, _ = graph.source(range(3)).tee(2)
    left.sink(print)
    assert (only(graph).rule, only(graph).message) == (
        "unread",
        "nobody reads its output 'tee.1'; end it with .sink(function), or with .collect() to have the items as a "
        "result",
    )


def test_results_and_error_streams_need_no_reader(graph: Blueprint) -> None:
    left, right = graph.source(range(3)).map(to_text).tee(2)
    left.reduce(max)
    right.collect()
    assert check(graph) == ()


def test_a_stream_read_twice_is_reported_with_both_readers(graph: Blueprint) -> None:
    start = graph.source(range(3))
    start.sink(print)
    start.sink(print)
    one, two = (stage.where for stage in graph.stages[1:])
    problem = only(graph)
    assert problem.rule == "read-twice"
    assert f"by 'print' ({one}) and 'print-2' ({two})" in problem.message
    assert problem.message.endswith("give each its own with .tee(2)")


def test_an_error_stream_read_twice_is_reported(graph: Blueprint) -> None:
    mapped = graph.source(range(3)).map(to_text)
    mapped.sink(print)
    mapped.errors.sink(print)
    mapped.errors.sink(print)
    assert rules(graph) == ["read-twice"]


# ports


def test_a_general_stage_takes_one_stream_per_in_parameter(graph: Blueprint) -> None:
    graph.stage(pass_on, name="short", limit=1).sink(print)
    start = graph.source(range(3))
    graph.stage(pass_on, start, start, name="long", limit=1).sink(print)
    assert [problem.message for problem in check(graph) if problem.rule == "ports"] == [
        "'pass_on' has 1 In parameter (items), but 0 streams were given; give one stream for each",
        "'pass_on' has 1 In parameter (items), but 2 streams were given; give one stream for each",
    ]


def test_a_parameter_that_is_neither_port_nor_given_is_reported(graph: Blueprint) -> None:
    graph.stage(pass_on, graph.source(range(3))).sink(print)
    assert only(graph).message == (
        "parameter 'limit' of 'pass_on' is neither a port nor given; annotate it In[...] or Out[...], "
        "or give it as limit=..."
    )


def test_an_argument_without_a_parameter_is_reported(graph: Blueprint) -> None:
    graph.stage(pass_on, graph.source(range(3)), limit=1, speed=2).sink(print)
    assert only(graph).message == "'pass_on' has no parameter 'speed': (items, out, limit)"


def test_a_port_given_as_an_argument_is_reported(graph: Blueprint) -> None:
    graph.stage(pass_on, graph.source(range(3)), limit=1, out=2).sink(print)
    assert only(graph).message.startswith("'out' of 'pass_on' is a port and can't be given as an argument")


def test_a_positional_only_port_is_reported(graph: Blueprint) -> None:
    def ends(items: In[int], /) -> None: ...

    graph.stage(ends, graph.source(range(3)))
    assert only(graph).message == "parameter 'items' of 'ends' is positional-only; remove the '/' from the signature"


def test_a_general_stage_without_ports_is_reported(graph: Blueprint) -> None:
    graph.source(range(3)).sink(print)
    graph.stage(lambda: None)
    assert only(graph).message.startswith("'<lambda>' has no parameter annotated In[...] or Out[...]")


def test_a_general_stage_whose_signature_is_unknown_is_reported(graph: Blueprint) -> None:
    def hidden(out: Out[int]) -> None: ...

    hidden.__signature__ = "hidden"  # type: ignore[attr-defined]
    graph.source(range(3)).sink(print)
    graph.stage(hidden)
    assert only(graph).message.startswith("the signature of 'hidden' can't be read, so its ports are unknown")


def test_a_general_stage_with_only_outputs_is_a_source(graph: Blueprint) -> None:
    def begins(out: Out[int], *rest: int, **more: int) -> None: ...

    graph.stage(begins, anything=3).sink(print)
    assert check(graph) == ()


def test_a_function_that_cannot_take_the_item_is_reported(graph: Blueprint) -> None:
    def two(item: int, factor: int) -> int:
        return item * factor

    graph.source(range(3)).map(two).reduce(to_text)
    assert [problem.message for problem in check(graph)] == [
        "map calls 'two' with one argument, the item, but its parameters are (item, factor): missing a required "
        "argument: 'factor'; bind the others with functools.partial",
        "reduce calls 'to_text' with two arguments, the result so far and the item, but its parameters are (item): "
        "too many positional arguments; bind the others with functools.partial",
    ]


def test_functions_that_can_take_the_item_pass(graph: Blueprint) -> None:
    class Factor:
        def __init__(self, factor: int = 1) -> None: ...

        def __call__(self, item: int, more: int = 0) -> int:
            return item

    def two(factor: int, item: int) -> int:
        return item * factor

    stream = graph.source(range(3)).map(functools.partial(two, 3)).map(Factor).map(Factor(2)).map(Factor(3).__call__)
    stream = stream.map(functools.partial(Factor, 3)).map(abs).map(str).map(str.upper).map("{}".format).map(Path)
    stream = stream.filter(Path.exists).map(type).map(repr).map(Path)
    stream.filter(Path.exists).sink(print)
    assert check(graph) == ()


def test_a_callable_class_that_needs_arguments_is_reported(graph: Blueprint) -> None:
    class Model:
        def __init__(self, path: str) -> None: ...

        def __call__(self, item: int) -> int:
            return item

    graph.source(range(3)).map(Model).map(functools.partial(Model, "x")).sink(print)
    assert only(graph).message == (
        "class 'Model' is built once per worker without arguments, but its parameters are (path): "
        "missing a required argument: 'path'; bind them with functools.partial"
    )


def test_arguments_that_a_source_cannot_take_are_reported(graph: Blueprint) -> None:
    def lines(path: str) -> Iterator[str]:
        yield path

    graph.source(lines).sink(print)
    graph.source(lines, "x", 3).sink(print)
    graph.source(lines, path="x").sink(print)
    graph.source(range, 3).sink(print)
    assert [(problem.rule, problem.stage) for problem in check(graph)] == [("ports", "lines"), ("ports", "lines-2")]


# type


def test_items_of_the_wrong_type_are_reported_with_both_types(graph: Blueprint) -> None:
    graph.source(range(3)).batch(2).map(to_int).sink(print)
    problem = only(graph)
    assert (problem.rule, problem.stage) == ("type", "to_int")
    assert problem.message == (
        "'item' of 'to_int' takes str, but stream 'batch' gives list[int]; "
        "put a map between them that converts, or correct one of the annotations"
    )


def test_ports_of_the_wrong_type_are_reported(graph: Blueprint) -> None:
    def joins(numbers: In[int], texts: In[str], out: Out[str]) -> None: ...

    texts, numbers = graph.source(range(3)).map(to_text), graph.source(range(3))
    graph.stage(joins, texts, numbers).map(to_text).sink(print)
    assert [problem.message.partition(";")[0] for problem in check(graph)] == [
        "'numbers' of 'joins' takes int, but stream 'to_text' gives str",
        "'texts' of 'joins' takes str, but stream 'source-2' gives int",
        "'item' of 'to_text' takes int, but stream 'joins' gives str",
    ]


def test_a_reduction_is_checked_by_its_second_parameter(graph: Blueprint) -> None:
    def longest(so_far: str, item: int) -> str:
        return so_far

    graph.source(range(3)).reduce(longest)
    assert check(graph) == ()
    graph.source("abc").reduce(longest)
    assert "'item' of 'longest' takes int" in only(graph).message


def test_what_cannot_be_iterated_is_reported(graph: Blueprint) -> None:
    def one() -> int:
        return 1

    def maybe(item: Any) -> list[int] | None: ...

    begin: Any = graph.source
    begin(one).flat_map(to_text).flat_map(maybe).flat_map(Path).sink(print)
    assert [problem.message for problem in check(graph)] == [
        "source iterates over what 'one' returns, but that is int; return an iterable, or yield the items",
        "flat_map iterates over what 'Path' returns, but that is Path; return an iterable, or yield the items",
    ]


@pytest.mark.parametrize(
    ("given", "asked"),
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
        (Dog, Speaks),
        (type(to_text), collections.abc.Callable[[int], str]),
        (type[int], type),
        (bytearray, bytes),
        (Fraction, float),
        (type(None), int | None),
        (None, int),
        (int, None),
    ],
)
def test_types_that_may_fit_raise_no_alarm(given: Any, asked: Any) -> None:
    assert fits(given, asked)


@pytest.mark.parametrize(
    ("given", "asked"),
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
def test_types_that_cannot_fit_raise_an_alarm(given: Any, asked: Any) -> None:
    assert not fits(given, asked)


# pickle

LOCK = threading.Lock()
OWN_MODULE = {"__name__": "__main__", "LOCK": LOCK, "threading": threading}


def made_in_main(source: str) -> Any:
    """A function as a script's own: it travels by value, with the globals it uses."""
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
        (made_in_main("def f(item): return [LOCK for _ in (1, 2)]"), "its global variable 'LOCK' is a _thread.lock"),
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
        (local(Blueprint("g")), "is a flowchan.graph.Blueprint (graph 'g' is a declaration"),
    ],
)
def test_what_cannot_be_pickled_is_named(graph: Blueprint, function: Any, path: str | None) -> None:
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


def test_the_arguments_of_a_stage_are_pickled_too(graph: Blueprint) -> None:
    graph.stage(pass_on, graph.source(range(3)), on="process", limit=LOCK).sink(print)
    assert only(graph).message.startswith("argument 'limit' can't be sent to a process: it is a _thread.lock (")
    other = Blueprint("other")
    other.source(iter, LOCK, on="process").sink(print)
    assert only(other).message.startswith("argument 1 can't be sent to a process: it is a _thread.lock (")


def test_a_generator_in_a_process_has_a_remedy_of_its_own(graph: Blueprint) -> None:
    graph.source((n for n in range(3)), on="process").sink(print)
    assert only(graph).message.startswith("source's iterable can't be sent to a process: it is a generator (")
    assert only(graph).message.endswith("pass the function that makes it, and its arguments")


def test_threads_may_use_what_cannot_be_pickled(graph: Blueprint) -> None:
    graph.source(n for n in range(3)).map(local(LOCK)).sink(print)
    assert check(graph) == ()


def test_lambdas_closures_and_functions_of_main_can_be_sent(graph: Blueprint) -> None:
    stream = graph.source(range(3), on="process").map(lambda item: item, on="process")
    stream = stream.map(local([1, 2]), on="process").map(made_in_main("def f(item): return threading"), on="process")
    stream.sink(print)
    assert check(graph) == ()


def test_an_object_that_contains_itself_does_not_trap_the_search(graph: Blueprint) -> None:
    loop: list[Any] = []
    loop.extend([loop, LOCK])
    graph.source(range(3)).sink(local(loop), on="process")
    assert "captured variable 'value', element 1 is a _thread.lock" in only(graph).message


# capacity, memory


@pytest.mark.parametrize("capacity", [0, -1, 1.5, True, None])
def test_a_capacity_that_is_no_positive_int_is_reported(graph: Blueprint, capacity: Any) -> None:
    by_hand(graph, "a", graph.source(range(3)), capacity=capacity)
    handle(graph, "a").sink(print, on="process")
    problem = only(graph)
    assert (problem.rule, problem.message) == (
        "capacity",
        f"capacity of 'a' must be an int of at least 1, not {capacity}",
    )


def test_channels_that_do_not_fit_in_memory_are_reported_with_both_numbers(
    graph: Blueprint, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = dataclasses.make_dataclass("Free", ["available"])(200_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    graph.source(range(3)).map(to_text, capacity=10).map(to_int, on="process", capacity=2000).sink(print)
    problem = only(graph)
    needed = 2 * 128 * 1024 + 64 * (10 + 2000)
    assert (problem.rule, problem.stage) == ("memory", "to_int")
    assert problem.message == (
        f"the 2 channels between processes need at least {needed:,} bytes, but 200,000 are free; "
        "the largest is 'to_int' with capacity=2,000: lower it"
    )


def test_channels_of_threads_reserve_no_memory(graph: Blueprint) -> None:
    graph.source(range(3), capacity=10**15).sink(print)
    assert check(graph) == ()


def test_an_absurd_capacity_between_processes_does_not_fit(graph: Blueprint) -> None:
    graph.source(range(3), on="process", capacity=10**15).sink(print)
    assert rules(graph) == ["memory"]
