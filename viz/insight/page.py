"""Serve the live page of a run, which shows the run in a browser.

Algorithm. Each open page is a viewer with its own connection. All viewers share one sampler, which subscribes
to the run's feed while at least one page is open. The sampler encodes each snapshot once, and each connection
sends the latest snapshot. A slow browser therefore misses snapshots but does not delay other viewers. The
history does not need an open page, because it uses snapshots that the supervisor takes anyway. When the run
has ended, every connection sends the final snapshot, and the server closes.

Invariants. ``_joining`` is held while a viewer joins or leaves, and therefore while the feed's thread starts
or exits. The feed's thread takes only ``_changed``. The two locks therefore cannot deadlock. The page refers
to the supervisor only weakly, so that a run is freed without a garbage collection.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from http import HTTPStatus
from pathlib import Path
from time import monotonic
from typing import Any

from flowchan.declare.blueprint import Blueprint
from flowchan.run.observe.feed import Subscription
from flowchan.run.observe.latency import PathLatencies
from flowchan.run.policy.events import ItemTraced
from flowchan.run.policy.stats import RunStats
from flowchan.run.supervisor import Supervisor
from flowchan.viz import svg
from flowchan.viz.insight.metrics_port import metrics_route
from flowchan.viz.insight.page_actions import Action, actions_of
from flowchan.viz.insight.saved_page import STATIC, saved_page
from flowchan.viz.insight.server import HttpReply, LocalServer, Streaming, error_reply, json_reply
from flowchan.viz.insight.snapshot import Json, RateHistory, describe, ids_of, snapshot
from flowchan.viz.live.model import Progress
from flowchan.viz.render import RenderError

SNAPSHOT_EVERY_S = 1.0
"""Seconds between snapshots."""
MOST_VIEWERS = 32
"""Maximum number of pages that are open at the same time."""

_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}


class RunPage:
    """Page of one run, served until the run has ended.

    Args:
        graph: Graph of the run.
        supervisor: Supervisor of the run.
        static: Folder with the page's files.

    Raises:
        OSError: The server could not be started.
    """

    def __init__(
        self,
        graph: Blueprint,
        supervisor: Supervisor,
        static: Path = STATIC,
    ) -> None:
        self._graph, self._ids, self._static = graph, ids_of(graph), static
        self._supervisor = weakref.ref(supervisor)
        self._history, self._latencies = RateHistory(), PathLatencies()
        self._progress = Progress(graph)
        self._joining = threading.Lock()
        self._viewers = 0
        self._subscription: Subscription | None = None
        self._previous: RunStats | None = None  # statistics of the latest snapshot
        self._describing = threading.Lock()
        # A signal handler that raises in Condition.__enter__() would leave the lock locked.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._latest = (0, b"")  # number and text of the latest snapshot; number 0 means none yet
        self._final: Json | None = None
        self._over = False
        self._drawing = threading.Lock()
        self._described: Json | None = None
        self._server = LocalServer(
            f"flowchan {graph.name} page",
            {
                "": partial(self._file, "page.html"),
                **{f"static/{path.name}": partial(self._file, path.name) for path in static.iterdir()},
                "graph": lambda _: json_reply(self._description()),
                "snapshots": self._join,
                "report.html": self._report,
                "metrics": metrics_route(self._stats),
                **{path: partial(_act, action) for path, action in actions_of(supervisor, self._ids).items()},
            },
        )
        supervisor.history.watch(self._history.add)
        supervisor.feed.listen(self._follow)
        supervisor.feed.at_end(self._end)

    @property
    def address(self) -> str:
        """Return the URL of the page."""
        return self._server.address

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page with the current or final state of the run to an HTML file."""
        Path(path).write_text(self._saved()[0], encoding="utf-8")

    # --- called by the run ---

    def _end(self) -> None:
        try:
            stats = self._run.stats()
            self._run.history.watch(None)
            self._history.add(stats, last=True)
            self._final = self._snapshot(stats, None)
            self._publish(self._final)
        finally:
            with self._lock:
                self._over = True
                self._changed.notify_all()
            self._server.close()

    @property
    def _run(self) -> Supervisor:
        supervisor = self._supervisor()
        # The caller is the supervisor or the run's handle, so the supervisor still exists.
        assert supervisor is not None
        return supervisor

    def _follow(self, event: Any) -> None:
        if isinstance(event, ItemTraced):
            self._latencies.add(event)

    def _stats(self) -> RunStats:
        return self._run.stats()

    # --- the sampler ---

    def _sample(self, stats: RunStats) -> None:
        """Publish a snapshot on the feed's thread. :meth:`_end` publishes the final snapshot."""
        if self._run.ended.is_set():
            return
        previous = self._previous or self._run.history.before(stats, 0.0)
        self._previous = stats
        self._history.add(stats)
        self._publish(self._snapshot(stats, previous))

    def _snapshot(self, stats: RunStats, before: RunStats | None) -> Json:
        latencies = self._latencies.paths(monotonic())
        problems = self._run.feed.problems.latest()
        with self._describing:
            return snapshot(self._progress, self._ids, stats, before, problems, latencies)

    def _publish(self, state: Json) -> None:
        text = _event("snapshot", state)
        with self._lock:
            self._latest = self._latest[0] + 1, text
            self._changed.notify_all()

    # --- the viewers' connections, each on its own thread ---

    def _join(self, _: Mapping[str, str]) -> HttpReply | Streaming:
        with self._joining:
            if self._viewers >= MOST_VIEWERS:
                text = f"the page is already open {MOST_VIEWERS} times; close it in one of the browser tabs"
                return error_reply(text, HTTPStatus.SERVICE_UNAVAILABLE)
            if not self._viewers:
                self._previous = None
                self._subscription = self._run.feed.subscribe(stats=self._sample, every=SNAPSHOT_EVERY_S)
            self._viewers += 1
        return _Viewer(self)

    def leave(self) -> None:
        """Decrease the count of viewers. When the last viewer leaves, stop the sampler."""
        with self._joining:
            self._viewers -= 1
            if not self._viewers and self._subscription is not None:
                self._subscription.close()
                self._subscription = None
                with self._lock:
                    if not self._over:  # keep the final snapshot, which a connection may still send
                        self._latest = (0, b"")

    def events(self) -> Iterator[bytes]:
        """Yield the events for one viewer: first the history, then snapshots until the run has ended."""
        yield _event("history", self._history.series(self._ids))
        sent, over = 0, False
        while not over:
            with self._lock:
                while self._latest[0] == sent and not self._over:
                    self._changed.wait()
                (number, text), over = self._latest, self._over
            if number != sent:
                yield text
            sent = number
        yield _event("end", {})

    # --- other paths ---

    def _file(self, name: str, _: Mapping[str, str]) -> HttpReply:
        path = self._static / name
        return HttpReply(path.read_bytes(), _KINDS.get(path.suffix, "text/plain"))

    def _description(self) -> Json:
        with self._drawing:
            if self._described is None:
                picture = None
                try:
                    drawn = svg(self._graph)
                    picture = drawn[drawn.index("<svg") :]
                except RenderError:
                    pass  # without a picture, the page shows only the table
                self._described = {**describe(self._graph), "svg": picture}
            return self._described

    def _saved(self) -> tuple[str, str]:
        state = self._final
        if state is None:
            whole = self._run.stats()
            state = self._snapshot(whole, None)
        data = {
            "graph": self._description(),
            "history": self._history.series(self._ids),
            "snapshot": state,
        }
        return saved_page(data, self._static)

    def _report(self, _: Mapping[str, str]) -> HttpReply:
        page, policy = self._saved()
        return HttpReply(page.encode(), "text/html", headers={"Content-Security-Policy": policy})


class _Viewer:
    """Stream of server-sent events for one open page."""

    kind = "text/event-stream"

    def __init__(self, page: RunPage) -> None:
        self._page = page

    def __iter__(self) -> Iterator[bytes]:
        return self._page.events()

    def close(self) -> None:
        self._page.leave()


def _act(action: Action, query: Mapping[str, str]) -> HttpReply:
    try:
        return json_reply(action(query))
    except (LookupError, RuntimeError, ValueError) as error:
        return error_reply(str(error.args[0] if error.args else error), HTTPStatus.BAD_REQUEST)


def _event(name: str, value: Json) -> bytes:
    """Return a server-sent event. The JSON text has no line breaks."""
    return f"event: {name}\ndata: {json.dumps(value, separators=(',', ':'))}\n\n".encode()
