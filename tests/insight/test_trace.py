"""Test ``trace=``: the trace file, and that tracing changes neither the items nor their order."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from support.waiting import wait_until
from support.worker_latch import Gate
from trace_files import check_trace, names_of, read_trace, seconds_of

from flowchan import Graph, GraphError, Run, RunError, Stream
from flowchan.items.sampled_item import SampledItem
from flowchan.run.policy.events import ItemTraced
from flowchan.run.worker import item_recorder

everywhere = pytest.mark.parametrize("on", ["thread", "process"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.json"


@pytest.fixture
def every_item(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample every item, even in worker processes, which inherit the setting by fork."""
    monkeypatch.setattr(item_recorder, "CLOSEST_NS", -1)


def twice(number: int) -> int:
    return 2 * number


def is_even(number: int) -> bool:
    return number % 2 == 0


def copies(number: int) -> list[int]:
    return [number] * (number % 4)


async def later(number: int) -> int:
    return number


def traced_items(run: Run) -> list[ItemTraced]:
    """Wait for the end of a run, and return its sampled items."""
    items: list[ItemTraced] = []
    with run.subscribe(events=lambda event: items.append(event) if isinstance(event, ItemTraced) else None):
        run.wait()
    return items


# --- the file ---


def test_file_that_another_run_writes_is_refused(path: Path) -> None:
    gate, started = Gate(), list[int]()
    one, two = Graph("one"), Graph("two")
    one.source([1]).map(gate.wait, on="process", name="wait").sink(str)
    two.source([1]).sink(started.append)
    with one.start(trace=path) as run:
        with pytest.raises(BlockingIOError, match=r"another run is already writing its trace to this file"):
            two.start(trace=path)
        gate.open()
        run.wait()
    check_trace(read_trace(path))
    assert not started
    two.run(trace=path)  # the first run has ended
    assert names_of(read_trace(path))[0][1] == "run of two"


@pytest.mark.parametrize("name", ["out.json", "out.json.gz"])
def test_trace_file_is_valid_and_shows_each_worker(tmp_path: Path, name: str) -> None:
    graph = Graph("named")
    graph.source(range(200)).map(twice, on="process", workers=2, name="double").sink(str, name="end")
    graph.run(trace=tmp_path / name)
    events = read_trace(tmp_path / name)
    check_trace(events)
    processes, threads = names_of(events)
    assert list(processes.values()) == ["run of named", "source", "double", "end"]
    shown = {(processes[event["pid"]], threads[event["tid"]]) for event in events if event["ph"] == "X"}
    workers = {("source", "worker 1"), ("double", "worker 1"), ("double", "worker 2"), ("end", "worker 1")}
    assert workers <= shown
    counters = [event for event in events if event["ph"] == "C"]
    assert {" ".join([event["name"], *event["args"]]) for event in counters} == {
        f"{edge.name}: {value}" for edge in graph.edges for value in ("items inside", "items per second")
    }


@everywhere
def test_trace_spans_add_up_to_seconds_in_statistics(path: Path, on: str) -> None:
    gate = Gate()

    def wait(number: int) -> int:
        gate.wait()
        return number

    graph = Graph()
    numbers = graph.source(range(300)).buffer(2).map(wait, on=on, name="slow")
    numbers.map(twice, name="starved").sink(str)
    run = graph.start(trace=path)
    wait_until(lambda: run.stats().stages[0].seconds.place > 0.3)
    gate.open()
    run.wait()
    events = read_trace(path)
    check_trace(events)
    for stage in run.stats().stages:
        seconds = seconds_of(events, stage.name)
        expected = {
            "busy": stage.seconds.work,
            "waits for input": stage.seconds.input,
            "waits for room": stage.seconds.place,
            "waits for its turn": stage.seconds.turn,
        }
        for name, time in expected.items():
            assert seconds[name] == pytest.approx(time, abs=0.1), (stage.name, name)


