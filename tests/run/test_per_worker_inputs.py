"""Test inputs that let the writer choose the worker for each item."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from runs import Gate, everywhere, stage_of
from support.waiting import wait_until

from flowchan import Closed, Graph, GraphError, In, Out, RunError, hosts, worker
from flowchan.check.rules import check
from flowchan.viz import to_mermaid

WORKERS = 3


def work(orders: In[int], out: Out[tuple[int, int]]) -> None:
    for order in orders:
        out.put((worker().number, order))


async def work_async(orders: In[int], out: Out[tuple[int, int]]) -> None:
    async for order in orders:
        await out.aput((worker().number, order))


def pairs(items: int = 30) -> list[tuple[int, int]]:
    return [(1 + item % WORKERS, item) for item in range(items)]


def addressed(graph: Graph, orders: Any, on: Any, function: Any = work, **options: Any) -> Any:
    return graph.stage(
        function, orders, on=on, workers=WORKERS, per_worker="orders", name="work", **options
    ).collect()


@everywhere
@pytest.mark.parametrize("source", ["thread", "process"])
def test_each_worker_gets_the_items_addressed_to_it_in_order(on: Any, source: Any) -> None:
    graph = Graph("addressed")
    out = addressed(graph, graph.source(pairs(), on=source), on)
    found = graph.run()[out]
    assert sorted(found) == sorted(pairs())
    for number in range(1, WORKERS + 1):
        of_one = [item for to, item in found if to == number]
        assert of_one == sorted(of_one)


def test_async_workers_get_the_items_addressed_to_them() -> None:
    graph = Graph("addressed")
    out = addressed(graph, graph.source(pairs()), "thread", work_async)
    assert sorted(graph.run()[out]) == sorted(pairs())


def test_workers_on_hosts_get_the_items_addressed_to_them() -> None:
    graph = Graph("addressed")
    pool = hosts.local(2)
    orders = graph.source(pairs(), on=pool).map(lambda pair: pair, on=pool, workers=2)
    out = addressed(graph, orders, pool)
    assert sorted(graph.run()[out]) == sorted(pairs())


@everywhere
def test_items_from_several_senders_arrive_once(on: Any) -> None:
    graph = Graph("addressed")
    orders = graph.source(pairs(300)).map(lambda pair: pair, on=on, workers=4)
    out = addressed(graph, orders, on)
    found = graph.run()[out]
    assert sorted(found) == sorted(pairs(300))
    for number in range(1, WORKERS + 1):  # the writers keep the order of their input
        of_one = [item for to, item in found if to == number]
        assert of_one == sorted(of_one)


@everywhere
def test_program_addresses_workers_through_an_input(on: Any) -> None:
    graph = Graph("addressed")
    orders = graph.input("orders")
    out = addressed(graph, orders, on)
    with graph.start() as run:
        answers = run.iter(out)
        for number in (2, 1, 3, 3):
            run[orders].put((number, 7))
            assert next(answers) == (number, 7)
        run[orders].put_many([(1, 8), (2, 9)])
        run[orders].close()
        assert sorted(answers) == [(1, 8), (2, 9)]
    assert run[orders].closed


def deal(items: In[int], orders: Out[tuple[int, int]], rest: Out[int]) -> None:
    for item in items:
        if item % 10 == 0:
            rest.put(item)
        else:
            orders.put((1 + item % WORKERS, item))


async def deal_async(items: In[int], orders: Out[tuple[int, int]], rest: Out[int]) -> None:
    async for item in items:
        if item % 10 == 0:
            await rest.aput(item)
        else:
            await orders.aput((1 + item % WORKERS, item))


@pytest.mark.parametrize(("function", "on"), [(deal, "thread"), (deal, "process"), (deal_async, "thread")])
def test_general_stage_addresses_workers_through_one_output(function: Any, on: Any) -> None:
    graph = Graph("addressed")
    orders, rest = graph.stage(function, graph.source(range(60)), on=on)
    out, others = addressed(graph, orders, on), rest.collect()
    results = graph.run()
    assert sorted(results[out]) == sorted((1 + item % 3, item) for item in range(60) if item % 10)
    assert results[others] == list(range(0, 60, 10))


@everywhere
def test_full_channel_of_one_worker_does_not_block_the_others(on: Any) -> None:
    gate = Gate()

    def held(orders: In[int], out: Out[int]) -> None:
        for order in orders:
            if worker().number == 1:
                gate.wait()
            out.put(order)

    graph = Graph("addressed")
    orders = graph.input("orders", capacity=2)
    out = addressed(graph, orders, on, held)
    with graph.start() as run:
        answers = run.iter(out)
        run[orders].put_many([(1, 0), (1, 1)])
        gate.wait_held()
        for item in range(20):
            run[orders].put((2, item))
            assert next(answers) == item
        gate.open()
        run[orders].close()
        assert list(answers) == [0, 1]


@everywhere
def test_feedback_is_addressed_to_the_worker_that_asked(on: Any) -> None:
    """Each worker sends requests to one server stage.

    The server sends each answer to the worker that asked.
    """

    def ask(answers: In[int], requests: Out[tuple[int, int]], out: Out[tuple[int, int]]) -> None:
        for number in range(5):
            requests.put((worker().number, number))
            out.put((worker().number, answers.get()))

    def serve(requests: In[tuple[int, int]], answers: Out[tuple[int, int]]) -> None:
        for number, request in requests:
            answers.put((number, 100 * number + request))

    graph = Graph("addressed")
    answers = graph.feedback("answers")
    requests, out = graph.stage(ask, answers, on=on, workers=WORKERS, per_worker="answers", name="ask")
    answers.feed(graph.stage(serve, requests, name="serve"))
    result = out.collect()
    expected = [(number, 100 * number + i) for number in (1, 2, 3) for i in range(5)]
    assert sorted(graph.run()[result]) == expected


def first_only(orders: In[int], out: Out[int]) -> None:
    if worker().number == 1:
        return
    for order in orders:
        out.put(order)


@everywhere
def test_items_for_an_ended_worker_count_as_unwanted(on: Any) -> None:
    graph = Graph("addressed")
    numbers = graph.input("numbers")
    orders = numbers.map(lambda pair: pair, on=on, name="send")
    out = addressed(graph, orders, on, first_only)
    with graph.start() as run:
        wait_until(lambda: stage_of(run, "work").alive == 2)
        run[numbers].put_many(pairs())
        run[numbers].close()
        found = run.wait()[out]
    assert sorted(found) == sorted(item for to, item in pairs() if to > 1)
    assert stage_of(run, "send").unwanted == 10


def test_program_that_puts_for_an_ended_worker_gets_closed() -> None:
    graph = Graph("addressed")
    orders = graph.input("orders")
    addressed(graph, orders, "thread", first_only)
    with graph.start() as run:
        wait_until(lambda: stage_of(run, "work").alive == 2)
        with pytest.raises(Closed):
            run[orders].put((1, 0))
        run[orders].put((2, 0))
        assert not run[orders].closed


@everywhere
def test_sender_ends_early_when_all_workers_have_ended(on: Any) -> None:
    def endless() -> Iterator[tuple[int, int]]:
        item = 0
        while True:
            yield 1 + item % WORKERS, item
            item += 1

    graph = Graph("addressed")
    stream = graph.stage(work, graph.source(endless, on=on), on=on, workers=WORKERS, per_worker="orders")
    out = stream.take(20).collect()
    assert len(graph.run()[out]) == 20


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (7, "item must be a pair (worker, item), got 7"),
        ((1, 2, 3), "item must be a pair (worker, item), got (1, 2, 3)"),
        (("a", 1), "item must be a pair (worker, item), got ('a', 1)"),
        ((0, 1), "worker must be between 1 and 3, got 0"),
        ((4, 1), "worker must be between 1 and 3, got 4"),
    ],
)
def test_item_without_a_worker_number_fails(item: Any, text: str) -> None:
    graph = Graph("addressed")
    addressed(graph, graph.source([None]).map(lambda _: item), "thread")
    with pytest.raises(RunError) as raised:
        graph.run()
    assert text in str(raised.value.exceptions[0])


def test_per_worker_must_name_a_parameter_that_reads_a_stream() -> None:
    graph = Graph("addressed")
    with pytest.raises(ValueError, match=r"In parameters that read a stream \('orders'\), got 'out'"):
        graph.stage(work, graph.source(pairs()), per_worker="out")
    with pytest.raises(TypeError, match="per_worker must be a name or a tuple of names, got 3"):
        graph.stage(work, graph.source(pairs()), per_worker=3)


def test_check_compares_the_item_type_of_addressed_pairs() -> None:
    def named() -> Iterator[tuple[int, str]]:
        yield 1, "one"

    def bare() -> Iterator[str]:
        yield "one"

    for source, given in ((named, "str"), (bare, "str")):
        graph = Graph("addressed")
        addressed(graph, graph.source(source), "thread")
        (problem,) = check(graph)
        assert problem.rule == "type"
        assert f"has items of type {given};" in problem.message
    graph = Graph("addressed")
    addressed(graph, graph.source(pairs()), "thread")
    assert check(graph) == ()


def test_check_rejects_an_errors_stream_as_per_worker_input() -> None:
    graph = Graph("addressed")
    halves = graph.source(range(3)).map(lambda item: 1 // item)
    halves.collect()
    addressed(graph, halves.errors, "thread")
    with pytest.raises(GraphError, match="items do not name a worker"):
        graph.run()


def test_picture_has_one_arrow_to_the_named_worker() -> None:
    graph = Graph("addressed")
    addressed(graph, graph.source(pairs(), name="send"), "thread")
    assert to_mermaid(graph).count("to the named worker") == 1
    assert [edge.name for edge in graph.edges if edge.reader == "work"] == [
        "send to 1",
        "send to 2",
        "send to 3",
    ]


def test_items_can_be_addressed_to_workers_with_separate_outputs() -> None:
    graph = Graph("addressed")
    stream = graph.stage(work_one, graph.source(pairs()), workers=WORKERS, per_worker="orders")
    out = stream.allreduce("sum").collect()
    assert [reduced.value for reduced in graph.run()[out]] == [3 + 9 * k for k in range(10)]


def work_one(orders: In[int], out: Out[int]) -> None:
    for order in orders:
        out.put(order)


def test_aput_from_the_program_reaches_the_named_worker() -> None:
    async def main() -> list[tuple[int, int]]:
        graph = Graph("addressed")
        orders = graph.input("orders")
        out = addressed(graph, orders, "thread")
        with graph.start() as run:
            for pair in pairs():
                await run[orders].aput(pair)
            run[orders].close()
            return (await run)[out]

    assert sorted(asyncio.run(main())) == sorted(pairs())
