"""Serve the live page with real graphs and made-up figures.

The graphs have 5, 35 or 150 stages. :class:`Figures` returns a plausible snapshot for any time, and
:class:`FixturePage` serves the snapshots with the same headers as the real server.
"""

from __future__ import annotations

import json
import math
import queue
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from flowchan import Graph
from flowchan.viz import svg
from flowchan.viz.insight.saved_page import STATIC, saved_page
from flowchan.viz.insight.server import HttpReply, LocalServer, error_reply, json_reply
from flowchan.viz.insight.snapshot import describe

KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
DECISION = "2 → 3 workers: predicted 1.4 ×, measured 1.35 ×"
TRACEBACK = """Traceback (most recent call last):
  File "thumbnails.py", line 31, in decode
OSError: disk full
"""


def work(item: int) -> int:
    return item


def graph_of(stages: int, name: str = "") -> Graph:
    """Return a graph with about this many stages: chains that occasionally split and merge."""
    graph = Graph(name or ("thumbnails" if stages == 5 else f"{stages} stages"))
    if stages == 5:
        images = graph.source(range(10), name="list files")
        decoded = images.map(work, name="decode", workers=3, on="process")
        resized = decoded.map(work, name="resize", workers=2)
        resized.map(work, name="encode", workers=4, on="process").sink(work, name="write")
        return graph
    chosen = random.Random(stages)
    stream = graph.source(range(10), name="read")
    while len(graph.stages) < stages - 1:
        number = len(graph.stages)
        if number % 16 == 3 and number < stages - 6:
            left, right = stream.tee(2, name=f"copy{number}")
            left = left.map(work, name=f"thumbnail{number}", workers=2)
            stream = graph.merge(left, right, name=f"merge{number}")
        else:
            on = "process" if chosen.random() < 0.3 else "thread"
            stream = stream.map(work, name=f"step{number}", workers=chosen.randint(1, 3), on=on)
    stream.sink(work, name="store")
    return graph


def described(graph: Graph) -> dict[str, Any]:
    """Return the response from ``/graph``, plus each stage's number of workers for :class:`Figures`."""
    drawn = svg(graph)
    answer = describe(graph) | {"svg": drawn[drawn.index("<svg") :]}
    for number, (stage, shown) in enumerate(zip(graph.stages, answer["stages"], strict=True)):
        shown |= {"where": f"thumbnails.py:{12 + number}", "workers": stage.workers}
    return answer