def test_trace_follows_sampled_item_through_all_operators(path: Path, every_item: None) -> None:
    graph = Graph()
    numbers = graph.source(range(64)).map(twice, on="process").filter(is_even).map(later, name="later")
    numbers.flat_map(copies).batch(4).unbatch().sink(str)
    graph.run(trace=path)
    events = read_trace(path)
    check_trace(events)
    processes, _ = names_of(events)
    paths: defaultdict[int, list[str]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            paths[event["id"]].append(processes[event["pid"]])
    assert ["source", "twice", "is_even", "later", "copies", "batch", "unbatch", "str"] in paths.values()


def test_trace_shows_worker_death_and_restart(path: Path, tmp_path: Path) -> None:
    flag = tmp_path / "died"

    def die_once(number: int) -> int:
        if number == 5 and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    graph = Graph()
    numbers = graph.source(range(20)).map(die_once, on="process", name="dies").collect()
    assert graph.run(trace=path)[numbers] == list(range(20))
    events = read_trace(path)
    check_trace(events)
    (death,) = [event for event in events if event["name"] == "died"]
    assert "SIGKILL" in death["args"]["text"]
    starts = [event for event in events if event["name"] == "starting" and event["tid"] == death["tid"]]
    assert sum(start["ts"] >= death["ts"] - 1 for start in starts) == 1


def test_trace_shows_retries_and_failed_items(path: Path) -> None:
    graph = Graph()
    parsed = graph.source(["1", "x"]).map(int, retries=2, name="parse")
    parsed.sink(str)
    parsed.errors.collect()
    graph.run(trace=path)
    names = [event["name"] for event in read_trace(path)]
    assert names.count("retry") == 2
    assert names.count("item failed") == 1


def test_failed_run_leaves_valid_trace_file(path: Path) -> None:
    def fail(number: int) -> int:
        raise ValueError("no luck")

    graph = Graph()
    graph.source(range(10)).map(fail, name="fails").sink(str)
    with pytest.raises(RunError):
        graph.run(trace=path)
    events = read_trace(path)
    check_trace(events)
    assert [event["args"]["text"] for event in events if event["name"] == "failed"] == ["ValueError: no luck"]
    assert "run is failed" in [event["name"] for event in events]


def test_aborted_run_leaves_valid_trace_file(path: Path) -> None:
    graph = Graph()
    graph.source(itertools.count()).sink(str)
    run = graph.start(trace=path)
    run.abort()
    run.wait()
    events = read_trace(path)
    check_trace(events)
    assert {"abort requested", "run is aborted"} <= {event["name"] for event in events}


def test_item_path_includes_puts_and_reads_of_the_program(path: Path) -> None:
    graph = Graph()
    numbers = graph.input()
    doubled = numbers.map(twice, name="double").collect()
    with graph.start(trace=path) as run:
        items: list[ItemTraced] = []
        run.subscribe(events=lambda event: items.append(event) if isinstance(event, ItemTraced) else None)
        run[numbers].put(1)
        run[numbers].close()
        assert list(run.iter(doubled)) == [2]
    run.wait()
    wait_until(lambda: bool(items))
    (item,) = items
    assert item.path == (numbers.stage, "double", doubled.stage)
    assert item.latency >= 0
    check_trace(read_trace(path))


def test_added_worker_has_its_own_track(path: Path) -> None:
    graph = Graph()
    numbers = graph.input()
    numbers.map(twice, name="double").sink(str)
    with graph.start(trace=path) as run:
        run.scale("double", 2)
        wait_until(lambda: run.stats().stages[1].working == 2)
    events = read_trace(path)
    check_trace(events)
    assert "worker 2" in names_of(events)[1].values()
    assert "double: workers=2" in [event["name"] for event in events]


# --- the items ---


def zipped(streams: Iterable[Stream[Any]]) -> Stream[Any]:
    first, *others = streams
    return first.zip(*others)


PIPES: dict[str, Callable[[Stream[int], str], Stream[Any]]] = {
    "map": lambda numbers, on: numbers.map(twice, on=on, workers=3),
    "filter": lambda numbers, on: numbers.filter(is_even, on=on, workers=2),
    "flat_map": lambda numbers, on: numbers.flat_map(copies, on=on, workers=2),
    "batch": lambda numbers, on: numbers.batch(7).map(list, on=on),
    "unbatch": lambda numbers, on: numbers.batch(7).map(list, on=on).unbatch(),
    "take": lambda numbers, on: numbers.map(twice, on=on).take(10),
    "zip": lambda numbers, on: zipped(part.map(twice, on=on) for part in numbers.tee(2)),
    "partition": lambda numbers, on: zipped(part.map(twice, on=on) for part in numbers.partition(is_even, 2)),
    "keyed": lambda numbers, on: numbers.map(twice, key=is_even, on=on, workers=2),
    "window": lambda numbers, on: numbers.map(twice, on=on).window(5),
    "async": lambda numbers, on: numbers.map(later, on=on, workers=2),
}


@everywhere
@pytest.mark.parametrize("pipe", PIPES)
def test_tracing_does_not_change_items_or_their_order(
    pipe: str, on: str, path: Path, every_item: None
) -> None:
    def run(**options: Any) -> list[Any]:
        graph = Graph()
        result = PIPES[pipe](graph.source(range(100)), on).collect()
        return graph.run(**options)[result]

    expected = run()
    traced = run(trace=path)
    assert len(expected) > 3
    assert (sorted(traced) == sorted(expected)) if pipe == "keyed" else traced == expected
    check_trace(read_trace(path))


def test_sampled_items_are_not_repeated_if_workers_are_killed(
    path: Path, tmp_path: Path, every_item: None
) -> None:
    def die_sometimes(number: int) -> int:
        flag = tmp_path / str(number)
        if number % 20 == 0 and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    graph = Graph()
    numbers = graph.source(range(100)).map(die_sometimes, on="process", workers=2).map(twice, on="process")
    result = numbers.collect()
    assert graph.run(trace=path)[result] == [2 * number for number in range(100)]
    check_trace(read_trace(path))


def test_unpicklable_item_fails_with_same_error_if_traced(path: Path, every_item: None) -> None:
    lock = threading.Lock()

    def error(**options: Any) -> str:
        graph = Graph()
        locks = graph.source([lock], name="locks")
        locks.map(str, on="process").sink(str)
        with pytest.raises(RunError) as caught:
            graph.run(**options)
        return str(caught.value.exceptions[0].__cause__)

    assert error(trace=path) == error()


def test_untraced_run_never_boxes_items() -> None:
    graph = Graph()
    types = graph.source(range(10)).map(type, on="process").collect()
    run = graph.start()
    assert set(run.wait()[types]) == {int}
    assert traced_items(run) == []


def test_traced_run_is_freed_without_garbage_collection(path: Path) -> None:
    gc.disable()
    try:
        graph = Graph()
        graph.source(range(10)).map(twice, on="process").sink(str)
        run = graph.start(trace=path)
        run.wait()
        freed = weakref.ref(run)
        del run
        assert freed() is None
    finally:
        gc.enable()


def test_resumed_run_with_trace_skips_finished_items(path: Path, tmp_path: Path, every_item: None) -> None:
    graph = Graph()
    numbers = graph.source(range(20)).map(twice, on="process").collect()
    runs = [graph.run(resume=tmp_path / "progress", trace=path)[numbers] for _ in range(2)]
    assert runs == [[2 * number for number in range(20)], []]
    check_trace(read_trace(path))


def test_each_run_in_pool_has_its_own_trace(tmp_path: Path, every_item: None) -> None:
    graph = Graph()
    numbers = graph.source(range(20)).map(twice, on="process").collect()
    paths = [tmp_path / f"{number}.json" for number in range(2)]
    with graph.pool() as pool:
        for path in paths:
            assert pool.run(trace=path)[numbers] == [2 * number for number in range(20)]
    for path in paths:
        events = read_trace(path)
        check_trace(events)
        assert any(event["ph"] == "f" for event in events)


# --- bounds ---


def test_source_samples_few_items_of_fast_stream(path: Path) -> None:
    graph = Graph()
    graph.source(range(100_000)).sink(abs)
    items = traced_items(graph.start(trace=path))
    assert 1 <= len(items) < 1000


def test_item_in_a_loop_has_a_bounded_number_of_marks() -> None:
    recorder = item_recorder.ItemRecorder(item_recorder.WorkerId("s", 1), lambda _: None, None)
    marks: tuple[int, ...] = ()
    for number in range(10 * item_recorder.MOST_MARKS):
        recorder.took(0, SampledItem("state", marks))
        recorder.took(1, SampledItem("new", (number,)))
        marks = recorder.boxed(2, "sum").marks
        recorder.finished(0)
        recorder.finished(1)
    assert marks == tuple(range(number + 1 - item_recorder.MOST_MARKS, number + 1))


def test_recorder_keeps_a_bounded_number_of_spans() -> None:
    reports: list[Any] = []
    recorder = item_recorder.ItemRecorder(item_recorder.WorkerId("s", 1), reports.append, 0)
    for _ in range(10 * item_recorder.MOST_SPANS):
        recorder.boxed(0, None)
        recorder.sent(0)
        assert len(recorder._spans) < item_recorder.MOST_SPANS
    assert len(reports) >= 10


def test_run_continues_without_trace_if_disk_is_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "out.json"
    path.symlink_to("/dev/full")
    graph = Graph()
    numbers = graph.source(range(20)).map(twice).collect()
    with caplog.at_level("WARNING", "flowchan.run"):
        assert len(graph.run(trace=path)[numbers]) == 20
    assert "is incomplete: OSError: [Errno 28] No space left on device" in caplog.text


# --- arguments ---


def test_trace_path_that_cannot_be_opened_is_refused_before_start(tmp_path: Path) -> None:
    started = []
    graph = Graph()
    graph.source(range(3)).sink(started.append)
    with pytest.raises(
        FileNotFoundError,
        match=r"trace='.*missing.*' could not be opened: No such file or directory; choose another",
    ):
        graph.run(trace=tmp_path / "missing" / "out.json")
    assert started == []


def test_trace_path_with_wrong_suffix_is_refused(tmp_path: Path) -> None:
    graph = Graph()
    graph.source(range(3)).sink(str)
    with pytest.raises(ValueError, match=r"trace must end in \.json or \.json\.gz, got '.*out\.txt'"):
        graph.start(trace=tmp_path / "out.txt")


def test_trace_argument_that_is_not_a_path_is_refused() -> None:
    graph = Graph()
    graph.source(range(3)).sink(str)
    with pytest.raises(TypeError, match="trace must be a path or None, got 5"):
        graph.start(trace=5)  # type: ignore[arg-type]


def test_invalid_graph_does_not_overwrite_existing_trace_file(path: Path) -> None:
    path.write_text("precious")
    graph = Graph()
    graph.source(range(3))
    with pytest.raises(GraphError):
        graph.run(trace=path)
    assert path.read_text() == "precious"
