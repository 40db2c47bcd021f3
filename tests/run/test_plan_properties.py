"""Test what a plan tells the supervisor about stages, channels and workers."""

from __future__ import annotations

from typing import Any

import pytest
from support.gangs import in_step

from flowchan import Graph, In, Out, hosts
from flowchan.run.policy.events import WorkerId
from flowchan.run.policy.lineage import NOTHING_FINISHED, FinishedItems
from flowchan.run.policy.plan import Plan, plan


def planned(graph: Graph, memory: int = 1 << 20, **options: Any) -> Plan:
    return plan(graph, seed=1, memory=memory, **options)


def read_all(items: In[Any], out: Out[Any]) -> None:
    for item in items:
        out.put(item)


def alone() -> None:
    pass


class Counter:
    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, item: int) -> int:
        self.seen += item
        return self.seen


@pytest.mark.parametrize(("channels", "share"), [(0, 900), (1, 900), (2, 450), (3, 300)])
def test_channels_share_the_memory_of_the_run_equally(channels: int, share: int) -> None:
    graph = Graph("shared")
    if channels == 0:
        graph.stage(alone)
    else:
        stream = graph.source(range(3))
        for _ in range(channels - 1):
            stream = stream.map(abs)
        stream.sink(abs)
    assert planned(graph, memory=900).share == share


def test_channel_has_at_least_one_byte() -> None:
    graph = Graph("shared")
    graph.source(range(3)).map(abs).sink(abs)
    assert planned(graph, memory=1).share == 1


def restartable_stages() -> Plan:
    graph = Graph("restarted")
    stream = graph.source(range(3), name="numbers").map(abs, name="thread")
    stream = stream.map(abs, on="process", name="default")
    stream = stream.map(abs, on="process", restarts=3, name="three")
    stream = stream.map(abs, on="process", restarts=10, name="ten")
    stream = stream.map(abs, on="process", restarts=10**9, name="unlimited")
    stream = stream.map(abs, on="process", restarts=10**9 + 1, name="more")
    stream = graph.stage(read_all, stream, on="process", name="ports")
    stream = graph.stage(read_all, stream, on="process", restartable=True, name="restartable")
    stream.sink(abs, name="sink")
    return planned(graph)


def test_only_processes_that_can_be_replaced_have_restarts() -> None:
    assert restartable_stages().limits() == {
        "default": 10, "three": 3, "ten": 10, "unlimited": 10**9, "more": 10**9 + 1, "ports": 0,
        "restartable": 10,
    }  # fmt: skip


def test_explicit_limits_are_those_that_the_user_set() -> None:
    assert restartable_stages().explicit == {"three", "ten"}


def test_stateful_stages_are_processes_that_call_an_object() -> None:
    graph = Graph("stateful")
    stream = graph.source(range(3)).map(Counter, name="thread")
    stream = stream.map(Counter, on="process", name="class").map(Counter(), on="process", name="instance")
    stream.map(abs, on="process", name="function").sink(abs)
    assert planned(graph).stateful == {"class": "Counter", "instance": "Counter"}


def test_elastic_gangs_are_those_of_processes() -> None:
    graph = Graph("gangs")
    stream: Any = graph.source(range(3))
    stream = graph.stage(in_step, stream, name="thread", workers=2, elastic=True)
    stream = graph.stage(in_step, stream, name="rigid", workers=2, on="process", restartable=True)
    options: dict[str, Any] = {"on": "process", "restartable": True, "elastic": True}
    graph.stage(in_step, stream, name="elastic", workers=2, **options).sink(abs)
    assert planned(graph).elastic == {"elastic"}


def test_added_worker_gets_the_channels_of_its_peers() -> None:
    graph = Graph("scaled")
    graph.source(range(3)).map(abs, workers=2, name="work").sink(abs, name="sink")
    made = planned(graph)
    _, first, second, sink = made.workers
    assert [made.worker(one.id) for one in (first, second, sink)] == [first, second, sink]
    added = made.worker(WorkerId("work", 7))
    assert (added.id, added.stage) == (WorkerId("work", 7), first.stage)
    assert (added.inputs, added.outputs) == (first.inputs, first.outputs)
    assert list(added.channels()) == ["source", "work"]


def test_worker_has_the_channel_of_its_failed_items() -> None:
    graph = Graph("failing")
    work = graph.source(range(3)).map(abs, name="work")
    work.sink(abs)
    work.errors.sink(print)
    worker = next(one for one in planned(graph).workers if one.id.stage == "work")
    assert worker.errors == "work.errors"
    assert list(worker.channels()) == ["source", "work", "work.errors"]
    assert worker.outputs == {"out": "work"}


def test_each_merge_worker_reads_one_of_the_streams() -> None:
    graph = Graph("merged")
    streams = [graph.source(range(3), name=name) for name in "abc"]
    graph.merge(*streams, name="merge").sink(abs)
    workers = [one for one in planned(graph).workers if one.id.stage == "merge"]
    assert [one.id.number for one in workers] == [1, 2, 3]
    assert [list(one.inputs.values()) for one in workers] == [["a"], ["b"], ["c"]]


