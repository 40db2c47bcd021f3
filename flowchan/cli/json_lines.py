"""Write the events of a run to standard output as JSON lines, for ``flowchan run --json``.

Each line is a JSON object. The value of "event" is "start", "stats" (once a second), "failure" or, in the
last line, "end". The value of "time" is in seconds since 1970. The program's own output goes to standard
error.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from flowchan.errors import RunError, StageError
from flowchan.items.text import short
from flowchan.run.observe.feed import Subscription
from flowchan.run.observe.stats_json import SCHEMA, to_json
from flowchan.run.policy.events import Death, ErrorSent, WorkerId
from flowchan.run.policy.stats import RunStats
from flowchan.run.run import Run

STATS_EVERY_S = 1.0
"""Seconds between "stats" events."""
LONGEST_TEXT = 200
"""Maximum length of the text that replaces a value without a JSON form."""


class JsonLines:
    """Writes the events of one run to standard output.

    The feed's thread only queues events. The main thread must call :meth:`write`, because an error on
    standard output has to end the run. While the writer is open, the program's own standard output goes to
    standard error.
    """

    def __init__(self) -> None:
        self._queued: deque[dict[str, Any]] = deque()

    def __enter__(self) -> JsonLines:
        sys.stdout.flush()
        self._kept = os.dup(1)
        os.dup2(2, 1)
        self._stream = open(os.dup(self._kept), "w", encoding="utf-8")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            sys.stdout.flush()
            os.dup2(self._kept, 1)
            os.close(self._kept)
        finally:
            self._stream.close()

    def follow(self, run: Run) -> Subscription:
        """Queue the "start" event, and subscribe to the other events of the run."""
        stats = run.stats()
        about = {"graph": stats.graph, "pid": os.getpid(), "seed": stats.seed}
        self._queue("start", schema=SCHEMA, **about, page=run.page, metrics=run.metrics)
        return run.subscribe(stats=self.show, events=self._report, every=STATS_EVERY_S)

    def show(self, stats: RunStats) -> None:
        """Queue a "stats" event."""
        self._queue("stats", stats=to_json(stats))

    def _report(self, event: Any) -> None:
        """Queue a "failure" event for a failed item or a dead worker."""
        match event:
            case ErrorSent(worker, text):
                self._fail("item", worker, text)
            case Death(worker) if event.summary:
                self._fail("death", worker, event.summary)

    def _fail(self, kind: str, worker: WorkerId, text: str) -> None:
        self._queue("failure", kind=kind, stage=worker.stage, worker=worker.number, text=text)

    def end(self, stats: RunStats, results: Mapping[Any, Any], failure: RunError | None) -> None:
        """Write a "failure" event for each failed stage, and then the "end" event.

        Raises:
            OSError: Writing to standard output failed.
        """
        for error in failure.exceptions if failure is not None else ():
            self._queue("failure", kind="stage", stage=error.stage, item=error.item, **_described(error))
        found = {stream.name: plain(value) for stream, value in results.items()}
        self._queue("end", state=stats.state, results=found, stats=to_json(stats))
        self.write()

    def _queue(self, event: str, **about: Any) -> None:
        self._queued.append({"event": event, "time": time.time(), **about})

    def write(self) -> None:
        """Write the queued events.

        Raises:
            OSError: Writing to standard output failed.
        """
        while self._queued:
            self._stream.write(json.dumps(self._queued.popleft()) + "\n")
        self._stream.flush()

    def print_line(self, line: str) -> None:
        """Print a message for humans to standard error."""
        print(line, file=sys.stderr, flush=True)


def _described(error: StageError) -> dict[str, Any]:
    cause = error.__cause__
    shown = "" if cause is None else "".join(traceback.format_exception(cause))
    return {"text": str(error), "traceback": shown}


def plain(value: Any) -> Any:
    """Convert a result to a JSON value.

    A value without a JSON form becomes a string of at most ``LONGEST_TEXT`` characters.
    """
    try:
        return _plain(value)
    except RecursionError:
        return short(value, LONGEST_TEXT)


def _plain(value: Any) -> Any:
    if value is None or type(value) in (bool, str) or (type(value) is int and abs(value) < 2**63):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else repr(value)
    if type(value) in (list, tuple):
        return [_plain(one) for one in value]
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return {key: _plain(one) for key, one in value.items()}
    return short(value, LONGEST_TEXT)
