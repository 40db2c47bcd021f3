"""Count words across hosts with limited bandwidth, and compare with Ray Data. Needs root, ``ip`` and ``tc``.

Run it with ``python -m benchmarks.keyed_exchange [HOSTS [PYTHON]]``. ``HOSTS`` is the number of simulated
hosts, 8 by default. ``PYTHON`` is an interpreter that has Ray Data; without it, only flowchan is measured.

Mappers count the words of one batch, and split the counts into one part per partition. Each part is an item,
whose key is the partition. The worker that is responsible for the key merges the parts.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from flowchan import RunStats

RATES, WORDS, BATCH, BATCHES_PER_HOST = (20, 200), 500_000, 400_000, 4
"""Bandwidth limits in Mbit/s, different words, words in each batch, and number of batches per host."""
THROUGH_PROGRAM, DIRECT, RAY = "flowchan, through the program", "flowchan, direct", "Ray Data"

RAY_ENVIRONMENT = {**os.environ, "PYTHONPATH": os.getcwd(), "RAY_AUTH_MODE": "disabled"}

Part = tuple[int, Counter[str]]
totals: dict[int, Counter[str]] = {}
"""Merged counts of the partitions that this worker is responsible for."""


@functools.cache
def parts(partitions: int) -> list[Part]:
    """Count the words of a batch, and return the counts of each partition.

    Each worker counts its batch once, before the clock starts, because only the exchange is to be measured.
    """
    words = random.Random(partitions).choices(range(WORDS), k=BATCH)
    counts: list[Counter[str]] = [Counter() for _ in range(partitions)]
    for word, count in Counter(words).items():
        counts[word % partitions][f"word{word}"] = count
    return list(enumerate(counts))


def merge(part: Part) -> tuple[int, int]:
    """Merge a part. Return its partition, and the number of words counted there so far."""
    partition, counts = part
    total = totals.setdefault(partition, Counter())
    total.update(counts)
    return partition, total.total()


def main() -> None:
    """Print the time of each framework, and how many MB of parts it moved per second."""
    if sys.argv[1:2] in (["inside"], ["ray"]):
        from benchmarks import keyed_exchange  # other processes import its functions

        if sys.argv[1] == "ray":
            seconds = keyed_exchange.ray_seconds(int(sys.argv[2]))
        else:
            seconds = keyed_exchange.flowchan_seconds(sys.argv[2] == DIRECT, tuple(sys.argv[3:]))
        print(json.dumps(seconds))
        return
    if os.geteuid():
        sys.exit("network namespaces need root")
    from benchmarks.limited_hosts import limited_hosts

    count = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    size = sum(len(pickle.dumps(part, 5)) for part in parts(count)) / 1e6
    moved = size * count * BATCHES_PER_HOST
    print(f"{count} hosts, {moved:.0f} MB in parts of {size / count * 1000:.0f} KB")
    for rate in RATES:
        with limited_hosts(count, f"{rate}mbit") as (head, *hosts):
            for way in (THROUGH_PROGRAM, DIRECT, RAY)[: 2 + (len(sys.argv) > 2)]:
                seconds = measured(way, head, hosts)
                print(
                    f"{rate} Mbit/s per wire, {way}: {seconds:.1f} s, {moved * 8 / seconds:.0f} Mbit/s",
                    flush=True,
                )


def measured(way: str, head: str, hosts: list[str]) -> float:
    """Run a program in the first namespace, and return the seconds that it reports."""
    python = sys.argv[2] if way == RAY else sys.executable
    arguments = ("ray", str(len(hosts))) if way == RAY else ("inside", way, *hosts)
    with ray_cluster(python, head, hosts) if way == RAY else contextlib.nullcontext():
        command = ("ip", "netns", "exec", head, python, "-m", "benchmarks.keyed_exchange", *arguments)
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=RAY_ENVIRONMENT)
    return float(json.loads(done.stdout.splitlines()[-1]))


def flowchan_seconds(direct: bool, hosts: tuple[str, ...]) -> float:
    """Count all words with flowchan. Return the seconds from the first batch to the last result."""
    from benchmarks.limited_hosts import Namespaces
    from flowchan import Graph
    from flowchan.hosts import hosts_part
    from flowchan.hosts.host_pool import pool_of

    if not direct:
        mock.patch.object(hosts_part, "keeps_outputs", return_value=False).start()
    n = len(hosts)

    class Mapper:
        def __init__(self) -> None:
            self.parts = parts(n)

        def __call__(self, batch: int) -> list[Part]:
            return self.parts

    ready = threading.Event()

    def batches() -> Iterator[int]:
        ready.wait()
        yield from range(n * BATCHES_PER_HOST)

    pool, graph = pool_of("limited", Namespaces(hosts)), Graph("word count")
    made = graph.source(batches).flat_map(Mapper, on=pool, workers=n, ordered=False)
    merged = made.map(merge, on=pool, workers=n, key=lambda part: part[0], ordered=False).collect()
    with graph.start() as run:
        while is_starting(run.stats(), 2 * n):
            time.sleep(0.1)
        began = time.perf_counter()
        ready.set()
        found = dict(sorted(run.wait()[merged], key=lambda pair: pair[1]))
        seconds = time.perf_counter() - began
    must_have_all(sum(found.values()), n)
    return seconds


def is_starting(stats: RunStats, workers: int) -> bool:
    working = sum(stage.working for stage in stats.stages if stage.hosts)
    return stats.state == "running" and working < workers


def ray_seconds(n: int) -> float:
    """Count all words with Ray Data on the running cluster. Return the seconds of the job."""
    import ray
    import ray.data

    ray.init(address="auto", log_to_driver=False)

    def prepare(n: int) -> None:
        parts(n)
        time.sleep(1)  # so that each worker prepares its own parts

    preparing = ray.remote(num_cpus=1, scheduling_strategy="SPREAD")(prepare)
    ray.get([preparing.remote(n) for _ in range(n)])  # start the workers before the clock
    began = time.perf_counter()
    batches = ray.data.range(n * BATCHES_PER_HOST, override_num_blocks=n * BATCHES_PER_HOST)
    rows = batches.flat_map(rows_of, fn_args=(n,))
    counted = rows.groupby("key", num_partitions=n).map_groups(total_of).take_all()
    seconds = time.perf_counter() - began
    must_have_all(sum(int(row["words"]) for row in counted), n)
    return seconds


def rows_of(row: dict[str, Any], n: int) -> list[dict[str, Any]]:
    """Return the counts of a batch as rows of Ray Data."""
    return [{"key": key, "counts": pickle.dumps(part, 5)} for key, part in parts(n)]


def total_of(group: dict[str, Any]) -> dict[str, Any]:
    """Merge all rows of a partition."""
    merged: Counter[str] = Counter()
    for counts in group["counts"]:
        merged.update(pickle.loads(counts))
    return {"key": group["key"][:1], "words": [merged.total()]}


def must_have_all(words: int, n: int) -> None:
    if words != n * BATCHES_PER_HOST * BATCH:
        raise AssertionError(f"the count must be {n * BATCHES_PER_HOST * BATCH} words, got {words}")


@contextlib.contextmanager
def ray_cluster(python: str, head: str, hosts: list[str]) -> Iterator[None]:
    """Run a Ray node with one core in each namespace, and one without cores in the driver's.

    Args:
        python: Interpreter that has Ray.
        head: Namespace of the driver.
        hosts: Other namespaces.
    """
    own = "--head --include-dashboard=false --num-cpus=0 --port=6379 --node-ip-address=10.76.0.1"
    nodes = [
        own,
        *(
            f"--address=10.76.0.1:6379 --node-ip-address=10.76.0.{n + 2} --num-cpus=1"
            for n in range(len(hosts))
        ),
    ]
    try:
        for namespace, options in zip((head, *hosts), nodes, strict=True):
            ray = os.path.join(os.path.dirname(python), "ray")
            store = "--object-store-memory=400000000"
            command = ("ip", "netns", "exec", namespace, ray, "start", store, *options.split())
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=RAY_ENVIRONMENT)
        yield
    finally:
        for namespace in (head, *hosts):
            pids = subprocess.run(("ip", "netns", "pids", namespace), check=True, stdout=subprocess.PIPE)
            subprocess.run(("kill", "-9", *pids.stdout.decode().split()), stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
