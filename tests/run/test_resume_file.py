"""Test R14: which files and graphs a run with ``resume=path`` accepts."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from resuming import ITEMS, finished
from runs import everywhere, script, start

from flowchan import Graph, GraphError, RunError, Stream
from flowchan.run.resume_file import HEADER_BYTES, PAGE_BYTES

SECONDS = 60


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "progress"


def squares(items: int = ITEMS) -> tuple[Graph, Stream[list[int]]]:
    graph = Graph("squares")
    return graph, graph.source(range(items)).map(lambda number: number**2, name="square").collect()


def test_r14_every_prefix_of_the_file_is_valid(path: Path) -> None:
    graph, results = squares()
    graph.run(resume=path)
    whole = path.read_bytes()
    for length in (*range(HEADER_BYTES + 5), PAGE_BYTES - 1):
        path.write_bytes(whole[:length])
        done = set(finished(path))
        assert graph.run(resume=path)[results] == [n**2 for n in range(ITEMS) if n not in done]
        assert path.read_bytes() == whole


def test_r14_any_subset_of_the_bits_is_valid(path: Path) -> None:
    graph, results = squares()
    graph.run(resume=path)
    whole = path.read_bytes()
    for lost in range(HEADER_BYTES, HEADER_BYTES + 3):
        path.write_bytes(whole[:lost] + b"\x5a" + whole[lost + 1 :])
        done = set(finished(path))
        assert graph.run(resume=path)[results] == [n**2 for n in range(ITEMS) if n not in done]
        assert path.read_bytes() == whole


def test_r14_file_needs_one_bit_per_item(path: Path) -> None:
    graph, _ = squares(80_000)
    graph.run(resume=path)
    assert path.stat().st_size == -(-(HEADER_BYTES + 10_000) // PAGE_BYTES) * PAGE_BYTES


def test_r14_file_with_other_contents_is_refused_and_kept(path: Path) -> None:
    path.write_text("name,age\n")
    with pytest.raises(GraphError, match=r"'.*/progress' is not a resume file; resume from another path"):
        squares()[0].run(resume=path)
    assert path.read_text() == "name,age\n"


def test_r14_path_that_cannot_be_opened_is_refused(path: Path) -> None:
    with pytest.raises(GraphError, match=r"'.*/inner' could not be used: .*No such file or directory"):
        squares()[0].run(resume=path / "inner")


@pytest.mark.parametrize("path", [1, b"bytes", True])
def test_r14_resume_must_be_a_path(path: Any) -> None:
    with pytest.raises(TypeError, match="run: resume must be a path or None, got"):
        squares()[0].run(resume=path)


def test_r14_file_of_another_graph_is_refused(path: Path) -> None:
    squares()[0].run(resume=path)
    graph = Graph("squares")
    graph.source(range(ITEMS)).map(lambda number: number**2, name="power").collect()
    with pytest.raises(
        GraphError, match="belongs to a graph with different stage names, operators or streams"
    ):
        graph.run(resume=path)


def test_r14_changed_settings_do_not_change_the_graph(path: Path) -> None:
    squares()[0].run(resume=path)
    graph = Graph("renamed")
    source = graph.source(range(ITEMS + 1), capacity=3)
    results = source.map(lambda number: -number, name="square", workers=3, on="process").collect()
    assert graph.run(resume=path)[results] == [-ITEMS]


def test_r14_shorter_source_is_refused_by_name(path: Path) -> None:
    squares()[0].run(resume=path)
    with pytest.raises(GraphError, match=r"'source': the source must have at least the 24 items .*, got 23"):
        squares(ITEMS - 1)[0].run(resume=path)


def test_r14_longer_source_continues_with_its_new_items(path: Path) -> None:
    squares()[0].run(resume=path)
    graph, results = squares(ITEMS + 2)
    assert graph.run(resume=path)[results] == [ITEMS**2, (ITEMS + 1) ** 2]


def test_r14_path_of_an_active_run_is_refused(path: Path) -> None:
    graph, results = squares()
    with graph.start(resume=path) as run:
        with pytest.raises(
            GraphError, match=r"'.*/progress' is used by another run; wait until it has ended"
        ):
            squares()[0].run(resume=path)
        assert run.wait()[results] == [n**2 for n in range(ITEMS)]


def test_r14_path_of_a_run_in_another_program_is_refused(path: Path, tmp_path: Path) -> None:
    program = script(
        tmp_path,
        """
        import sys
        from flowchan import Graph

        graph = Graph("squares")
        graph.source(range(24)).map(lambda number: number**2, name="square").collect()
        graph.run(resume=sys.argv[1])
        """,
    )
    graph, _ = squares()
    with graph.start(resume=path), start(program, str(path)) as process:
        _, err = process.communicate(timeout=SECONDS)
    assert "is used by another run" in err
    with start(program, str(path)) as process:
        _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err


def test_r14_failed_start_releases_the_path(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, _ = squares()
    with monkeypatch.context() as patched:
        patched.setattr(Graph, "_begin", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            graph.run(resume=path)
    graph.run(resume=path)


def test_r14_failed_run_releases_the_path(path: Path) -> None:
    graph = Graph()
    graph.source(["x"]).sink(int)
    with pytest.raises(RunError):
        graph.run(resume=path)
    with pytest.raises(RunError):
        graph.run(resume=path)


@everywhere
def test_r14_run_fails_if_the_file_cannot_be_written(
    on: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = Graph()
    graph.source(range(8 * PAGE_BYTES)).sink(int, on=on)

    def is_full(file: int, start: int, length: int) -> None:
        if length > PAGE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", is_full)
        with pytest.raises(RunError) as raised:
            graph.run(resume=path)
    (error,) = raised.value.exceptions
    assert re.search(
        r"'source' could not be recorded in resume='.*': .*No space left.*; free space", str(error)
    )


# --- what is refused ---

REFUSED: dict[str, tuple[Callable[[Graph], Any], str]] = {
    "input": (lambda graph: graph.input().sink(int), r"'input': .*an input, .*; use source\(\)"),
    "take": (lambda graph: graph.source([1]).take(1).sink(int), r"'take': .*a take, .*another graph"),
    "zip": (
        lambda graph: graph.source([1]).zip(graph.source([1])).sink(print),
        r"'zip': .*a zip, .*another graph",
    ),
    "reduce": (lambda graph: graph.source([1]).reduce(max), r"'max': .*a reduce, .*save the items"),
    "collect": (
        lambda graph: graph.source([1]).collect(name="all").sink(len),
        r"'all': .*a collect that another stage reads",
    ),
    "allreduce": (
        lambda graph: graph.source([1]).allreduce().sink(print),
        r"'allreduce': .*a allreduce, .*another graph",
    ),
    "key": (
        lambda graph: graph.source([1]).map(str, key=int, workers=2, name="keyed").sink(len),
        r"'keyed': .*a map with key=, .*another graph",
    ),
    "window": (
        lambda graph: graph.source([1]).window(2).sink(print),
        r"'window': .*a window, .*another graph",
    ),
}


@pytest.mark.parametrize("stage", REFUSED)
def test_r14_stage_that_loses_the_origin_of_items_is_refused(stage: str, path: Path) -> None:
    graph = Graph()
    declare, message = REFUSED[stage]
    declare(graph)
    with pytest.raises(GraphError, match=message) as refused:
        graph.run(resume=path)
    assert [problem.rule for problem in refused.value.problems] == ["resume"]
    assert not path.exists()


def test_r14_run_without_resume_has_plain_items() -> None:
    graph = Graph()
    numbers = graph.source([1], capacity=1).map(int, name="number", capacity=1)
    numbers.collect()
    with graph.start() as run:
        assert run._plan.finished is None
        assert all(ports.shared.finished is None for ports in run._ports.ports.values())
