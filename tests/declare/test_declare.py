"""Test the declaration of a graph: the recorded stages, and the arguments that operators reject."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import subprocess
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

# for annotations that are strings
from typing import TYPE_CHECKING, Annotated, Any, TypeVar  # noqa: F401

import pytest

from flowchan import In, Out
from flowchan.declare.blueprint import Blueprint
from flowchan.declare.callables import class_with_state
from flowchan.declare.stream import Stream
from flowchan.errors import Where

if TYPE_CHECKING:
    from nowhere import Unknown  # type: ignore[import-not-found]

T = TypeVar("T")


def to_text(item: int) -> str:
    return str(item)


def words(line: str) -> Iterator[str]:
    yield from line.split()


def numbers(upto: int, *, step: int = 1) -> Generator[int, None, None]:
    yield from range(0, upto, step)


def split(items: In[int], even: Out[int], odd: Out[str], limit: int = 3) -> None: ...


class Model:
    def __call__(self, item: int) -> float:
        return item / 2


@pytest.fixture
def graph() -> Blueprint:
    return Blueprint("test")


@pytest.fixture
def stream(graph: Blueprint) -> Stream:
    return graph.source(range(3), name="start")


def line() -> int:
    """Return the line number of the caller."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


# Stages and where they were declared


def test_stages_keep_the_order_of_declaration(graph: Blueprint) -> None:
    graph.source(range(3)).map(to_text).filter(str.isdigit).sink(print)
    assert [(stage.kind, stage.name) for stage in graph.stages] == [
        ("source", "source"),
        ("map", "to_text"),
        ("filter", "isdigit"),
        ("sink", "print"),
    ]


def test_every_operator_records_the_users_line(graph: Blueprint, stream: Stream) -> None:
    here = line()
    stream.map(to_text)
    graph.input()
    graph.stage(split, stream)
    graph.merge(stream)
    assert [stage.where for stage in graph.stages[1:]] == [Where(__file__, here + n) for n in (1, 2, 3, 4)]


def test_graph_records_where_it_was_created() -> None:
    assert Blueprint("here").where == Where(__file__, line())


def test_declaring_a_graph_does_not_run_functions(graph: Blueprint) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("called")

    class Never:
        def __init__(self) -> None:
            never()

        def __call__(self, item: Any) -> Any: ...

    graph.source(never).map(never).map(Never).reduce(never).sink(never)
    assert len(graph.stages) == 5


def test_stages_are_frozen(graph: Blueprint, stream: Stream) -> None:
    with pytest.raises(AttributeError):
        graph.stages[0].workers = 2  # type: ignore[misc]
    with pytest.raises(AttributeError):
        stream.stage = "other"  # type: ignore[misc]


def test_stage_named_returns_stage_or_raises_key_error(graph: Blueprint, stream: Stream) -> None:
    assert graph.stage_named("start") is graph.stages[0]
    with pytest.raises(KeyError, match="graph 'test' has no stage named 'nothing'"):
        graph.stage_named("nothing")


# Names


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (to_text, "to_text"),
        (lambda item: item, "map"),
        (Path("x").rglob, "rglob"),
        (functools.partial(functools.partial(to_text), 1), "to_text"),
        (Model, "Model"),
        (Model(), "Model"),
        (Counter.__add__, "add"),
        (int, "int"),
    ],
)
def test_a_stage_is_named_after_its_function(stream: Stream, function: Any, name: str) -> None:
    assert stream.map(function).name == name


def test_equal_automatic_names_are_numbered(graph: Blueprint) -> None:
    assert [graph.source(range(3)).map(to_text).name for _ in range(3)] == [
        "to_text",
        "to_text-2",
        "to_text-3",
    ]


def test_automatic_name_changes_if_another_stage_is_given_that_name(stream: Stream) -> None:
    stream.map(to_text, name="to_text-2")
    assert [stream.map(to_text).name for _ in range(2)] == ["to_text", "to_text-3"]


def test_declaring_duplicate_names_does_not_raise(graph: Blueprint, stream: Stream) -> None:
    first, second = stream.map(to_text, name="same"), stream.batch(3, name="same")
    second.buffer(5)
    assert [stage.name for stage in graph.stages] == ["start", "same", "same"]
    assert graph.stage_named("same").kind == "map"
    assert first.item is str
    assert second.item == list[int]


# Streams


def test_streams_of_one_port_are_equal_and_have_equal_hashes(graph: Blueprint, stream: Stream) -> None:
    again = Stream(graph, "start", "out", "start")
    assert again == stream
    assert {stream: 1}[again] == 1
    assert Stream(Blueprint("other"), "start", "out", "start") != stream


def test_repr_of_a_stream_shows_name_item_type_and_graph(stream: Stream) -> None:
    assert repr(stream) == "<Stream 'start' of int in graph 'test'>"


