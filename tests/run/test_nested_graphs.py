"""Test graphs that run inside a worker process of another graph (R6, R7).

Such a graph works like any other. If it fails, the item of the outer graph fails. When the
worker ends, the inner graph also ends.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import psutil
import pytest
from runs import run_python, script, start
from support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("forked_programs")

METHODS = pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])

PROGRAM = """
    import multiprocessing, os, sys
    from flowchan import Graph, RunError

    def square(number):
        return number * number

    def sum_of_squares(upto):
        inner = Graph("inner")
        total = inner.source(range(upto)).map(square, on="process", workers=2).reduce(int.__add__, 0)
        return inner.run()[total]

    def fail(number):
        inner = Graph("inner")
        inner.source([number]).map(lambda number: 1 // number, on="process").sink(print)
        inner.run()

    if __name__ == "__main__":
        multiprocessing.set_start_method(sys.argv[1])
        outer = Graph("outer")
        sums = outer.source([3, 10, 50]).map(sum_of_squares, on="process", workers=2).collect()
        print(outer.run()[sums])
        outer = Graph("failing")
        stream = outer.source([1, 0]).map(fail, on="process")
        stream.sink(str)
        failed = stream.errors.collect()
        (only,) = outer.run()[failed]
        (inner,) = only.error.exceptions
        print(only.item, inner.stage, type(inner.__cause__).__name__)
"""


@METHODS
def test_worker_process_runs_its_own_graphs(method: str, tmp_path: Path) -> None:
    out = run_python(script(tmp_path, PROGRAM), method)
    assert out.splitlines()[0] == "[5, 285, 40425]"
    assert re.fullmatch(r"0 \S+ ZeroDivisionError", out.splitlines()[-1])


HOLDING = """
    import multiprocessing, os, sys
    from flowchan import Graph

    def hold(number):
        print("inner", os.getpid(), flush=True)
        os.read(os.pipe()[0], 1)

    def run_inner(number):
        print("outer", os.getpid(), flush=True)
        inner = Graph("inner")
        inner.source([1]).sink(hold, on="process")
        inner.run()

    if __name__ == "__main__":
        multiprocessing.set_start_method(sys.argv[1])
        outer = Graph("outer")
        outer.source([1]).map(run_inner, on="process", restarts=0).sink(str)
        outer.run()
"""


@METHODS
@pytest.mark.parametrize("victim", ["outer", "program"])
def test_graph_inside_a_killed_worker_ends_with_the_worker(method: str, victim: str, tmp_path: Path) -> None:
    with start(script(tmp_path, HOLDING), method) as process:
        assert process.stdout is not None
        pids = dict(process.stdout.readline().split() for _ in range(2))
        os.kill(int(pids.get(victim, process.pid)), signal.SIGKILL)
        _, err = process.communicate()
    assert process.returncode == (1 if victim == "outer" else -signal.SIGKILL)
    assert ("was killed by SIGKILL" in err) == (victim == "outer")
    wait_until(lambda: not any(alive(int(pid)) for pid in pids.values()))


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
