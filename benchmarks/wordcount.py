"""Measure ``examples/wordcount.py`` and a sequential loop on the standard library, with a warm file cache."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.harness import Case, Effort, Report, at_least
from examples import wordcount
from flowchan import Graph

ISOLATES = (
    "The whole job is measured: list the files, read them, count the words, merge the counts. For flowchan, "
    "this time includes declaring and checking the graph, and starting and ending the two workers. All files "
    "have been read once before the clock starts. The sequential loop updates a single Counter, one file "
    "after another."
)


def measure(effort: Effort) -> Report:
    report = Report()
    expected = sequential()
    cases = [job("flowchan", in_parallel, expected), job("the sequential loop", sequential, expected)]
    mine, loop = report.interleave("wordcount over the standard library", cases, effort.rounds)
    report.rows.append(at_least(1.6, mine, loop))
    return report


def sequential() -> Counter[str]:
    total: Counter[str] = Counter()
    for file in wordcount.python_files(wordcount.STANDARD_LIBRARY):
        total.update(wordcount.words(file))
    return total


def in_parallel(place: Any = "process") -> Counter[str]:
    """Run the example's graph, and return the total instead of printing it."""
    graph = Graph("wordcount")
    batches = graph.source(wordcount.python_files, wordcount.STANDARD_LIBRARY).batch(32)
    counts = batches.map(wordcount.count_words, workers=2, on=place, ordered=False)
    nothing: Counter[str] = Counter()
    total = counts.reduce(wordcount.add, nothing)
    return graph.run()[total]


def job(name: str, job: Callable[[], Counter[str]], expected: Counter[str]) -> Case:
    """Create a case whose result is a rate, so that higher is better."""

    def work() -> tuple[Sequence[float], int]:
        began = time.perf_counter()
        total = job()
        took = time.perf_counter() - began
        if total != expected:
            raise AssertionError(f"{name} must count {expected.total()} words, got {total.total()}")
        return [total.total() / took], total.total()

    return Case(name, "words/s", work)
