"""Test the rules of graph checks: each reports its problem clearly, and raises no false alarm."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.graph_samples import by_hand, handle, only, pass_on, rules, to_int, to_text

from flowchan import In, Out
from flowchan.check.rules import check, raise_for
from flowchan.declare.blueprint import Blueprint
from flowchan.errors import GraphError

# The whole check


def test_a_graph_that_can_run_has_no_problem(graph: Blueprint) -> None:
    numbers, rest = graph.source(range(3)).tee(2)
    total = (
        numbers.map(to_text, on="process", workers=2).map(lambda text: len(text), on="process").reduce(max, 0)
    )
    graph.merge(rest, graph.input()).batch(3).unbatch().sink(print)
    total.errors.sink(print)
    assert check(graph) == ()
    raise_for(graph)


def test_all_problems_are_reported_in_order_of_declaration(graph: Blueprint) -> None:
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


# Problems: empty, duplicate, foreign


def test_a_graph_without_stages_is_empty(graph: Blueprint) -> None:
    problem = only(graph)
    assert problem.rule == "empty"
    assert str(problem) == f"{graph.where}: graph 'test' has no stages; begin with graph.source(…)"


def test_a_graph_without_a_source_is_empty(graph: Blueprint) -> None:
    by_hand(graph, "a", handle(graph, "a"))
    assert rules(graph) == ["empty", "cycle"]


def test_duplicate_name_is_reported_with_the_line_of_the_first(graph: Blueprint) -> None:
    graph.source(range(3), name="same").batch(3, name="same").sink(print)
    first = graph.stages[0].where
    problems = [problem for problem in check(graph) if problem.rule == "duplicate"]
    assert [problem.message for problem in problems] == [
        f"the name 'same' is already used by the source at {first}; pass another name="
    ]


def test_duplicate_name_causes_no_other_problem(graph: Blueprint) -> None:
    graph.source(range(3), name="same").map(to_text, name="same").sink(print)
    assert rules(graph) == ["duplicate"]


def test_channels_with_equal_names_are_reported(graph: Blueprint) -> None:
    left, right = graph.source(range(3)).tee(2)
    left.batch(3, name="tee.1").sink(print)
    right.sink(print)
    assert only(graph).message == (
        "its channel 'tee.1' has the same name as a channel of stage 'tee' at "
        f"{graph.stages[1].where}; pass another name= to one of the stages"
    )


def test_stream_from_another_graph_is_reported_with_that_graph(graph: Blueprint) -> None:
    other = Blueprint("other")
    unusual = other.source("abc", name="letters")
    graph.source(range(3)).zip(unusual).sink(print)
    problem = only(graph)
    assert (problem.rule, problem.stage) == ("foreign", "zip")
    assert f"stream 'letters' from another graph, 'other', declared at {other.where}" in problem.message


def test_stream_without_writer_is_reported(graph: Blueprint) -> None:
    graph.merge(graph.source(range(3)), handle(graph, "nothing")).sink(print)
    assert (only(graph).rule, only(graph).message) == (
        "foreign",
        "reads stream 'nothing.out', but no stage of graph 'test' writes it",
    )


# Problem: cycle


def test_cycle_is_reported_with_its_stages_in_order(graph: Blueprint) -> None:
    start = graph.source(range(3), name="start")
    by_hand(graph, "a", start, handle(graph, "c"))
    by_hand(graph, "b", handle(graph, "a"))
    by_hand(graph, "c", handle(graph, "b"))
    problem = only(graph)
    assert (problem.rule, problem.stage) == ("cycle", "a")
    assert "a → b → c → a" in problem.message


def test_each_of_several_cycles_is_reported_once(graph: Blueprint) -> None:
    graph.source(range(3)).sink(print)
    by_hand(graph, "self", handle(graph, "self"))
    by_hand(graph, "a", handle(graph, "b"))
    by_hand(graph, "b", handle(graph, "a"))
    loops = [problem.message for problem in check(graph) if problem.rule == "cycle"]
    assert ["self → self" in loops[0], "a → b → a" in loops[1], len(loops)] == [True, True, 2]


def test_stage_before_a_cycle_is_not_reported_in_the_cycle(graph: Blueprint) -> None:
    by_hand(graph, "late", handle(graph, "z"))
    by_hand(graph, "y", handle(graph, "z"), handle(graph, "x"))
    by_hand(graph, "z", handle(graph, "y"))
    by_hand(graph, "x")
    loops = [problem.message for problem in check(graph) if problem.rule == "cycle"]
    assert len(loops) == 1
    assert "loop: y → z → y;" in loops[0]


def test_branches_that_are_merged_again_are_not_a_cycle(graph: Blueprint) -> None:
    left, right = graph.source(range(3)).tee(2)
    left.map(to_text).zip(right).sink(print)
    assert check(graph) == ()


# Problems: unread, read-twice


def test_an_unread_output_is_reported_with_the_remedy(graph: Blueprint) -> None:
    left, _ = graph.source(range(3)).tee(2)
    left.sink(print)
    assert (only(graph).rule, only(graph).message) == (
        "unread",
        (
            "no stage reads its output 'tee.1'; end it with .sink(function), or with .collect() "
            "to return the items as a result"
        ),
    )


def test_results_and_error_streams_do_not_need_a_reader(graph: Blueprint) -> None:
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
    assert f"2 readers, 'print' ({one}) and 'print-2' ({two})" in problem.message
    assert problem.message.endswith("give each reader its own stream with .tee(2)")


def test_an_error_stream_read_twice_is_reported(graph: Blueprint) -> None:
    mapped = graph.source(range(3)).map(to_text)
    mapped.sink(print)
    mapped.errors.sink(print)
    mapped.errors.sink(print)
    assert rules(graph) == ["read-twice"]


# Problem: ports


def test_general_stage_requires_one_stream_per_in_parameter(graph: Blueprint) -> None:
    graph.stage(pass_on, name="short", limit=1).sink(print)
    start = graph.source(range(3))
    graph.stage(pass_on, start, start, name="long", limit=1).sink(print)
    assert [problem.message for problem in check(graph) if problem.rule == "ports"] == [
        "'pass_on' has 1 In parameter (items), but 0 streams were passed; pass one stream for each In "
        "parameter",
        "'pass_on' has 1 In parameter (items), but 2 streams were passed; pass one stream for each In "
        "parameter",
    ]


def test_parameter_without_stream_or_argument_is_reported(graph: Blueprint) -> None:
    graph.stage(pass_on, graph.source(range(3))).sink(print)
    assert only(graph).message == (
        "parameter 'limit' of 'pass_on' is not a port and has no argument; annotate it "
        "In[...] or Out[...], or pass limit=..."
    )


def test_an_argument_without_a_parameter_is_reported(graph: Blueprint) -> None:
    graph.stage(pass_on, graph.source(range(3)), limit=1, speed=2).sink(print)
    assert only(graph).message == "'pass_on' has no parameter 'speed': (items, out, limit)"


def test_a_port_given_as_an_argument_is_reported(graph: Blueprint) -> None:
    graph.stage(pass_on, graph.source(range(3)), limit=1, out=2).sink(print)
    assert only(graph).message.startswith(
        "parameter 'out' of 'pass_on' is a port, so its argument must be a stream"
    )


def test_a_positional_only_port_is_reported(graph: Blueprint) -> None:
    def ends(items: In[int], /) -> None: ...

    graph.stage(ends, graph.source(range(3)))
    assert (
        only(graph).message
        == "parameter 'items' of 'ends' is positional-only; remove the '/' from the signature"
    )


def test_a_general_stage_without_ports_is_reported(graph: Blueprint) -> None:
    graph.source(range(3)).sink(print)
    graph.stage(lambda: None)
    assert only(graph).message.startswith("'<lambda>' has no parameter annotated In[...] or Out[...]")


def test_general_stage_with_unknown_signature_is_reported(graph: Blueprint) -> None:
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
        "map calls 'two' with one argument, the item, but its parameters are (item, factor): missing a "
        "required argument: 'factor'; bind the other parameters with functools.partial",
        "reduce calls 'to_text' with two arguments, the result so far and the item, but its parameters "
        "are (item): too many positional arguments; bind the other parameters with functools.partial",
    ]


def test_functions_that_can_take_the_item_are_accepted(graph: Blueprint) -> None:
    class Factor:
        def __init__(self, factor: int = 1) -> None: ...

        def __call__(self, item: int, more: int = 0) -> int:
            return item

    def two(factor: int, item: int) -> int:
        return item * factor

    stream = (
        graph.source(range(3))
        .map(functools.partial(two, 3))
        .map(Factor)
        .map(Factor(2))
        .map(Factor(3).__call__)
    )
    stream = (
        stream.map(functools.partial(Factor, 3)).map(abs).map(str).map(str.upper).map("{}".format).map(Path)
    )
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
        "missing a required argument: 'path'; bind its parameters with functools.partial"
    )


def test_arguments_that_a_source_cannot_take_are_reported(graph: Blueprint) -> None:
    def lines(path: str) -> Iterator[str]:
        yield path

    graph.source(lines).sink(print)
    graph.source(lines, "x", 3).sink(print)
    graph.source(lines, path="x").sink(print)
    graph.source(range, 3).sink(print)
    assert [(problem.rule, problem.stage) for problem in check(graph)] == [
        ("ports", "lines"),
        ("ports", "lines-2"),
    ]


# Problems: capacity, memory, limit


@pytest.mark.parametrize("capacity", [0, -1, 1.5, True, None])
def test_capacity_that_is_not_a_positive_int_is_reported(graph: Blueprint, capacity: Any) -> None:
    by_hand(graph, "a", graph.source(range(3)), capacity=capacity)
    handle(graph, "a").sink(print, on="process")
    problem = only(graph)
    assert (problem.rule, problem.message) == (
        "capacity",
        f"capacity of 'a' must be an int of at least 1, got {capacity}",
    )


def test_channels_larger_than_memory_are_reported_with_both_sizes(
    graph: Blueprint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    meminfo_file = tmp_path / "meminfo"
    meminfo_file.write_text("MemTotal:  8 kB\nMemAvailable:  195 kB\n")
    monkeypatch.setattr("flowchan.check.rules.MEMINFO", meminfo_file)
    graph.source(range(3)).map(to_text, capacity=10).map(to_int, on="process", capacity=2000).sink(print)
    problem = only(graph)
    needed = 2 * 64 * 1024 + 64 * (10 + 2000)
    assert (problem.rule, problem.stage) == ("memory", "to_int")
    assert problem.message == (
        f"the 2 channels between processes need at least {needed:,} bytes, but only 199,680 "
        "are free; lower the capacity of the largest, 'to_int' with capacity=2,000"
    )


def test_channels_between_threads_do_not_reserve_memory(graph: Blueprint) -> None:
    graph.source(range(3), capacity=10**15).sink(print)
    assert check(graph) == ()


def test_absurd_capacity_between_processes_is_reported(graph: Blueprint) -> None:
    graph.source(range(3), on="process", capacity=10**15).sink(print)
    assert rules(graph) == ["memory"]


@pytest.mark.parametrize("on", ["process", "thread"])
def test_more_workers_than_a_channel_has_ports_are_reported(graph: Blueprint, on: Any) -> None:
    graph.source(range(3)).map(to_text, workers=4_000, on=on).map(to_int, workers=97, on=on).sink(print)
    if on == "thread":
        assert check(graph) == ()
        return
    problem = only(graph)
    assert (problem.rule, problem.stage) == ("limit", "to_text")
    assert problem.message == (
        "its channel 'to_text' has 4,097 workers as readers and writers, but a channel "
        "between processes has 4,096 ports; use fewer workers=, or merge in several steps"
    )


def test_each_stream_of_a_merge_counts_as_one_writer(graph: Blueprint) -> None:
    streams = [graph.source(range(3), name=f"source{number}") for number in range(4_096)]
    graph.merge(*streams).sink(print, on="process")
    assert rules(graph) == ["limit"]


@pytest.mark.parametrize("number", [128, 129])
def test_stage_with_more_ports_than_select_accepts_is_reported(graph: Blueprint, number: int) -> None:
    space: dict[str, Any] = {"In": In, "Any": Any}
    exec(f"def gather({', '.join(f'port{n}: In[Any]' for n in range(number))}): select()", space)
    graph.stage(space["gather"], *[graph.source(range(3), name=f"source{n}") for n in range(number)])
    assert [(problem.rule, problem.message) for problem in check(graph)] == [
        (
            "limit",
            (
                "its function calls select and has 129 ports, but select accepts at most 128 operations; "
                "merge some of the streams first"
            ),
        )
    ] * (number - 128)