def test_buffer_changes_the_channel_without_adding_a_stage(graph: Blueprint, stream: Stream) -> None:
    mapped = stream.map(to_text, capacity=5)
    assert mapped.buffer(1000) is mapped
    assert [output.capacity for output in graph.stage_named("to_text").outputs] == [1000]
    assert [stage.name for stage in graph.stages] == ["start", "to_text"]
    mapped.sink(print)
    assert [edge.capacity for edge in graph.edges] == [64, 1000]


def test_buffer_changes_only_its_own_channel(graph: Blueprint, stream: Stream) -> None:
    left, _ = stream.tee(2)
    left.buffer(7)
    mapped = left.map(to_text)
    mapped.errors.buffer(9)
    assert [output.capacity for output in graph.stage_named("tee").outputs] == [7, 64]
    errors = graph.stage_named("to_text").errors
    assert errors is not None
    assert errors.capacity == 9
    assert graph.stage_named("to_text").outputs[0].capacity == 64


def test_each_output_of_a_stage_has_its_own_channel(graph: Blueprint, stream: Stream) -> None:
    assert [out.name for out in stream.tee(2)] == ["tee.0", "tee.1"]
    assert [out.name for out in stream.partition(hash, 3, name="by")] == ["by.0", "by.1", "by.2"]
    assert [out.name for out in graph.stage(split, stream)] == ["split.even", "split.odd"]


def test_collect_returns_stream_and_sink_returns_none(stream: Stream) -> None:
    assert isinstance(stream.collect(), Stream)
    assert stream.sink(print) is None  # type: ignore[func-returns-value]


def test_operators_with_a_function_have_an_errors_stream(stream: Stream) -> None:
    for out in (stream.map(int), stream.flat_map(words), stream.filter(bool), stream.reduce(max)):
        assert out.errors.name == f"{out.stage}.errors"
    parts = stream.partition(hash, 2)
    assert parts[0].errors == parts[1].errors


def test_other_operators_have_no_errors_stream(stream: Stream) -> None:
    with pytest.raises(
        AttributeError, match="has no errors stream; map, flat_map, filter, partition and reduce"
    ):
        _ = stream.batch(3).errors
    with pytest.raises(AttributeError, match="has no errors stream"):
        _ = stream.map(int).errors.errors


# Options


def test_options_are_stored_in_the_stage(graph: Blueprint, stream: Stream) -> None:
    stream.map(to_text, name="m", on="process", workers=3, capacity=9, retries=2, ordered=False)
    stage = graph.stage_named("m")
    assert (stage.placement.name, stage.workers, stage.retries, stage.ordered) == ("process", 3, 2, False)
    assert stage.outputs[0].capacity == 9


def test_stage_options_contain_the_options_of_the_operator(graph: Blueprint, stream: Stream) -> None:
    stream.batch(4, timeout=0.5)
    stream.take(2)
    stream.tee(3)
    stream.partition(hash, 2)
    stream.reduce(max)
    stream.reduce(max, None)
    options = [dict(stage.options) for stage in graph.stages[1:]]
    assert options == [{"size": 4, "timeout": 0.5}, {"n": 2}, {"n": 3}, {"n": 2}, {}, {"initial": None}]


def test_source_accepts_iterable_or_callable_with_arguments(graph: Blueprint) -> None:
    items = [1, 2]
    graph.source(items)
    graph.source(numbers, 5, step=2)
    plain, called = graph.stages
    assert plain.function is None
    assert plain.options["iterable"] is items
    assert (called.function, called.args, dict(called.kwargs)) == (numbers, (5,), {"step": 2})


def test_general_stages_have_the_ports_in_their_signature(graph: Blueprint, stream: Stream) -> None:
    graph.stage(split, stream, limit=5)
    stage = graph.stage_named("split")
    assert stage.input_ports == ("items",)
    assert [output.port for output in stage.outputs] == ["even", "odd"]
    assert dict(stage.kwargs) == {"limit": 5}


def test_general_stage_returns_one_stream_per_output(graph: Blueprint, stream: Stream) -> None:
    def ends(items: In[int]) -> None: ...

    def passes(items: In, out: Out) -> None: ...  # type: ignore[type-arg]

    class Both:
        def __call__(self, items: In[int], low: Out[int], high: Out[Unknown]) -> None: ...

    assert graph.stage(ends, stream) is None
    assert graph.stage(passes, stream).port == "out"
    assert [out.item for out in graph.stage(Both, stream)] == [int, None]
    assert [out.item for out in graph.stage(functools.partial(split, limit=1), stream)] == [int, str]


def test_port_annotations_that_are_not_imported_are_recognized(graph: Blueprint, stream: Stream) -> None:
    namespace: dict[str, Any] = {}
    exec("def late(items: 'In[int]', out: 'Out[str]'): ...", namespace)
    assert graph.stage(namespace["late"], stream).item is str


# Item types


