"""Measure the CPU time per second that the live page of a run costs, with 0, 1 and 10 viewers."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from benchmarks.harness import Case, Effort, Report, Result, Row, in_words
from flowchan import Graph

ISOLATES = (
    "Graphs with 3 and 35 stages on threads pass 200 ints per second. The figure is the CPU time that the "
    "supervisor and the threads that serve the page use per second. The supervisor's CPU time without a page "
    "is subtracted. The workers' time is not counted, because it varies more between two identical runs than "
    "the page costs. The viewers run in another process, whose CPU time is not counted."
)
STAGES = (3, 35)
RATE = 200.0
MOST = 0.01
"""Maximum CPU time of a page, in seconds per second."""
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
    for stages in STAGES:
        cases = [
            _case(name, stages, viewers, 6 * effort.seconds)
            for name, viewers in (("no page", None), ("no viewer", 0), ("1 viewer", 1), ("10 viewers", 10))
        ]
        off, *pages = report.interleave(f"CPU time per second, {stages} stages", cases, effort.rounds)
        report.rows += [_row(stages, page, off) for page in pages]
    return report


def _row(stages: int, page: Result, off: Result) -> Row:
    more = page.figure() - off.figure()
    work = f"CPU time per second, {stages} stages: {page.name}"
    text = f"{more * 1e3:+.1f} ms"
    return Row(work, f"≤ {MOST * 1e3:g} ms more", text, in_words(off.figure(), "s"), "", more <= MOST)


def _case(name: str, stages: int, viewers: int | None, seconds: float) -> Case:
    def work() -> tuple[Sequence[float], int]:
        return [_run(stages, viewers, seconds)], int(RATE * seconds)

    return Case(name, "s", work)


def _run(stages: int, viewers: int | None, seconds: float) -> float:
    """Return how many seconds of CPU time a run uses per second, without its workers.

    ``viewers`` is None for a run without a page.
    """
    graph = Graph("page")
    stream = graph.source(itertools.count()).map(abs, name="paced", rate=RATE)
    for number in range(stages - 3):
        stream = stream.map(abs, name=f"map {number}")
    stream.sink(abs)
    run = graph.start(page=viewers is not None)
    run.ready()
    looking = None
    if viewers:
        command = [sys.executable, "-c", VIEWERS, str(run.page), str(viewers)]
        looking = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert looking.stdout is not None
        looking.stdout.readline()
    before = _beside_workers()
    time.sleep(seconds)
    spent = _beside_workers() - before
    run.stop()
    run.wait()
    if looking is not None:
        looking.communicate()
    return spent / seconds


def _beside_workers() -> float:
    """Return the CPU seconds of all threads except the workers. Names of worker threads contain a slash."""
    return sum(
        time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.ident is not None and "/" not in thread.name
    )
