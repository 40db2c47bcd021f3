"""Test ``graph.record``: the file contains the items of the channel, and the recording does not change the
run."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import Gate, everywhere, run_python, script, stage_of
from support.optional_packages import optional

from flowchan import Failed, Graph, In, Out, Recording, RunError

numpy = optional("numpy")

N = 60


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "items.rec"


def odd_fails(number: int) -> int:
    if number % 2:
        raise ValueError(number)
    return number


def exclaimed(text: str) -> str:
    return text + "!"


def negative(numbers: list[int]) -> list[int]:
    return [-number for number in numbers]


def mapped(graph: Graph, on: str) -> Any:
    numbers = graph.source(range(N), name="numbers").map(lambda n: n + 1, on=on, workers=3, name="more")
    return numbers.map(str, on=on, workers=2).collect(), "more", range(1, N + 1)


def first(graph: Graph, on: str) -> Any:
    return graph.source(range(N), name="numbers").map(str, on=on).collect(), "numbers", range(N)


def last(graph: Graph, on: str) -> Any:
    return graph.source(range(N)).map(str, on=on, name="texts").collect(), "texts", map(str, range(N))


def batches(graph: Graph, on: str) -> Any:
    result = graph.source(range(N)).batch(7, name="batch").map(negative, on=on).unbatch().collect()
    return result, "batch", [list(range(n, min(n + 7, N))) for n in range(0, N, 7)]


def arrays(graph: Graph, on: str) -> Any:
    made = graph.source(range(N)).map(lambda n: numpy.full(100_000, n), on=on, name="made")
    return made.map(lambda array: int(array.sum()), on=on).collect(), "made", None


def keyed(graph: Graph, on: str) -> Any:
    numbers = graph.source(range(N), name="numbers")
    return numbers.map(lambda n: -n, key=lambda n: n % 3, on=on, workers=2).collect(), "numbers", range(N)


def zipped(graph: Graph, on: str) -> Any:
    left, right = graph.source(range(N)).tee(2, name="tee")
    return left.zip(right.map(str, on=on)).collect(), "tee.1", range(N)


def resulting(graph: Graph, on: str) -> Any:
    total = graph.source(range(N)).reduce(lambda a, b: a + b, 0, name="total")
    return total.map(lambda n: -n, on=on).collect(), "total", [sum(range(N))]


def looped(graph: Graph, on: str) -> Any:
    def steer(fresh: In[int], again: In[int], work: Out[int], done: Out[int]) -> None:
        for number in fresh:
            while number:
                work.put(number)
                number = again.get()
            done.put(number)

    again = graph.feedback()
    work, done = graph.stage(steer, graph.source([2, 3]), again)
    again.feed(work.map(lambda n: n - 1, on=on, name="less"))
    return done.collect(), "less", [1, 0, 2, 1, 0]


@everywhere
@pytest.mark.parametrize("declare", [mapped, first, last, batches, arrays, keyed, zipped, resulting, looped])
def test_recording_has_all_items_and_leaves_results_unchanged(
    declare: Callable[[Graph, str], Any], on: str, path: Path
) -> None:
    plain = Graph()
    result, channel, expected = declare(plain, on)
    without = plain.run()[result]
    graph = Graph()
    result, channel, expected = declare(graph, on)
    graph.record(channel, path)
    assert not graph.check()
    assert graph.run()[result] == without
    recording = Recording(path)
    assert recording.complete
    assert not recording.stopped
    if expected is not None:
        assert list(recording) == list(expected)
    else:
        assert [(len(array), int(array[0])) for array in recording] == [(100_000, n) for n in range(N)]


@everywhere
def test_errors_stream_is_recorded_with_its_failed_items(on: str, path: Path) -> None:
    graph = Graph()
    numbers = graph.source(range(N)).map(odd_fails, on=on, name="even")
    good, bad = numbers.collect(), numbers.errors.map(lambda failed: failed.item).collect()
    graph.record("even.errors", path)
    results = graph.run()
    assert results[good] == list(range(0, N, 2))
    assert results[bad] == list(range(1, N, 2))
    recorded = list(Recording(path))
    assert all(type(failed) is Failed and type(failed.error) is ValueError for failed in recorded)
    assert [failed.item for failed in recorded] == list(range(1, N, 2))


def test_early_end_stops_source_of_recorded_channel(path: Path) -> None:
    graph = Graph()
    taken = graph.source(lambda: iter(int, 1), name="zeros").take(5).collect()
    graph.record("zeros", path)
    assert graph.run()[taken] == [0] * 5
    recording = Recording(path)
    assert recording.complete
    assert len(recording) >= 5


@everywhere
def test_failed_run_has_recorded_the_item_that_failed(on: str, path: Path) -> None:
    def fail(number: int) -> None:
        if number == 7:
            raise ValueError(number)

    graph = Graph()
    graph.source(range(N), name="numbers").sink(fail, on=on)
    graph.record("numbers", path)
    with pytest.raises(RunError) as failure:
        graph.run()
    assert failure.value.exceptions[0].item == "7"
    recorded = list(Recording(path))
    assert recorded == list(range(len(recorded)))
    assert recorded[7] == 7


@everywhere
def test_resumed_run_records_plain_items(on: str, path: Path) -> None:
    seen: Any = []
    for _ in range(2):
        graph = Graph()
        batch = graph.source(range(N)).batch(7, name="batch")
        result = batch.map(negative, on=on).unbatch().collect()
        graph.record("batch", path)
        seen.append((graph.run(resume=path.with_suffix(".progress"))[result], list(Recording(path))))
    assert seen[0][0] == [-n for n in range(N)]
    assert seen[0][1] == [list(range(n, min(n + 7, N))) for n in range(0, N, 7)]
    assert seen[1] == ([], [])


def test_requests_are_recorded_as_items_and_answered(path: Path) -> None:
    graph = Graph()
    questions = graph.input("questions")
    questions.map(str.upper, on="process").sink(exclaimed)
    graph.record("questions", path)

    async def ask() -> list[Any]:
        with graph.start() as run:
            return [await run.ask(questions, word) for word in ("a", "b")]

    assert asyncio.run(ask()) == ["A!", "B!"]
    assert list(Recording(path)) == ["a", "b"]


def test_item_is_recorded_as_put_before_its_reader_changes_it(path: Path) -> None:
    graph = Graph()
    graph.source(lambda: ([n] for n in range(N)), name="lists").sink(list.clear)
    graph.record("lists", path)
    graph.run()
    assert list(Recording(path)) == [[n] for n in range(N)]


@pytest.mark.parametrize(
    ("options", "items", "reason"),
    [({"most": 5}, 5, "the limit of 5 items"), ({"max_bytes": 3_000}, 2, "the limit of 3,000 bytes")],
)
def test_limit_ends_recording_with_a_warning_but_not_run(
    options: dict[str, Any], items: int, reason: str, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    graph = Graph()
    sizes = graph.source([bytes(1_000)] * N, name="data").map(len).collect()
    graph.record("data", path, **options)
    with caplog.at_level(logging.WARNING, "flowchan.run"):
        assert graph.run()[sizes] == [1_000] * N
    assert len(Recording(path)) == items
    assert reason in Recording(path).stopped
    (warning,) = [record.getMessage() for record in caplog.records]
    assert f"channel 'data' ended after {items} items, because {reason}" in warning


def test_item_that_cannot_be_pickled_ends_recording_but_not_run(path: Path) -> None:
    graph = Graph()
    kinds = graph.source([1, iter([]), 3], name="things").map(lambda thing: type(thing).__name__).collect()
    graph.record("things", path)
    graph.source([lambda: 0]).sink(callable)
    assert graph.run()[kinds] == ["int", "list_iterator", "int"]
    assert Recording(path)[0] == 1


def test_each_run_replaces_the_recording(path: Path) -> None:
    graph = Graph()
    texts = graph.source(range(N), name="numbers").map(str, on="process").collect()
    graph.record("numbers", path)
    for _ in range(2):
        graph.run()
        assert list(Recording(path)) == list(range(N))
    with graph.pool() as pool:
        for _ in range(3):
            assert len(pool.run()[texts]) == N
            assert Recording(path).complete
            assert list(Recording(path)) == list(range(N))


def test_second_run_that_writes_the_same_recording_fails(path: Path) -> None:
    gate = Gate()

    def declared(function: Callable[[int], object]) -> Graph:
        graph = Graph()
        graph.source(range(10 * N), name="numbers").sink(function)
        graph.record("numbers", path)
        return graph

    with declared(gate.wait).start() as run:
        gate.wait_held()
        with pytest.raises(RunError) as failure:
            declared(abs).run()
        gate.open()
        run.wait()
    assert "another run is writing this recording" in str(failure.value.exceptions[0].__cause__)
    assert list(Recording(path)) == list(range(10 * N))


def test_unknown_channel_is_refused_with_the_names(path: Path) -> None:
    graph = Graph()
    graph.source(range(3), name="numbers").map(abs).collect()
    with pytest.raises(ValueError, match=r"channel must be one of 'numbers', 'abs' .*, got 'other'"):
        graph.record("other", path)
    with pytest.raises(TypeError, match="record: channel must be a string"):
        graph.record(3, path)  # type: ignore[arg-type]


def test_channels_of_single_workers_are_refused(path: Path) -> None:
    graph = Graph()
    numbers = graph.source(range(N), name="numbers")
    numbers.map(abs, key=lambda n: n % 3, workers=2, name="keyed").collect()
    for edge in graph.edges:
        if edge.to_worker:
            with pytest.raises(ValueError, match=r"channel must be one of 'numbers', 'keyed' "):
                graph.record(edge.name, path)


def test_recording_is_a_source_on_threads_and_processes(path: Path) -> None:
    graph = Graph()
    graph.source(range(N), name="numbers").sink(abs)
    graph.record("numbers", path)
    graph.run()
    for on in ("thread", "process"):
        again = Graph()
        texts = again.source(Recording(path), on=on).map(str).collect()
        assert again.run()[texts] == list(map(str, range(N)))


def test_run_without_recording_has_no_extra_stage(path: Path) -> None:
    graph = Graph()
    graph.source(range(N), name="numbers").sink(abs)
    with graph.start() as run:
        run.wait()
    assert [stage.name for stage in run.stats().stages] == ["numbers", "abs"]
    graph.record("numbers", path)
    with graph.start() as run:
        run.wait()
    assert stage_of(run, "record").items_in == stage_of(run, "record").items_out == N


def test_full_disk_ends_the_recording_but_not_the_run(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        """
        import resource
        from flowchan import Graph, Recording

        graph = Graph()
        sizes = graph.source([bytes(1_000)] * 100, name="data").map(len).collect()
        big = graph.source([bytes(100_000)] * 3, name="big").map(len).collect()
        graph.record("data", "data.rec")
        graph.record("big", "big.rec")
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_500, 50_500))
        assert graph.run()[sizes] == [1_000] * 100
        recording = Recording("data.rec")
        print(len(recording), recording.complete, set(recording) == {bytes(1_000)}, recording.stopped)
        print(len(Recording("big.rec")), Recording("big.rec").stopped)
        """,
    )
    data, big = run_python(program, cwd=tmp_path).splitlines()
    assert re.fullmatch(r"(4\d) True True item \1 could not be written: File too large", data), data
    assert big == "0 item 0 could not be written: File too large"


def test_recording_that_cannot_begin_names_its_file(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        """
        import resource
        from flowchan import Graph, RunError

        graph = Graph()
        graph.source([1], name="data").sink(abs)
        graph.record("data", "data.rec")
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        try:
            graph.run()
        except RunError as error:
            print(error.exceptions[0])
        """,
    )
    assert f"File too large: '{tmp_path}/data.rec'" in run_python(program, cwd=tmp_path)


def test_unreadable_item_fails_a_run_that_records_it(path: Path) -> None:
    """The program unpickles each item, so it cannot pass on an item that it cannot unpickle."""

    class Wrong:
        def __reduce__(self) -> Any:
            return int, ("x",)

    graph = Graph()
    made = graph.source(range(1)).map(lambda _: Wrong(), on="process", name="made")
    made.map(str, on="process").sink(abs)
    graph.record("made", path)
    with pytest.raises(RunError) as failure:
        graph.run()
    assert failure.value.exceptions[0].stage == "record"
    assert isinstance(failure.value.exceptions[0].__cause__, ValueError)
