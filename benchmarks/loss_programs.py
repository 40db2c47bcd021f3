"""Do the same work with each system, in the way its documentation recommends, for :mod:`benchmarks.losses`.

``python -m benchmarks.loss_programs SYSTEM ITEMS`` sends the numbers below ITEMS to three workers, and
prints one line for each result: the number, and the pid of the worker.
"""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing as mp
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORKERS = 3
WORK_S = 1e-3
CAPACITY = 100_000
"""Capacity of queues whose size the user chooses.

It is enough for all items, so that no system drops items by design.
"""

Result = tuple[int, int]


def work(number: int) -> Result:
    """Spend 1 ms on a number."""
    until = time.perf_counter() + WORK_S
    while time.perf_counter() < until:
        pass
    return number, os.getpid()


def show(result: Result) -> None:
    """Print a result at once."""
    os.write(1, b"%d %d\n" % result)


def run_flowchan(items: int) -> None:
    from flowchan import Graph

    graph = Graph("losses")
    results = graph.source(range(items)).map(work, workers=WORKERS, on="process")
    results.sink(show)
    graph.run()


def run_queues(items: int) -> None:
    """Use the pattern from multiprocessing's documentation: workers read one queue and write another."""
    tasks: Any = mp.Queue()
    results: Any = mp.Queue()
    workers = [mp.Process(target=_queue_worker, args=(tasks, results)) for _ in range(WORKERS)]
    for worker in workers:
        worker.start()
    for number in range(items):
        tasks.put(number)
    for _ in range(items):
        show(results.get())
    for _ in workers:
        tasks.put(None)
    for worker in workers:
        worker.join()


def _queue_worker(tasks: Any, results: Any) -> None:
    for number in iter(tasks.get, None):
        results.put(work(number))


def run_pool(items: int) -> None:
    with mp.Pool(WORKERS) as pool:
        for result in pool.imap_unordered(work, range(items)):
            show(result)


def run_futures(items: int) -> None:
    with concurrent.futures.ProcessPoolExecutor(WORKERS) as executor:
        for result in executor.map(work, range(items)):
            show(result)


def run_ray_tasks(items: int) -> None:
    import ray

    ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)
    task = ray.remote(work)
    waiting = [task.remote(number) for number in range(items)]
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=min(50, len(waiting)))
        for result in ray.get(ready):
            show(result)


def run_ray_actors(items: int) -> None:
    import ray
    from ray.util import ActorPool

    ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)
    actors = ActorPool([ray.remote(_Actor).remote() for _ in range(WORKERS)])
    for result in actors.map_unordered(lambda actor, number: actor.work.remote(number), range(items)):
        show(result)


class _Actor:
    def work(self, number: int) -> Result:
        return work(number)


def run_pyzmq(items: int) -> None:
    """Use the pipeline from the ZeroMQ guide: a ventilator pushes to workers, and they push to a sink."""
    import zmq

    context = zmq.Context()
    tasks, results = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    for one in (tasks, results):
        one.set_hwm(CAPACITY)
    ports = [one.bind_to_random_port("tcp://127.0.0.1") for one in (tasks, results)]
    workers = [mp.Process(target=_zmq_worker, args=ports, daemon=True) for _ in range(WORKERS)]
    for worker in workers:
        worker.start()
    for number in range(items):
        tasks.send_pyobj(number)
    for _ in range(items):
        show(results.recv_pyobj())


def _zmq_worker(tasks_port: int, results_port: int) -> None:
    import zmq

    context = zmq.Context()
    tasks, results = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for one, port in ((tasks, tasks_port), (results, results_port)):
        one.set_hwm(CAPACITY)
        one.connect(f"tcp://127.0.0.1:{port}")
    while True:
        results.send_pyobj(work(tasks.recv_pyobj()))


def run_dora(items: int) -> None:
    """Run a dataflow of a source, three workers and a sink."""

    def node(name: str, inputs: dict[str, str], outputs: list[str]) -> dict[str, Any]:
        sized = {
            key: {"source": source, "queue_size": CAPACITY, "queue_policy": "backpressure"}
            for key, source in inputs.items()
        }
        command = f"-m benchmarks.loss_programs dora-{name.rstrip('0123456789')} {items}"
        return {
            "id": name,
            "path": sys.executable,
            "args": command,
            "inputs": sized,
            "outputs": outputs,
            "restart_policy": "on-failure",
        }

    numbers = range(WORKERS)
    nodes = [
        node("source", {}, [f"to{one}" for one in numbers]),
        *[node(f"worker{one}", {"item": f"source/to{one}"}, ["done"]) for one in numbers],
        node("sink", {f"from{one}": f"worker{one}/done" for one in numbers}, []),
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "dataflow.yml"
        file.write_text(json.dumps({"nodes": nodes}))  # dora reads YAML, of which JSON is a subset
        environment = {**os.environ, "LOSSES_STDOUT": f"/proc/{os.getpid()}/fd/1"}
        sys.exit(
            subprocess.run(["dora", "run", str(file)], stdout=subprocess.DEVNULL, env=environment).returncode
        )


def dora_source(items: int) -> None:
    import pyarrow
    from dora import Node

    node = Node()
    for number in range(items):
        node.send_output(f"to{number % WORKERS}", pyarrow.array([number]))


def dora_worker(items: int) -> None:
    import pyarrow
    from dora import Node

    node = Node()
    for event in node:
        if event["type"] == "INPUT":
            node.send_output("done", pyarrow.array(work(event["value"][0].as_py())))


def dora_sink(items: int) -> None:
    from dora import Node

    with open(os.environ["LOSSES_STDOUT"], "a") as out:
        for event in Node():
            if event["type"] == "INPUT":
                print(*event["value"].to_pylist(), file=out, flush=True)


PROGRAMS: dict[str, Callable[[int], None]] = {
    "flowchan": run_flowchan,
    "multiprocessing.Queue": run_queues,
    "multiprocessing.Pool": run_pool,
    "concurrent.futures": run_futures,
    "ray-tasks": run_ray_tasks,
    "ray-actors": run_ray_actors,
    "pyzmq": run_pyzmq,
    "dora": run_dora,
    "dora-source": dora_source,
    "dora-worker": dora_worker,
    "dora-sink": dora_sink,
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](int(sys.argv[2]))
