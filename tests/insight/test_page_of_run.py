"""Test the page of a run: what viewers receive, which threads it uses, and how it closes with the run."""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import pytest
from page_client import PageViewer, get, get_json
from support.waiting import wait_until
from support.worker_latch import Gate

from flowchan import Graph, RunError
from flowchan.viz.insight import page as pages
from flowchan.viz.render import RenderError

MARKUP = "<script>alert(1)</script>"


def gated(gate: Gate, **options: Any) -> Graph:
    graph = Graph("gated")
    graph.source([1, 2], name="numbers").map(gate.wait, name="work", **options).sink(print, name="end")
    return graph


def page_threads(kind: str = "") -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [
        name
        for name in names
        if name.startswith("flowchan ") and name.endswith(kind or ("page server", "page viewer", "feed"))
    ]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the sampler send snapshots at short intervals."""
    monkeypatch.setattr(pages, "SNAPSHOT_EVERY_S", 0.01)


def test_run_without_page_has_no_page_address_or_thread() -> None:
    gate = Gate()
    with gated(gate).start() as run:
        assert run.page is None
        assert not page_threads()
        with pytest.raises(RuntimeError, match="page=True"):
            run.save_page("report.html")
        gate.open()


def test_page_argument_must_be_a_bool() -> None:
    with pytest.raises(TypeError, match="start: page must be True or False"):
        gated(Gate()).start(page="yes")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="run: page must be True or False"):
        gated(Gate()).run(page=1)  # type: ignore[arg-type]


def test_viewer_receives_history_snapshots_and_end_event() -> None:
    gate = Gate()
    with gated(gate).start(page=True) as run:
        assert run.page is not None
        with PageViewer(run.page) as viewer:
            name, history = viewer.read() or ("", {})
            assert name == "history"
            assert history["stages"].keys() == {"s0", "s1", "s2"}
            name, snapshot = viewer.read() or ("", {})
            assert (name, snapshot["state"]) == ("snapshot", "running")
            gate.open()
            run.wait()
            *_, last, end = viewer.read_all()
    assert end == ("end", {})
    assert last[0] == "snapshot"
    assert last[1]["state"] == "done"
    assert [stage["items_in"] for stage in last[1]["stages"]] == [0, 2, 2]


def test_page_serves_html_graph_and_static_files() -> None:
    gate = Gate()
    with gated(gate).start(page=True) as run:
        assert run.page is not None
        assert b"<html" in get(run.page)[1]
        assert get(run.page, "static/page.js")[0] == 200
        assert get(run.page, "static/uPlot.min.js")[0] == 200
        assert get(run.page, "static/../page.py")[0] == 404
        graph = get_json(run.page, "graph")
        gate.open()
    assert [stage["name"] for stage in graph["stages"]] == ["numbers", "work", "end"]
    assert [(edge["writer"], edge["reader"]) for edge in graph["edges"]] == [("s0", "s1"), ("s1", "s2")]
    assert graph["svg"].startswith("<svg")
    for id in ("s0", "s1", "s2", "e0", "e1"):
        assert f'id="{id}"' in graph["svg"]


def test_run_prints_page_address_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    graph = Graph()
    graph.source([1]).sink(abs)
    graph.run(page=True)
    assert capsys.readouterr().err.startswith("page: http://127.0.0.1:")


def test_page_without_viewers_has_only_the_accepting_thread() -> None:
    gate = Gate()
    with gated(gate).start(page=True) as run:
        assert page_threads() == ["flowchan gated page server"]
        assert run._supervisor.feed._subscriptions == ()
        gate.open()


def test_subscription_ends_when_last_viewer_leaves(quick: None) -> None:
    gate = Gate()
    with gated(gate).start(page=True) as run:
        assert run.page is not None
        with PageViewer(run.page) as first, PageViewer(run.page) as second:
            first.read(), first.read(), second.read(), second.read()
            assert len(page_threads("feed")) == 1
        wait_until(lambda: page_threads() == ["flowchan gated page server"])
        assert run._supervisor.feed._subscriptions == ()
        with PageViewer(run.page) as third:
            third.read_until(lambda snapshot: snapshot["state"] == "running")
        gate.open()


def test_viewers_share_one_sampler(quick: None) -> None:
    gate = Gate()
    with gated(gate).start(page=True) as run:
        assert run.page is not None
        viewers = [PageViewer(run.page) for _ in range(10)]
        for viewer in viewers:
            viewer.read_until(lambda snapshot: snapshot["state"] == "running")
        assert len(run._supervisor.feed._subscriptions) == 1
        gate.open()
        run.wait()
        for viewer in viewers:
            with viewer:
                assert viewer.read_all()[-1] == ("end", {})


def test_viewer_above_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MOST_VIEWERS", 1)
    gate = Gate()
    with gated(gate).start(page=True) as run:
        assert run.page is not None
        with PageViewer(run.page):
            status, body = get(run.page, "snapshots")
            assert status == 503
            assert b"already open 1 times" in body
        gate.open()


def test_slow_viewer_delays_neither_other_viewers_nor_end_of_run(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowchan.viz.insight.server.CLOSE_TIMEOUT_S", 0.05)
    gate = Gate()
    graph = gated(gate)
    with graph.start(page=True) as run:
        assert run.page is not None
        with PageViewer(run.page) as slow, PageViewer(run.page) as quick_viewer:
            page = run._page
            filled = page._publish

            def publish(state: Any) -> None:
                filled(state | {"filler": "x" * 3_000_000})  # more than a connection's buffers can hold

            monkeypatch.setattr(page, "_publish", publish)
            for _ in range(3):
                quick_viewer.read_until(lambda snapshot: "filler" in snapshot)
            gate.open()
            run.wait()
            slow.socket.settimeout(60)
        assert not page_threads()


def test_page_port_is_closed_after_the_run() -> None:
    gate = Gate()
    with gated(gate).start(page=True) as run:
        assert run.page is not None
        gate.open()
    with pytest.raises(ConnectionRefusedError):
        get(run.page)
    assert not page_threads()


def test_aborted_run_closes_viewer_connections(quick: None) -> None:
    gate = Gate()
    with gated(gate).start(page=True) as run:
        assert run.page is not None
        with PageViewer(run.page) as viewer:
            viewer.read()
            run.abort()
            gate.open()
            *_, last, end = viewer.read_all()
    assert (last[1]["state"], end[0]) == ("aborted", "end")


def test_final_snapshot_of_failed_run_shows_its_failure() -> None:
    gate = Gate()

    def fail(number: int) -> int:
        gate.wait()
        raise ValueError(MARKUP)

    graph = Graph("fails")
    graph.source([1], name="numbers").map(fail, name="work").sink(print)
    run = graph.start(page=True)
    assert run.page is not None
    with PageViewer(run.page) as viewer:
        viewer.read()
        gate.open()
        *_, last, end = viewer.read_all()
        with pytest.raises(RunError):
            run.wait()
    assert (last[1]["state"], end[0]) == ("failed", "end")
    assert last[1]["failures"][0]["stage"] == "s1"
    assert last[1]["failures"][0]["text"] == f"ValueError: {MARKUP}"


def test_page_shows_failed_items_and_worker_deaths(quick: None) -> None:
    gate = Gate()

    def work(number: int) -> int:
        if number == 2:
            os.kill(os.getpid(), 9)
        if number == 3:
            raise KeyError("three")
        gate.wait()
        return number

    graph = Graph("deaths")
    numbers = graph.source([2, 3, 4], name="numbers").map(work, name="work", on="process", max_deaths=1)
    numbers.errors.sink(str, name="failed")
    numbers.sink(abs, name="end")
    with graph.start(page=True) as run:
        assert run.page is not None
        with PageViewer(run.page) as viewer:
            shown = viewer.read_until(lambda snapshot: len(snapshot["failures"]) >= 2)
        gate.open()
    texts = [failure["text"] for failure in shown["failures"]]
    assert {failure["stage"] for failure in shown["failures"]} == {"s1"}
    assert any("SIGKILL" in text for text in texts)
    assert any("WorkerDied" in text for text in texts)


def test_page_has_no_picture_if_graph_cannot_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(graph: object) -> str:
        raise RenderError("no renderer")

    monkeypatch.setattr(pages, "svg", refuse)
    gate = Gate()
    with gated(gate).start(page=True) as run:
        assert run.page is not None
        assert get_json(run.page, "graph")["svg"] is None
        gate.open()


def test_page_shows_150_stages(quick: None) -> None:
    gate, graph = Gate(), Graph("long")
    stream = graph.source([1], name="numbers").map(gate.wait)
    for number in range(147):
        stream = stream.map(abs, name=f"stage{number}")
    stream.sink(abs, name="end")
    with graph.start(page=True) as run:
        assert run.page is not None
        with PageViewer(run.page) as viewer:
            (_, history), (_, snapshot) = viewer.read() or ("", {}), viewer.read() or ("", {})
        assert len(get_json(run.page, "graph")["stages"]) == 150
        gate.open()
    assert len(history["stages"]) == len(snapshot["stages"]) == 150
    assert len(snapshot["edges"]) == 149


def test_snapshot_includes_wait_for_edges_and_worker_states(quick: None) -> None:
    gate = Gate()
    with gated(gate, workers=2).start(page=True) as run:
        assert run.page is not None
        with PageViewer(run.page) as viewer:
            shown = viewer.read_until(
                lambda snapshot: (
                    [worker["state"] for worker in snapshot["stages"][2]["workers"]] == ["input"]
                    and [worker["state"] for worker in snapshot["stages"][1]["workers"]] == ["busy", "busy"]
                )
            )
        gate.open()
    assert [(wait["from"], wait["to"], wait["edge"]) for wait in shown["wait_for"]] == [("s2", "s1", "e1")]


def test_page_serves_stacks_and_rejects_request_without_stage() -> None:
    gate = Gate()
    with gated(gate).start(page=True) as run:
        assert run.page is not None
        gate.wait_held()
        stacks = get_json(run.page, "stacks?stage=s1")["stacks"]
        assert all("wait" in text for text in stacks.values())
        assert stacks
        assert get(run.page, "stacks") == (400, b'{"error":"stage"}')
        gate.open()


def test_page_predicts_rates_only_after_items_leave_graph() -> None:
    graph = Graph()
    numbers = graph.input()
    doubled = numbers.map(lambda number: 2 * number, name="double").collect()
    with graph.start(page=True) as run:
        assert run.page is not None
        status, text = get(run.page, "what_if")
        assert status == 400
        assert b"error" in text
        out, results = run[numbers], run.iter(doubled)
        for number in range(50):
            out.put(number)
            next(results)
        rows = get_json(run.page, "what_if")["rows"]
        assert {row["stage"] for row in rows} == {"s1"}
        out.close()
        assert list(results) == []


def test_page_serves_metrics_below_its_token() -> None:
    graph = Graph("served")
    numbers = graph.input()
    numbers.sink(str)
    with graph.start(page=True) as run:
        assert run.page is not None
        status, text = get(run.page, "metrics")
        assert status == 200
        assert b'flowchan_stage_items_in_total{graph="served"' in text


def test_page_shows_latency_of_sampled_items() -> None:
    graph = Graph()
    numbers = graph.input()
    numbers.map(abs, name="work").sink(str, name="end")
    with graph.start(page=True) as run:
        page = run._page
        assert page is not None

        def is_sampled() -> bool:
            run[numbers].put_many(range(100))
            return bool(page._latencies.paths(time.monotonic()))

        wait_until(is_sampled)
    (row,) = page._final["latency"]
    assert row["path"] == ["s0", "s1", "s2"]
    assert 0 <= row["p50"] <= row["p99"]


def test_run_in_pool_has_a_page() -> None:
    graph = Graph("pooled")
    squares = graph.source([1, 2]).map(abs, on="process").collect()
    with graph.pool() as pool:
        for _ in range(2):
            with pool.start(page=True) as run:
                assert run.page is not None
                assert get_json(run.page, "graph")["name"] == "pooled"
                assert list(run.iter(squares)) == [1, 2]
            assert not page_threads()


@pytest.fixture(params=["fork", "spawn", "forkserver"])
def start_method(request: pytest.FixtureRequest) -> Iterator[None]:
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(request.param, force=True)
    yield
    multiprocessing.set_start_method(before, force=True)
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # would otherwise run until pytest exits
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


def test_workers_do_not_inherit_page_sockets(start_method: None) -> None:
    gate, graph = Gate(), Graph("inherited")
    graph.source([1, 2]).map(gate.wait, on="process", name="work").sink(abs)
    with graph.start(page=True) as run:
        gate.wait_held()
        (first,) = run.stats().stages[1].pids
        os.kill(first, 9)  # the replacement worker starts while the page is open

        def replaced() -> bool:
            stage = run.stats().stages[1]
            return stage.working == 1 and len(stage.pids) == 1 and stage.pids != (first,)

        wait_until(replaced)
        inode = os.fstat(run._page._server._http.socket.fileno()).st_ino
        (pid,) = run.stats().stages[1].pids
        folder = Path(f"/proc/{pid}/fd")
        links = [os.readlink(link) for link in folder.iterdir()]
        gate.open()
    assert links
    assert f"socket:[{inode}]" not in links


def test_start_aborts_run_if_page_cannot_get_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no port is free")

    monkeypatch.setattr(pages, "LocalServer", refuse)
    gate = Gate()
    gate.open()
    with pytest.raises(OSError, match="no port is free"):
        gated(gate).start(page=True)
    # a worker that was inside its function when the run was aborted may end slightly later
    wait_until(lambda: not [one for one in threading.enumerate() if one.name.startswith("flowchan")])


def test_metrics_port_is_closed_if_the_page_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no port is free")

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setattr(pages, "LocalServer", refuse)
    gate = Gate()
    gate.open()
    # the exception's traceback keeps the run alive
    with pytest.raises(OSError, match="no port is free") as refused:
        gated(gate).start(page=True, metrics=port)
    with gated(gate).start(metrics=port) as run:
        assert run.metrics == f"http://127.0.0.1:{port}/metrics"
    assert refused.tb is not None


def test_run_with_page_is_freed_without_garbage_collection() -> None:
    gate = Gate()
    gc.disable()
    try:
        run = gated(gate).start(page=True)
        gate.open()
        run.wait()
        freed = weakref.ref(run._supervisor)
        del run
        assert freed() is None
    finally:
        gc.enable()
