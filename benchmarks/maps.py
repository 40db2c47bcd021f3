"""Measure ``map`` on two worker processes, with the identity function and with 100 µs of work per item."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any

import joblib
import pypeln
from joblib.externals.loky import get_reusable_executor

from benchmarks.harness import Effort, Report, at_least, calibrate, throughput
from benchmarks.peers import CONTEXT
from benchmarks.tasks import identity, spin
from flowchan import Graph, Stream

ISOLATES = (
    "The graph has a source of ready items, one map on two worker processes, and the ordered list of "
    "results. For flowchan and pypeln, the clock includes starting and ending the workers. The pools of "
    "multiprocessing, concurrent.futures and joblib are already started and warm, and so are the workers of "
    "flowchan's graph.pool(). A channel of flowchan or pypeln holds up to 1,024 items. flowchan passes "
    "several items at once if they are ready, but no item waits for others. Pool.imap passes one item at a "
    "time by default. If a chunk size is set, it returns a result only when the whole chunk is finished. "
    "concurrent.futures and joblib use the chunk size that was fastest in a trial just before the "
    "measurement."
)

WORKERS = 2
CAPACITY = 1024
CHUNKS = (1, 8, 64, 256)
IMAP_CHUNKS = (64, 500)
WORK = 100e-6


def measure(effort: Effort) -> Report:
    report = Report()
    longer = replace(effort, seconds=3 * effort.seconds)
    moves: dict[str, Callable[[int], float]] = {
        "flowchan": partial(_flowchan, identity, 0),
        "flowchan, graph.pool()": partial(_flowchan_pool, identity, 0),
        "multiprocessing.Pool.imap": partial(_pool, identity, 0, 1),
        "pypeln.process.map": partial(_pypeln, identity, 0),
    }
    for chunk in IMAP_CHUNKS:
        moves[f"multiprocessing.Pool.imap(chunksize={chunk})"] = partial(_pool, identity, 0, chunk)
    cases = [throughput(name, move, longer) for name, move in moves.items()]
    mine, warm, pool, pypeln_map, *chunked = report.interleave(
        "map of the identity, 2 processes", cases, effort.rounds
    )
    report.rows += [at_least(10, mine, pool), at_least(100, mine, pypeln_map)]
    report.rows += [at_least(1, mine, imap) for imap in chunked]
    work = "map of the identity, 2 processes already started"
    report.rows += [replace(at_least(1, warm, imap), work=work) for imap in chunked]

    turns = calibrate(_turns, 0.1)
    per_item = int(turns * WORK / _turns(turns))
    name, chunk = _best("concurrent.futures", CHUNKS, partial(_futures, spin, per_item), effort)
    other_name, other_chunk = _best("joblib", (*CHUNKS, "auto"), partial(_joblib, spin, per_item), effort)
    moves = {
        "flowchan": partial(_flowchan, spin, per_item),
        name: partial(_futures, spin, per_item, chunk),
        other_name: partial(_joblib, spin, per_item, other_chunk),
    }
    cases = [throughput(name, move, longer) for name, move in moves.items()]
    mine, futures, jobs = report.interleave("map of 100 µs of work, 2 processes", cases, effort.rounds)
    report.rows += [at_least(1, mine, futures), at_least(1, mine, jobs)]
    return report


def _turns(count: int) -> float:
    began = time.perf_counter()
    spin(count)
    return time.perf_counter() - began


def _best(
    name: str, chunks: Iterable[Any], run: Callable[[Any, int], float], effort: Effort
) -> tuple[str, Any]:
    """Try all chunk sizes. Return the name of the case with the fastest size, and that size."""
    chunk = min(chunks, key=lambda chunk: run(chunk, int(effort.seconds / WORK)))
    return f"{name} (chunks: {chunk})", chunk


def _flowchan(function: Callable[[int], int], item: int, count: int) -> float:
    began = time.perf_counter()
    graph, results = _graph(function, lambda: repeat(item, count))
    return _checked(graph.run()[results], count, began)


def _flowchan_pool(function: Callable[[int], int], item: int, count: int) -> float:
    counts = iter((WORKERS, count))
    graph, results = _graph(function, lambda: repeat(item, next(counts)))
    with graph.pool() as pool:
        pool.run()
        began = time.perf_counter()
        return _checked(pool.run()[results], count, began)


def _graph(
    function: Callable[[int], int], items: Callable[[], Iterable[int]]
) -> tuple[Graph, Stream[list[int]]]:
    graph = Graph("map")
    mapped = graph.source(items, capacity=CAPACITY).map(
        function, workers=WORKERS, on="process", capacity=CAPACITY
    )
    return graph, mapped.collect()


def _pool(function: Callable[[int], int], item: int, chunk: int, count: int) -> float:
    with CONTEXT.Pool(WORKERS) as pool:
        pool.map(function, [item] * WORKERS)
        began = time.perf_counter()
        took = _checked(list(pool.imap(function, repeat(item, count), chunksize=chunk)), count, began)
        pool.close()
        pool.join()
    return took


def _pypeln(function: Callable[[int], int], item: int, count: int) -> float:
    began = time.perf_counter()
    stage = pypeln.process.map(function, repeat(item, count), workers=WORKERS, maxsize=CAPACITY)
    return _checked(list(stage), count, began)


def _futures(function: Callable[[int], int], item: int, chunk: int, count: int) -> float:
    with ProcessPoolExecutor(WORKERS, mp_context=CONTEXT) as executor:
        list(executor.map(function, [item] * WORKERS))
        began = time.perf_counter()
        return _checked(list(executor.map(function, repeat(item, count), chunksize=chunk)), count, began)


def _joblib(function: Callable[[int], int], item: int, chunk: int | str, count: int) -> float:
    with joblib.Parallel(n_jobs=WORKERS, batch_size=chunk) as parallel:
        parallel(joblib.delayed(function)(item) for _ in range(WORKERS))
        began = time.perf_counter()
        took = _checked(list(parallel(joblib.delayed(function)(item) for _ in range(count))), count, began)
    # End joblib's workers, because a child's CPU time counts only after the child has exited.
    get_reusable_executor().shutdown(wait=True)
    return took


def _checked(results: list[Any], count: int, began: float) -> float:
    took = time.perf_counter() - began
    if len(results) != count:
        raise AssertionError(f"{count} items were sent, but {len(results)} results arrived")
    return took
