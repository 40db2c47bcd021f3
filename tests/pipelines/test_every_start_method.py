"""Test that the patterns work in the same way under fork, forkserver and spawn.

They use functions and classes defined in the program itself.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import multiprocessing
import sys
from flowchan.pipelines import BackgroundTask, Barrier, Lock, SharedDict, TaskPool, map, marshal, workqueue

class Point:
    def __init__(self, x):
        self.x = x

def work(lock, barrier, shared, queue, table, worker):
    barrier.wait()
    with lock, lock:
        shared[worker] = table.read().x
    for point in queue:
        assert isinstance(point, Point)
        queue.put(Point(2 * point.x))
    return Point(worker)

def main():
    factor = 3
    for _ in range(2):
        lock, barrier, shared = Lock(), Barrier(3), SharedDict()
        queue = workqueue("points", across="processes")
        workers = map(3, work, lock, barrier, shared, queue, marshal(Point(7)), on="process")
        queue.put_many(Point(x) for x in range(5))
        queue.close()
        assert sorted(point.x for point in queue) == [0, 2, 4, 6, 8]
        assert [type(point) is Point and point.x for point in workers.join()] == [1, 2, 3]
        assert dict(shared) == {1: 7, 2: 7, 3: 7}
    with TaskPool(2, on="process") as pool:
        points = pool.map(lambda point: Point(factor * point.x), [Point(1), Point(2)])
        assert [point.x for point in points] == [3, 6]
    task = BackgroundTask(Point, 5, on="process")
    assert task.result().x == 5
    task.close()
    print("fine")

if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    main()
"""


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_all_patterns_work_under_each_start_method(method: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run([sys.executable, program, method], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")