def test_item_types_follow_from_the_operators(graph: Blueprint, stream: Stream) -> None:
    text = stream.map(to_text)
    assert stream.item is int
    assert text.item is str
    assert text.filter(bool).take(3).item is str
    assert [out.item for out in (*text.tee(2), *text.partition(len, 2))] == [str] * 4
    assert text.batch(3).item == list[str]
    assert text.batch(3).unbatch().item is str
    assert text.collect().item == list[str]
    assert text.zip(stream, graph.input()).item == tuple[str, int, Any]
    assert graph.merge(text, text).item is str
    assert graph.merge(text, stream).item is None
    assert graph.source(numbers, 3).item is int
    assert text.map(Model).item is float
    assert text.map(Path).item is Path
    assert text.reduce(lambda a, b: a + b).item is None


@pytest.mark.parametrize(
    ("annotation", "item"),
    [
        ("Iterator[str]", str),
        ("list[int]", int),
        ("dict[str, int]", str),
        ("tuple[int, ...]", int),
        ("tuple[int, str]", None),
        ("str", str),
        ("bytes", int),
        ("list", None),
        ("list[Unknown]", None),
        ("Unknown", None),
        ("Unknown[int", None),
        ("1 / 0", None),
        ("T", None),
        ("list[T]", None),
        ("None", None),
        ("Annotated[list[int], 'words']", int),
        ("Any", None),
        ("object()", None),
    ],
)
def test_the_item_type_is_the_element_type_or_unknown(stream: Stream, annotation: str, item: Any) -> None:
    def function(item: Any) -> Any: ...

    function.__annotations__["return"] = annotation
    assert stream.flat_map(function).item is item


def test_unresolvable_annotation_leaves_item_type_unknown(stream: Stream) -> None:
    class RaisesOnRepr:
        def __eq__(self, other: object) -> bool:
            raise RuntimeError("compared")

        __hash__ = None  # type: ignore[assignment]

    def function(item: Any) -> Any: ...

    function.__annotations__["return"] = RaisesOnRepr()
    assert stream.map(function).item is None


# Edges


def test_edges_name_both_ends_and_transport(graph: Blueprint, stream: Stream) -> None:
    mapped = stream.map(to_text, on="process")
    left, right = mapped.batch(2).tee(2)
    left.sink(print)
    result = right.collect()
    assert [
        (edge.name, edge.writer, edge.reader, edge.reader_port, edge.transport.name) for edge in graph.edges
    ] == [
        ("start", "start", "to_text", "items", "processes"),
        ("to_text", "to_text", "batch", "items", "processes"),
        ("batch", "batch", "tee", "items", "threads"),
        ("tee.0", "tee", "print", "items", "threads"),
        ("tee.1", "tee", "collect", "items", "threads"),
        (result.name, "collect", None, None, "threads"),
    ]


def test_error_stream_has_an_edge_only_if_read(graph: Blueprint, stream: Stream) -> None:
    mapped = stream.map(to_text)
    mapped.sink(print)
    assert not any(edge.errors for edge in graph.edges)
    mapped.errors.sink(print)
    assert [(edge.name, edge.reader) for edge in graph.edges if edge.errors] == [
        ("to_text.errors", "print-2")
    ]


def test_each_reader_of_a_stream_has_an_edge(graph: Blueprint, stream: Stream) -> None:
    stream.sink(print)
    stream.sink(print)
    assert [edge.reader for edge in graph.edges] == ["print", "print-2"]


# The whole graph


def test_a_thousand_stages_are_declared(graph: Blueprint) -> None:
    stream = graph.source(range(3))
    for _ in range(1000):
        stream = stream.map(to_text)
    stream.sink(print)
    assert len(graph.stages) == len({stage.name for stage in graph.stages}) == 1002
    assert len(graph.edges) == 1001


def test_declaring_does_not_import_heavy_packages() -> None:
    code = (
        "import sys; from flowchan.declare.blueprint import Blueprint; import flowchan.check.rules\n"
        "Blueprint().source(range(3)).sink(print)\n"
        "print([m for m in ('torch', 'numpy', 'networkx', 'graphviz', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class Adder:
    total = 0

    def __call__(self, number: int) -> int:
        self.total += number
        return self.total

    def add(self, number: int) -> int:
        return self(number)

    @classmethod
    def of(cls, number: int) -> int:
        return number


@dataclasses.dataclass(frozen=True)
class Scale:
    factor: int

    def __call__(self, number: int) -> int:
        return self.factor * number


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (Adder, "Adder"), (Adder(), "Adder"), (Adder().add, "Adder"), (functools.partial(Adder), "Adder"),
        (functools.partial(Adder(), 1), "Adder"), (Scale(2), ""), (Scale, ""), (Adder.of, ""), (abs, ""),
        (int, ""), ([].append, ""), (lambda _: _, ""), (functools.lru_cache(abs), ""),
        (operator.itemgetter(0), ""), (functools.partial(pow, 2), ""), (None, ""),
    ],
)  # fmt: skip
def test_class_with_state_returns_the_class_name_of_mutable_callables(function: Any, name: str) -> None:
    assert class_with_state(function) == name
