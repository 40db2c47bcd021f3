"""Run a graph with failures, retries, dying workers and a host, until standard input is closed.

The first line of output is the URL of the metrics.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator

from flowchan import Graph, hosts


def numbers() -> Iterator[int]:
    for number in itertools.count():
        time.sleep(0.002)
        yield number


def parse(number: int) -> int:
    if number % 50 == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if number % 7 == 0:
        raise ValueError("a multiple of seven")
    return number


if __name__ == "__main__":
    graph = Graph("watched")
    parsed = graph.source(numbers).map(
        parse, on="process", workers=2, retries=1, restarts=10**6, max_deaths=1
    )
    parsed.errors.sink(str, name="failed")
    parsed.map(abs, on=hosts.local(1), name="there").sink(hash, name="end")
    with graph.start(metrics=0) as run:
        print(run.metrics, flush=True)
        sys.stdin.read()
        run.abort()