def test_zip_worker_reads_all_streams_in_order() -> None:
    graph = Graph("zipped")
    streams = [graph.source(range(3), name=name) for name in "cab"]
    streams[0].zip(*streams[1:], name="zip").sink(abs)
    (worker,) = (one for one in planned(graph).workers if one.id.stage == "zip")
    assert list(worker.inputs.values()) == ["c", "a", "b"]


def test_result_starts_when_the_program_reads_it() -> None:
    graph = Graph("read")
    numbers, others = graph.source(range(3), name="numbers").tee(2, name="tee")
    numbers.collect(name="result")
    others.collect(name="list").sink(print, name="sink")
    assert {one.id.stage for one in planned(graph).workers if one.gathers} == {"result"}


async def later(item: int) -> int:
    return item


def test_coroutines_of_a_stage_share_an_event_loop_on_threads() -> None:
    graph = Graph("async")
    stream = graph.source(range(3), name="numbers").map(later, name="thread")
    stream.map(later, on="process", name="process").sink(abs, name="sink")
    assert {one.id.stage for one in planned(graph).workers if one.is_task} == {"thread"}


def joined() -> Plan:
    """Return a plan with a zip and, behind it, a stage with ports, results and an error stream."""
    graph = Graph("joined")
    left, right = graph.source(range(3), name="numbers").tee(2, name="tee")
    mapped = left.map(abs, name="left")
    mapped.errors.sink(print, name="failed")
    pairs = mapped.zip(right, name="zip")
    listed, passed = pairs.tee(2, name="both")
    listed.collect(name="result")
    graph.stage(read_all, passed, name="ports").map(abs, name="last").sink(abs, name="sink")
    return planned(graph)


def test_queued_items_that_others_depend_on_are_kept() -> None:
    """Dropping an item before a zip would shift the pairs. Results and failed items belong to the user."""
    assert set(joined().queues()) == {"zip", "both.1", "ports", "last"}


def test_stages_between_others_need_no_items_without_readers() -> None:
    assert sorted((sorted(into), sorted(out)) for into, out in joined().between()) == [
        (["left", "tee.1"], ["zip"]), (["numbers"], ["tee.0", "tee.1"]), (["ports"], ["last"]),
        (["tee.0"], ["left"]), (["zip"], ["both.0", "both.1"]),
    ]  # fmt: skip


def test_run_begins_at_sources_and_is_complete_after_its_ends() -> None:
    made = joined()
    assert made.sources == {"numbers"}
    assert made.ends == {"failed", "result", "sink"}
    assert made.services == set()


def test_resumed_run_skips_finished_items_of_its_sources() -> None:
    graph = Graph("resumed")
    graph.source(range(3), name="numbers").sink(abs, name="sink")
    assert planned(graph).finished_at("numbers") is None
    finished = FinishedItems(bits=b"\1")
    made = planned(graph, finished={"numbers": finished})
    assert made.finished_at("numbers") is finished
    assert made.finished_at("sink") is NOTHING_FINISHED


@pytest.mark.parametrize(
    ("shares", "expected"),
    [(None, [2, 2, 2]), ({"a": 1, "b": 3, "c": 2}, [1, 3, 2]), ({"c": 1, "a": 1}, [3, 0, 3])],
)
def test_hosts_get_workers_by_their_shares(shares: dict[str, int] | None, expected: list[int]) -> None:
    pool = hosts.ssh({"a": 8, "b": 8, "c": 8})
    graph = Graph("dealt")
    graph.source(range(3)).map(abs, on=pool if shares is None else pool[shares], workers=6).sink(abs)
    found = [one.host for one in planned(graph).workers if one.host]
    assert [found.count(host) for host in "abc"] == expected


def test_placement_without_shares_counts_the_workers_of_all_stages() -> None:
    pool = hosts.ssh({"a": 8, "b": 8})
    graph = Graph("dealt")
    stream = graph.source(range(3)).map(abs, on=pool, workers=1, name="first")
    stream = stream.map(abs, on=pool[{"a": 1, "b": 1}], workers=1, name="shared")
    stream = stream.map(abs, on=pool, workers=2, name="second")
    stream.map(abs, on=pool[{"a": 1, "b": 1}], workers=1, name="again").sink(abs)
    found = [(one.id.stage, one.host) for one in planned(graph).workers if one.host]
    assert found == [("first", "a"), ("shared", "a"), ("second", "b"), ("second", "b"), ("again", "b")]


def test_assigned_hosts_are_used_in_turn() -> None:
    pool = hosts.ssh({"a": 8, "b": 8, "c": 8}).assigned(["c", "a", "b", "b"])
    graph = Graph("assigned")
    graph.source(range(3)).map(abs, on=pool, workers=6).sink(abs)
    assert [one.host for one in planned(graph).workers if one.host] == ["c", "a", "b", "b", "c", "a"]
