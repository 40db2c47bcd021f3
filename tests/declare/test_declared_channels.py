"""Test which channels and worker counts follow from a declaration, and the smallest values of options."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from flowchan import Graph, In, Out, auto
from flowchan.declare.blueprint import Blueprint
from flowchan.declare.stream import Stream
from flowchan.declare.values import UNLIMITED_RESTARTS, Stage


def collect_pairs(orders: In[Any], out: Out[Any]) -> None: ...


def two_ends(left: In[Any], right: In[Any], out: Out[Any]) -> None: ...


def give(out: Out[Any]) -> None: ...


def pairs() -> Iterator[tuple[int, str]]:
    yield 1, "one"


def channels(graph: Blueprint, writer: str) -> list[tuple[Any, ...]]:
    """Return the name, ports and worker numbers of each channel that a stage writes to."""
    return [
        (edge.name, edge.writing_end, edge.reader_port and edge.reading_end, edge.worker, edge.to_worker)
        for edge in graph.edges
        if edge.writer == writer
    ]


def stage_of(graph: Blueprint, name: str) -> Stage:
    return graph.stage_named(name)


def test_workers_of_a_stage_share_its_channel() -> None:
    graph = Graph("channels")
    graph.source(range(3), name="numbers").map(abs, workers=3, name="work").sink(abs)
    assert channels(graph, "numbers") == [("numbers", "out", "items", 0, 0)]
    assert channels(graph, "work") == [("work", "out", "items", 0, 0)]
    assert not stage_of(graph, "work").output_per_worker
    assert not stage_of(graph, "work").has_ports_per_worker


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_addressed_input_has_a_channel_for_each_worker(workers: int) -> None:
    graph = Graph("channels")
    stream = graph.source(pairs, name="orders")
    graph.stage(collect_pairs, stream, workers=workers, per_worker="orders", name="work").sink(abs)
    assert channels(graph, "orders") == [
        (f"orders to {number}", f"out.{number}", "orders", 0, number) for number in range(1, workers + 1)
    ]


def test_only_named_inputs_are_addressed() -> None:
    graph = Graph("channels")
    left, right = graph.source(pairs, name="left"), graph.source(pairs, name="right")
    graph.stage(two_ends, left, right, workers=2, per_worker=("right",), name="work").sink(abs)
    assert [one[0] for one in channels(graph, "left")] == ["left"]
    assert [one[0] for one in channels(graph, "right")] == ["right to 1", "right to 2"]
    assert stage_of(graph, "work").per_worker == {"right"}


@pytest.mark.parametrize("workers", [2, 3])
def test_stage_before_allreduce_has_a_channel_for_each_worker(workers: int) -> None:
    graph = Graph("channels")
    work = graph.source(range(3)).map(abs, workers=workers, name="work")
    work.allreduce("sum", name="all").collect()
    assert channels(graph, "work") == [
        (f"work {number}", "out", f"items.{number}", number, 0) for number in range(1, workers + 1)
    ]
    stage = stage_of(graph, "work")
    assert (stage.output_per_worker, stage.has_ports_per_worker, stage.keeps_its_own) == (True, True, True)


def test_single_worker_before_allreduce_has_one_channel() -> None:
    graph = Graph("channels")
    graph.source(range(3)).map(abs, name="work").allreduce("sum").collect()
    assert channels(graph, "work") == [("work", "out", "items", 0, 0)]
    stage = stage_of(graph, "work")
    assert (stage.output_per_worker, stage.has_ports_per_worker, stage.keeps_its_own) == (True, False, False)


def test_merge_has_a_worker_for_each_stream() -> None:
    graph = Graph("channels")
    streams = [graph.source(range(3), name=name) for name in ("a", "b", "c")]
    graph.merge(*streams, name="merge").sink(abs)
    stage = stage_of(graph, "merge")
    assert (stage.workers, stage.worker_count, stage.may_have_several_workers) == (1, 3, True)
    assert [(port, str(origin)) for port, origin in stage.read] == [
        (port, f"{name}.out") for port, name in zip(stage.input_ports, "abc", strict=True)
    ]


@pytest.mark.parametrize(
    ("workers", "several"),
    [(1, False), (2, True), ("auto", True), (auto(), True), (auto(most=1), False), (auto(most=2), True)],
)
def test_stage_may_have_several_workers_unless_limited_to_one(workers: Any, several: bool) -> None:
    graph = Graph("workers")
    graph.source(range(3)).map(abs, workers=workers, name="work").sink(abs)
    assert stage_of(graph, "work").may_have_several_workers == several
    assert stage_of(graph, "work").worker_count == (workers if isinstance(workers, int) else 1)


def test_stage_begins_the_graph_without_an_earlier_writer() -> None:
    graph = Graph("begins")
    back = graph.feedback("back")
    first = graph.stage(collect_pairs, back, name="first")
    back.feed(graph.stage(two_ends, first, graph.source([1], name="numbers"), name="second"))
    assert [stage.name for stage in graph.stages if stage.begins] == ["first", "numbers"]


@pytest.mark.parametrize(
    ("workers", "concurrency", "routed"),
    [(1, 1, False), (2, 1, True), (3, 2, True), (2, 2, False), (2, 3, False)],
)
def test_keyed_stage_is_routed_if_a_key_has_fewer_workers(
    workers: int, concurrency: int, routed: bool
) -> None:
    graph = Graph("keyed")
    numbers = graph.source(range(3), name="numbers")
    numbers.map(abs, key=abs, workers=workers, concurrency_per_key=concurrency, name="work").sink(abs)
    names = [stage.name for stage in graph.stages]
    assert names[1:-1] == (["work by key", "work"] if routed else ["work"])
    assert stage_of(graph, "work").per_worker == ({"items"} if routed else set())
    assert all(edge.routed == (edge.writer == "work by key") for edge in graph.edges)
    if routed:
        assert stage_of(graph, "work by key").options == {"spread": concurrency}
        assert [one[0] for one in channels(graph, "work by key")] == [
            f"work by key to {number}" for number in range(1, workers + 1)
        ]


def test_keyed_stages_without_names_are_numbered() -> None:
    graph = Graph("keyed")
    stream: Stream[Any] = graph.source(range(3), name="numbers")
    for _ in range(3):
        stream = stream.map(abs, key=abs, workers=2)
    stream.sink(print)
    names = ["abs by key", "abs", "abs-2 by key", "abs-2", "abs-3 by key", "abs-3"]
    assert [stage.name for stage in graph.stages] == ["numbers", *names, "print"]


def test_per_worker_needs_strings_that_name_inputs() -> None:
    graph = Graph("addressed")
    stream = graph.source(pairs)
    for wrong in (["orders"], ("orders", 3), 3, None):
        with pytest.raises(TypeError, match="per_worker must be a name or a tuple of names, got"):
            graph.stage(collect_pairs, stream, per_worker=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"read a stream \(none\), got 'out'"):
        graph.stage(give, per_worker="out")
    with pytest.raises(ValueError, match=r"read a stream \('left', 'right'\), got 'out'"):
        graph.stage(two_ends, stream, stream, per_worker=("left", "out"))


def test_restartable_stage_without_inputs_has_one_worker() -> None:
    graph = Graph("restartable")
    graph.stage(give, on="process", restartable=True, name="one").sink(print)
    graph.stage(give, on="process", workers=2, name="two").sink(print)
    stream = graph.source(pairs)
    graph.stage(collect_pairs, stream, on="process", workers=2, restartable=True).sink(print)
    with pytest.raises(ValueError, match="workers must be 1 for a restartable stage without inputs, got 2"):
        graph.stage(give, on="process", workers=2, restartable=True)


def test_surplus_streams_of_a_stage_have_numbered_ports() -> None:
    graph = Graph("surplus")
    streams = [graph.source(range(3), name=name) for name in ("a", "b", "c")]
    graph.stage(collect_pairs, *streams, name="work").sink(print)
    assert stage_of(graph, "work").input_ports == ("orders", "surplus1", "surplus2")
    graph.stage(two_ends, streams[0], name="less").sink(print)
    assert stage_of(graph, "less").input_ports == ("left",)


def test_stage_returns_a_stream_for_each_output_or_none() -> None:
    graph = Graph("outputs")

    def end(items: In[Any]) -> None: ...

    def three(items: In[Any], a: Out[Any], b: Out[Any], c: Out[Any]) -> None: ...

    stream = graph.source(range(3))
    assert graph.stage(end, stream) is None
    assert isinstance(graph.stage(collect_pairs, stream), Stream)
    assert [out.port for out in graph.stage(three, stream)] == ["a", "b", "c"]


@pytest.mark.parametrize(
    "options",
    [
        {"workers": 1}, {"capacity": 1}, {"retries": 0}, {"restarts": 0}, {"max_deaths": 1},
        {"gpus": 0}, {"gpus": 1, "on": "process"}, {"gpus": 0.01, "on": "process"},
        {"gpus": 0.99, "on": "process"}, {"timeout": 0.001, "on": "process"}, {"rate": 0.001},
        {"key": abs, "concurrency_per_key": 1},
    ],
    ids=str,
)  # fmt: skip
def test_smallest_value_of_an_option_is_accepted(options: dict[str, Any]) -> None:
    graph = Graph("smallest")
    graph.source(range(3)).map(abs, name="work", **options).sink(abs)
    stage = stage_of(graph, "work")
    for name, value in options.items():
        found = stage.placement.name if name == "on" else getattr(stage, name, value)
        assert found == value


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_deaths": 0}, "max_deaths must be at least 1, got 0"),
        ({"restarts": -1}, "restarts must be at least 0, got -1"),
        ({"gpus": -1, "on": "process"}, "gpus must be at least 0, got -1"),
        ({"gpus": 0.0, "on": "process"}, "a share between 0 and 1, got 0.0"),
        ({"gpus": 1.0, "on": "process"}, "a share between 0 and 1, got 1.0"),
        ({"gpus": -0.5, "on": "process"}, "a share between 0 and 1, got -0.5"),
        ({"gpus": 1}, "gpus=1 requires on='process'"),
        ({"timeout": 1}, "timeout=1 requires on='process'"),
        ({"share_instance": True}, "share_instance=True requires on='thread' and a class"),
    ],
    ids=str,
)
def test_value_beyond_the_smallest_is_refused(options: dict[str, Any], message: str) -> None:
    stream = Graph("smallest").source(range(3))
    with pytest.raises(ValueError, match=message):
        stream.map(abs, **options)


def test_smallest_numbers_of_outputs_and_items_are_accepted() -> None:
    graph = Graph("smallest")
    stream = graph.source(range(3))
    assert len(stream.tee(1)) == 1
    assert len(stream.partition(hash, 1)) == 1
    stream.take(0, name="none")
    assert stage_of(graph, "none").options == {"n": 0}
    stream.batch(1, name="ones")
    assert stage_of(graph, "ones").options == {"size": 1, "timeout": None}


def test_defaults_of_a_stage_are_those_of_the_documentation() -> None:
    graph = Graph("defaults")
    graph.source(range(3)).map(abs, name="work").sink(abs)
    stage = stage_of(graph, "work")
    assert (stage.workers, stage.ordered, stage.retries, stage.restarts, stage.max_deaths) == (
        1,
        True,
        0,
        10,
        3,
    )
    assert (stage.timeout, stage.rate, stage.gpus, stage.share_instance) == (None, None, 0, False)
    assert (stage.retry_delay, stage.retry_on, stage.placement.name) == (None, (Exception,), "thread")
    assert (stage.restartable, stage.service, stage.may_get_requests) == (False, False, False)
    assert [output.capacity for output in stage.all_outputs] == [64, 64]
    assert UNLIMITED_RESTARTS == 10**9


def test_allreduce_does_not_send_results_back_by_default() -> None:
    graph = Graph("reduced")
    graph.source(range(3)).map(abs).allreduce(name="all").collect()
    assert stage_of(graph, "all").options == {"to_workers": False, "op": "sum"}
    with pytest.raises(ValueError, match=r"op must be one of .* got 'total'"):
        graph.source(range(3)).allreduce("total")  # type: ignore[call-overload]
