"""Test that operators reject a misspelt option at once, and suggest the closest option."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import flowchan.hosts as hosts
import flowchan.pipelines as pipelines
from flowchan import Channel, Empty, Graph, In, Out, Stream, select
from flowchan.collective import group, members
from flowchan.declare.options import KeyedSettings
from flowchan.declare.stream_end import StreamEnd
from flowchan.declare.window_options import JOIN_ARGUMENTS, WINDOW_ARGUMENTS


def count(n: int) -> Iterator[int]:
    yield from range(n)


def pass_on(items: In[Any], out: Out[Any], *, workers_name: str = "") -> None: ...


MISSPELT: list[tuple[str, str, Callable[[Graph, Stream], Any]]] = [
    ("map", "workers", lambda graph, stream: stream.map(abs, worker=2)),
    ("flat_map", "workers", lambda graph, stream: stream.flat_map(str, worker=2)),
    ("filter", "ordered", lambda graph, stream: stream.filter(bool, order=False)),
    ("sink", "workers", lambda graph, stream: stream.sink(print, worker=2)),
    ("partition", "capacity", lambda graph, stream: stream.partition(abs, 2, capcity=2)),
    ("source", "restartable", lambda graph, stream: graph.source([1], restartible=True)),
    ("source", "capacity", lambda graph, stream: graph.source(count, 3, capcity=2)),
    ("stage", "workers", lambda graph, stream: graph.stage(pass_on, stream, worker=2)),
    ("stage", "elastic", lambda graph, stream: graph.stage(pass_on, stream, elastik=True)),
    ("reduce", "name", lambda graph, stream: stream.reduce(max, nam="largest")),
    ("reduce", "initial", lambda graph, stream: stream.reduce(max, inital=0)),
    ("collect", "name", lambda graph, stream: stream.collect(naem="all")),
    ("batch", "timeout", lambda graph, stream: stream.batch(2, timeuot=1)),
    ("unbatch", "capacity", lambda graph, stream: stream.unbatch(capcity=1)),
    ("take", "capacity", lambda graph, stream: stream.take(2, capacities=1)),
    ("tee", "name", lambda graph, stream: stream.tee(2, names="branch")),
    ("zip", "capacity", lambda graph, stream: stream.zip(stream, capcity=1)),
    ("merge", "capacity", lambda graph, stream: graph.merge(stream, capcity=1)),
    ("input", "capacity", lambda graph, stream: graph.input("questions", capcity=1)),
]


@pytest.mark.parametrize(("operator", "meant", "call"), MISSPELT)
def test_misspelt_option_names_operator_and_closest_option(operator: str, meant: str, call: Any) -> None:
    graph = Graph("g")
    with pytest.raises(TypeError, match=rf"^{operator}: unknown option '\w+'; did you mean '{meant}'\?$"):
        call(graph, graph.source([1]))


CALLS: list[tuple[str, str, Callable[..., Any], tuple[Any, ...]]] = [
    ("Graph", "name", Graph, ()),
    ("feedback", "name", Graph().feedback, ()),
    ("buffer", "capacity", Graph().source([1]).buffer, ()),
    ("run", "progress", Graph().run, ()),
    ("run", "progress", Graph().pool().run, ()),
    ("start", "memory", Graph().start, ()),
    ("Channel", "capacity", Channel, ()),
    ("put", "timeout", Channel(1).put, (1,)),
    ("get", "timeout", Channel(1, across="processes").get, ()),
    ("get_many", "timeout", Channel(1).reader().get_many, (1,)),
    ("local", "peer_timeout", hosts.local, (1,)),
    ("ssh", "python", hosts.ssh, ("nowhere",)),
    ("slurm", "address", hosts.slurm, ()),
    ("ray", "resources", hosts.ray, (1,)),
    ("serve", "secret", hosts.serve, ()),
    ("open_channel", "timeout", hosts.open_channel, ("127.0.0.1:1/1", b"")),
    ("group", "secret", group, ()),
    ("members", "name", members, (1,)),
    ("map", "on", pipelines.map, (1, abs)),
    ("TaskPool", "initializer", pipelines.TaskPool, ()),
    ("Server", "secret", pipelines.Server, ()),
    ("Client", "timeout", pipelines.Client, ("127.0.0.1:1", b"")),
    ("Lock", "across", pipelines.Lock, ()),
    ("Semaphore", "value", pipelines.Semaphore, ()),
    ("Event", "across", pipelines.Event, ()),
    ("Condition", "across", pipelines.Condition, ()),
    ("Barrier", "across", pipelines.Barrier, (1,)),
    ("SharedDict", "across", pipelines.SharedDict, ()),
    ("workqueue", "capacity", pipelines.workqueue, ()),
]


@pytest.mark.parametrize(("name", "meant", "call", "given"), CALLS)
def test_error_for_a_misspelt_option_names_the_closest_option(
    name: str, meant: str, call: Callable[..., Any], given: tuple[Any]
) -> None:
    misspelt = f"{meant[0]}{meant}"
    with pytest.raises(TypeError, match=f"^{name}: unknown option '{misspelt}'; did you mean '{meant}'\\?$"):
        call(*given, **{misspelt: 1})


def test_error_for_a_misspelt_group_option_names_the_closest_option() -> None:
    (alone,) = members(1)
    with (
        alone,
        pytest.raises(TypeError, match=r"^allreduce: unknown option 'tiemout'; did you mean 'timeout'"),
    ):
        alone.allreduce(1, tiemout=1)


def test_help_shows_the_options_that_a_call_has() -> None:
    assert list(inspect.signature(Graph.run).parameters) == [
        "self", "seed", "memory", "progress", "resume", "page", "metrics", "trace"
    ]  # fmt: skip
    assert list(inspect.signature(Channel).parameters) == ["capacity", "across", "max_bytes"]


def test_unknown_option_of_a_native_call_lists_known_options() -> None:
    with pytest.raises(TypeError, match=r"^put: unknown option 'colour'; the options are item, timeout$"):
        Channel(1).put(1, colour=1)  # type: ignore[call-arg]


def test_unknown_option_lists_known_options() -> None:
    with pytest.raises(TypeError, match=r"^map: unknown option 'threads'; the options are .*workers"):
        Graph("g").source([1]).map(abs, threads=2)  # type: ignore[call-arg]


OPERATORS = [
    operator
    for operator in (*vars(StreamEnd).values(), *vars(Stream).values())
    if inspect.isfunction(operator) and operator.__name__[0] != "_"
]
SHARED = {setting.name: setting.default for setting in dataclasses.fields(KeyedSettings)}
SHARED |= {"elastic": False, "per_worker": ()}  # options that only general stages have


@pytest.mark.parametrize(
    "operator", [*OPERATORS, Graph.source, Graph.merge, Graph.stage], ids=lambda v: v.__name__
)
def test_help_lists_every_option_by_name(operator: Callable[..., Any]) -> None:
    shown = inspect.signature(operator).parameters
    assert "options" not in shown
    own = {*WINDOW_ARGUMENTS, *JOIN_ARGUMENTS} if operator in (Stream.window, Stream.join) else ()
    options = {
        name: one.default for name, one in shown.items() if one.kind is one.KEYWORD_ONLY and name not in own
    }
    assert options == {name: SHARED[name] for name in options}
    assert "name" in options or operator is Stream.buffer
    assert (
        operator.__name__ not in ("map", "flat_map", "filter")
        or {"on", "workers", "ordered"} < options.keys()
    )


def test_arguments_of_a_users_function_are_not_checked_as_options() -> None:
    def read(worker: int = 0, **rest: int) -> list[int]:
        return [worker, *rest.values()]

    graph = Graph("g")
    numbers = graph.source(read, worker=2, capcity=3).collect()
    assert graph.run()[numbers] == [2, 3]


SECONDS = [Fraction(1, 1000), Decimal("0.001"), np.float32(0.001), np.float64(0.001), np.int64(0), 0.001, 0]


@pytest.mark.parametrize("across", ["threads", "processes"])
@pytest.mark.parametrize("timeout", SECONDS, ids=repr)
def test_timeout_accepts_any_real_number(timeout: Any, across: Any) -> None:
    channel: Channel[int] = Channel(2, across=across)
    with pytest.raises(Empty):
        channel.get(timeout=timeout)
    with pytest.raises(TimeoutError):
        select([channel], timeout=timeout)


@pytest.mark.parametrize("timeout", [10**400, Fraction(10**400), Decimal("1e400"), float("inf")], ids=type)
def test_very_large_timeout_is_accepted(timeout: Any) -> None:
    channel: Channel[int] = Channel(1)
    channel.put(1)
    assert channel.get(timeout=timeout) == 1
    graph = Graph("g")
    batches = graph.source([1, 2, 3]).batch(2, timeout=timeout).collect()
    assert graph.run()[batches] == [[1, 2], [3]]


@pytest.mark.parametrize("timeout", [Fraction(60), Decimal(60), np.float32(60), np.int64(60)], ids=repr)
def test_batch_timeout_accepts_any_real_number(timeout: Any) -> None:
    graph = Graph("g")
    batches = graph.source([1, 2, 3]).batch(2, timeout=timeout).collect()
    assert graph.run()[batches] == [[1, 2], [3]]


NONE = [
    True,
    np.True_,
    float("nan"),
    Decimal("nan"),
    np.float32("nan"),
    -1,
    Fraction(-1),
    -(10**400),
    "1",
    1j,
    np.ones(1),
    np.complex64(1),
]


@pytest.mark.parametrize("timeout", NONE, ids=repr)
def test_timeout_rejects_values_that_are_not_real_numbers(timeout: Any) -> None:
    with pytest.raises(ValueError, match="timeout must be None"):
        Channel[int](1).get(timeout=timeout)
    with pytest.raises((TypeError, ValueError), match="batch: timeout must be"):
        Graph("g").source([1]).batch(2, timeout=timeout)
