"""Test the port that serves a run's metrics: when the port is open, and which requests it accepts."""

from __future__ import annotations

import http.client
import itertools
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
from support.worker_latch import Gate

from flowchan import Graph, GraphError, Run
from flowchan.viz.insight.server import LocalServer


def scraped(run: Run) -> str:
    assert run.metrics is not None
    with urlopen(run.metrics, timeout=60) as reply:
        assert reply.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        return str(reply.read().decode())


def port_of(run: Run) -> int:
    return urlsplit(run.metrics or "").port or 0


def status(address: str | None, path: str, host: str) -> int:
    url = urlsplit(address or "")
    connection = http.client.HTTPConnection("127.0.0.1", url.port or 0, timeout=60)
    connection.putrequest("GET", path, skip_host=True)
    connection.putheader("Host", host)
    connection.endheaders()
    with connection.getresponse() as reply:
        return reply.status


def waiting(gate: Gate, name: str = "waits") -> Graph:
    graph = Graph(name)
    graph.source([1], name="one").sink(lambda _: gate.wait(), name="wait")
    return graph


def test_metrics_port_is_open_only_during_the_run() -> None:
    gate = Gate()
    with waiting(gate).start(metrics=0) as run:
        assert 'flowchan_stage_items_in_total{graph="waits",stage="wait"}' in scraped(run)
        assert 'flowchan_run_state{graph="waits",state="running"} 1' in scraped(run)
        gate.open()
        run.wait()
        with pytest.raises(OSError, match="refused"):
            scraped(run)


def test_run_without_metrics_has_no_metrics_address() -> None:
    graph = Graph("plain")
    graph.source([1]).sink(str)
    with graph.start() as run:
        assert run.metrics is None


def test_graph_run_serves_metrics_on_the_given_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def scrape(_: int) -> str:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as reply:
            return str(reply.read().decode())

    graph = Graph("own")
    texts = graph.source([1]).map(scrape, name="scrape").collect()
    (text,) = graph.run(metrics=port)[texts]
    assert 'flowchan_stage_items_in_hand{graph="own",stage="scrape"} 1' in text


def test_runs_in_one_program_have_separate_metrics_ports_and_labels() -> None:
    gate = Gate()
    with waiting(gate, "a").start(metrics=0) as one, waiting(gate, "b").start(metrics=0) as two:
        assert port_of(one) != port_of(two)
        assert 'graph="a"' in scraped(one)
        assert 'graph="b"' not in scraped(one)
        assert 'graph="b"' in scraped(two)
        gate.open()


def test_metrics_port_in_use_is_refused_before_run_starts() -> None:
    started: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        graph = Graph("refused")
        graph.source([1]).sink(started.append)
        with pytest.raises(OSError, match=f"run: metrics must be a free port on this machine, got {port}"):
            graph.start(metrics=port)
    assert not started
    assert not graph.start(metrics=port).wait()  # the same graph can start once the port is free


def test_metrics_port_is_released_if_run_cannot_start(tmp_path: Path) -> None:
    graphs = [Graph("one"), Graph("two")]
    for graph in graphs:
        graph.source([1], name=f"source of {graph.name}").sink(str)
    graphs[0].run(resume=tmp_path / "file")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(GraphError, match="different stage names"):
        graphs[1].start(resume=tmp_path / "file", metrics=port)
    with graphs[1].start(metrics=port) as run:
        assert port_of(run) == port


@pytest.mark.parametrize("metrics", ["", "9464", "host", ":9464", "127.0.0.1:", "127.0.0.1:x", 65536, -1])
def test_metrics_argument_must_be_port_or_address(metrics: int | str) -> None:
    graph = Graph("g")
    graph.source([1]).sink(str)
    with pytest.raises(ValueError, match="run: metrics must be a port from 0 to 65535"):
        graph.start(metrics=metrics)


@pytest.mark.parametrize("metrics", [True, 1.5, b"127.0.0.1:80"])
def test_metrics_argument_of_wrong_type_is_refused(metrics: object) -> None:
    graph = Graph("g")
    graph.source([1]).sink(str)
    with pytest.raises(TypeError, match="run: metrics must be a port or"):
        graph.start(metrics=metrics)  # type: ignore[arg-type]


def test_loopback_port_refuses_other_host_names_and_paths() -> None:
    gate = Gate()
    with waiting(gate).start(metrics=0) as run:
        port = port_of(run)
        assert status(run.metrics, "/metrics", f"localhost:{port}") == 200
        assert status(run.metrics, "/metrics", f"attacker.example:{port}") == 403
        assert status(run.metrics, "/", f"127.0.0.1:{port}") == 404
        gate.open()


def test_public_address_accepts_any_host_name_but_serves_only_metrics() -> None:
    gate = Gate()
    with waiting(gate).start(metrics="0.0.0.0:0") as run:
        assert run.metrics == f"http://0.0.0.0:{port_of(run)}/metrics"
        assert status(run.metrics, "/metrics", "worker-7.example") == 200
        assert status(run.metrics, "/snapshots", "worker-7.example") == 404
        gate.open()


def descriptors(_: int) -> set[str]:
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # the descriptor that listdir() itself had open
            continue
    return found


def test_forked_workers_do_not_inherit_metrics_port() -> None:
    graph = Graph("forks")
    questions = graph.input("questions")
    answers = questions.map(descriptors, on="process", name="answer").collect()
    with graph.start(metrics=0) as run:
        listening = os.readlink(f"/proc/self/fd/{run._metrics._server._http.socket.fileno()}")
        assert listening in descriptors(0)
        run.scale("answer", workers=3)  # forked after the port was opened
        for number in range(20):
            run[questions].put(number)
    for seen in run.wait()[answers]:
        assert listening not in seen


def test_pool_serves_metrics_for_each_run() -> None:
    graph = Graph("pooled")
    graph.input().map(str, on="process").sink(len)
    with graph.pool() as pool:
        for _ in range(2):
            with pool.start(metrics=0) as run:
                assert 'graph="pooled"' in scraped(run)


def test_run_command_prints_metrics_address(tmp_path: Path) -> None:
    (tmp_path / "case.py").write_text(
        "from flowchan import Graph\ngraph = Graph('numbers')\ngraph.source([1]).sink(str)\n"
    )
    command = [sys.executable, "-c", "from flowchan.cli.commands import main; main()", "run", "case.py"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done, refused, wrong = (
            subprocess.run([*command, "--metrics", value], cwd=tmp_path, capture_output=True, text=True)
            for value in ("0", str(port), "nowhere")
        )
    assert done.returncode == 0
    assert "metrics: http://127.0.0.1:" in done.stderr
    assert refused.returncode == wrong.returncode == 2
    assert f"flowchan: run: metrics must be a free port on this machine, got {port}" in refused.stderr
    assert "Invalid value for '--metrics'" in wrong.stderr


def test_start_fails_if_the_metrics_server_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(_: LocalServer) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(LocalServer, "start", no_thread)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    graph = Graph("g")
    graph.source(itertools.count).sink(str)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        graph.start(metrics=port)
    with socket.create_server(("127.0.0.1", port)):
        pass
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("flowchan g")]
