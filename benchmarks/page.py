"""Measure the CPU time per item that the live page of a run costs with 0, 1 and 10 viewers."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Literal

from benchmarks.harness import Case, Effort, Report, at_most, calibrate, cpu_seconds
from flowchan import Graph

ISOLATES = (
    "A source, a map and a sink pass ints. The figure is the CPU time per item that the program and its "
    "workers use, from the first item to the end of the run. The viewers run in another process, whose "
    "CPU time is not counted."
)
LENGTH = 8
"""Factor by which a run is longer than in other benchmarks; a page takes only one snapshot a second."""
MOST = 1.01
"""Maximum CPU time with a page, relative to a run without one."""
VIEWERS = """
import selectors, socket, sys, urllib.parse
url = urllib.parse.urlsplit(sys.argv[1])
viewers = selectors.DefaultSelector()
for _ in range(int(sys.argv[2])):
    viewer = socket.create_connection((url.hostname, url.port))
    viewer.sendall(f"GET {url.path}snapshots HTTP/1.1\\r\\nHost: {url.netloc}\\r\\n\\r\\n".encode())
    viewer.recv(1)
    viewers.register(viewer, selectors.EVENT_READ)
print("all viewers are connected", flush=True)
while viewers.get_map():
    for key, _ in viewers.select():
        if not key.fileobj.recv(1 << 20):
            viewers.unregister(key.fileobj)
"""


def measure(effort: Effort) -> Report:
    report = Report()
    on: Literal["thread", "process"]
    for on in ("thread", "process"):
        count = calibrate(lambda count, on=on: _run(on, None, count), effort.seconds * LENGTH)  # type: ignore[misc]
        cases = [
            _case(name, on, viewers, count)
            for name, viewers in (("no page", None), ("no viewer", 0), ("1 viewer", 1), ("10 viewers", 10))
        ]
        off, *pages = report.interleave(f"CPU per item, map on={on!r}", cases, effort.rounds)
        for page in pages:
            row = at_most(MOST, page, off)
            report.rows.append(dataclasses.replace(row, work=f"{row.work}: {page.name}"))
    return report


def _case(name: str, on: Literal["thread", "process"], viewers: int | None, count: int) -> Case:
    def work() -> tuple[Sequence[float], int]:
        return [_run(on, viewers, count) / count], count

    return Case(name, "s", work)


def _run(on: Literal["thread", "process"], viewers: int | None, count: int) -> float:
    """Return the CPU seconds of a run. ``viewers`` is None for a run without a page."""
    begin = threading.Event()
    graph = Graph("page")
    graph.source(functools.partial(_numbers, begin, count)).map(abs, on=on).sink(abs)
    with graph.start(page=viewers is not None) as run:
        run.ready()
        looking = None
        if viewers:
            command = [sys.executable, "-c", VIEWERS, str(run.page), str(viewers)]
            looking = subprocess.Popen(command, stdout=subprocess.PIPE)
            assert looking.stdout is not None
            looking.stdout.readline()
        before = cpu_seconds()
        begin.set()
    spent = cpu_seconds() - before
    if looking is not None:
        looking.communicate()
    return spent


def _numbers(begin: threading.Event, count: int) -> Iterator[int]:
    begin.wait()
    yield from range(count)