class Figures:
    """Snapshots of a made-up run.

    One stage limits the run: earlier stages wait for room in their outputs, and later ones for input.
    """

    def __init__(self, graph: Mapping[str, Any], seed: int = 1) -> None:
        self.graph = graph
        self._random = random.Random(seed)
        stages = graph["stages"]
        self.slowest = (len(stages) * 2 // 5) or 1
        self._workers = [stage["workers"] for stage in stages]
        self._load = [self._random.uniform(0.1, 0.7) for _ in stages]

    def history(self, seconds: int) -> dict[str, Any]:
        shots = [self.snapshot(second) for second in range(seconds)]
        return {
            "elapsed": [shot["elapsed"] for shot in shots],
            "end_rate": [shot["end_rate"] for shot in shots],
            "stages": {
                stage["id"]: {key: [shot["stages"][at][key] for shot in shots] for key in ("rate", "busy")}
                for at, stage in enumerate(self.graph["stages"])
            },
        }

    def snapshot(self, elapsed: float, state: str = "running") -> dict[str, Any]:
        """Return the snapshot at this number of seconds after the start."""
        rate = 240 + 30 * math.sin(elapsed / 7) + self._random.uniform(-9, 9)
        stages = [self._stage(at, rate, elapsed, state) for at in range(len(self.graph["stages"]))]
        slow = self.graph["stages"][self.slowest]
        done, total = int(240 * elapsed), 10_000 + 240 * int(elapsed)
        return {
            "elapsed": elapsed,
            "state": state,
            "window": 5.0,
            "cause": {
                "kind": "bottleneck",
                "stage": slow["id"],
                "why": "its workers are busy 97 % of the time",
            },
            "advice": f"one more worker for {slow['name']} gives 1.3 ×" if state == "running" else None,
            "end_rate": rate,
            "progress": {"done": done, "total": total, "eta": (total - done) / 240},
            "stages": stages,
            "edges": self._edges(rate),
            "wait_for": self._wait_for(),
            "latency": self._latency(),
            "failures": self._failures(elapsed, state),
            "decisions": [{"elapsed": 12.0, "stage": slow["id"], "text": DECISION}],
        }

    def _failures(self, elapsed: float, state: str) -> list[dict[str, Any]]:
        slow = f"s{self.slowest}"
        failures = [
            {"elapsed": 3.0 + at, "stage": slow, "text": f"ValueError: item {at} is truncated"}
            for at in range(min(3, int(elapsed / 20)))
        ]
        if state == "failed":
            failures.append({"elapsed": elapsed, "stage": slow, "text": TRACEBACK})
        return failures

    def _stage(self, at: int, rate: float, elapsed: float, state: str) -> dict[str, Any]:
        busy = 0.97 if at == self.slowest else min(0.8, self._load[at] + self._random.uniform(-0.05, 0.05))
        place = (1 - busy) * 0.9 if at < self.slowest else 0.02 * (1 - busy)
        turn = (1 - busy - place) * 0.3 if at % 7 == 4 else 0.0
        over = state in ("done", "failed")
        shares = {"busy": busy, "place": place, "turn": turn, "input": 1 - busy - place - turn}
        chosen = self._random.choices(list(shares), list(shares.values()), k=self._workers[at])
        failed = int(elapsed / 20) if at == self.slowest else 0
        return {
            "id": f"s{at}",
            "state": "ended" if over else "running",
            "rate": rate * self._random.uniform(0.97, 1.03),
            **shares,
            "items_in": int(240 * elapsed),
            "items_out": int(240 * elapsed) - 3,
            "failed": failed,
            "retried": 2 * failed,
            "restarts": 0,
            "cores": busy * self._workers[at] * 0.8,
            "workers": [] if over else [{"number": n, "state": one} for n, one in enumerate(chosen, 1)],
        }

    def _edges(self, rate: float) -> list[dict[str, Any]]:
        edges = []
        for edge in self.graph["edges"]:
            full = int(edge["writer"][1:]) < self.slowest
            inside = self._random.randint(58, 64) if full else self._random.randint(0, 9)
            edges.append(
                {
                    "id": edge["id"],
                    "inside": inside,
                    "capacity": 64,
                    "rate": rate,
                    "waiting_readers": 0 if full else 1,
                    "waiting_writers": 1 if full else 0,
                }
            )
        return edges

    def _wait_for(self) -> list[dict[str, Any]]:
        waits = []
        for edge in self.graph["edges"]:
            writer, reader = edge["writer"], edge["reader"]
            if reader is not None:
                before = int(writer[1:]) < self.slowest
                ends = (writer, reader) if before else (reader, writer)
                seconds = self._random.uniform(0, 2)
                waits.append({"from": ends[0], "to": ends[1], "edge": edge["id"], "seconds": seconds})
        return waits

    def _latency(self) -> list[dict[str, Any]]:
        path = [stage["id"] for stage in self.graph["stages"]]
        return [{"path": path, "count": 1234, "p50": 0.042, "p99": 1.31}]


class Events:
    """Streams server-sent events to one viewer. ``None`` in the queue closes the connection."""

    kind = "text/event-stream"

    def __init__(self, first: list[tuple[str, Any]], leave: Callable[[Events], None]) -> None:
        self.queue: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._first = first
        self._leave = leave

    def __iter__(self) -> Iterator[bytes]:
        yield b"retry: 200\n\n"
        for name, data in self._first:
            yield _event(name, data)
        while (item := self.queue.get()) is not None:
            yield _event(*item)

    def close(self) -> None:
        self._leave(self)


def _event(name: str, data: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()


class FixturePage:
    """Serves the page of one graph. The test decides when it sends a snapshot."""

    def __init__(self, graph: Mapping[str, Any], seconds: int = 60) -> None:
        self.graph = graph
        self.figures = Figures(graph)
        self.history = self.figures.history(seconds)
        self.snapshot = self.figures.snapshot(float(seconds))
        self.answers: dict[str, Any] = {}
        self.refuse = False  # if True, new viewers receive an error
        self.refused = threading.Event()
        self._viewers: set[Events] = set()
        routes: dict[str, Any] = {f"static/{path.name}": self._file(path) for path in STATIC.iterdir()}
        routes |= {
            "": self._file(STATIC / "page.html"),
            "graph": lambda _: json_reply(self.graph),
            "snapshots": self._events,
            "stacks": lambda query: self._optional("stacks", query),
            "what_if": lambda query: self._optional("what_if", query),
            "report.html": lambda _: HttpReply(self.report().encode(), "text/html"),
        }
        self._server = LocalServer("fixture", routes)
        self.address = self._server.address

    def __enter__(self) -> FixturePage:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()
        self._server.close()

    def close(self) -> None:
        """Close the server and its connections, as if its process had died."""
        self.drop()
        self._server.close()

    def send(self, snapshot: Mapping[str, Any]) -> None:
        """Send a snapshot to all current viewers, and keep it for later viewers."""
        self.snapshot = dict(snapshot)
        self._publish("snapshot", snapshot)

    def end(self) -> None:
        self._publish("end", {})
        self.drop()

    def drop(self) -> None:
        """Close the connections of all viewers."""
        for viewer in list(self._viewers):
            viewer.queue.put(None)

    def report(self) -> str:
        """Return the page as a single HTML file that includes its scripts, styles and figures."""
        return saved_page({"graph": self.graph, "history": self.history, "snapshot": self.snapshot})[0]

    def _publish(self, name: str, data: Any) -> None:
        for viewer in list(self._viewers):
            viewer.queue.put((name, data))

    def _events(self, _: Mapping[str, str]) -> Events | HttpReply:
        if self.refuse:
            self.refused.set()
            return error_reply("busy", 503)
        viewer = Events([("history", self.history), ("snapshot", self.snapshot)], self._viewers.discard)
        self._viewers.add(viewer)
        return viewer

    def _optional(self, name: str, query: Mapping[str, str]) -> HttpReply:
        if name not in self.answers:
            return error_reply(f"this run has no {name}")
        answer = self.answers[name]
        return json_reply(answer(query) if callable(answer) else answer)

    @staticmethod
    def _file(path: Path) -> Callable[[Mapping[str, str]], HttpReply]:
        return lambda _: HttpReply(path.read_bytes(), KINDS.get(path.suffix, "text/plain"))
