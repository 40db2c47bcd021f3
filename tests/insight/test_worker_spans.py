"""Test that a worker's spans add up to the worker's wait times."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator

import pytest

from flowchan.run.observe import worker_spans
from flowchan.run.observe.worker_spans import FINEST_NS, KINDS, Span, WorkerSpans

MS = 1_000_000


def spans_of(readings: list[tuple[int, int, int, int]], finest: int = FINEST_NS) -> list[Span]:
    """Return the spans for these readings of the time and the total waits, in milliseconds."""
    worker, spans = WorkerSpans(0, finest=finest), []
    for now, *waited in readings:
        spans += worker.read(now * MS, (waited[0] * MS, waited[1] * MS, waited[2] * MS))
    return [*spans, *worker.end(worker.at)]


def totals(spans: list[Span]) -> Counter[str]:
    return sum((Counter({span.kind: span.end - span.begin}) for span in spans), Counter())


def test_wait_across_several_readings_is_one_span() -> None:
    assert spans_of([(10, 0, 0, 0), (20, 10, 0, 0), (30, 20, 0, 0), (40, 20, 0, 0)]) == [
        ("busy", 0, 10 * MS),
        ("input", 10 * MS, 30 * MS),
        ("busy", 30 * MS, 40 * MS),
    ]


def test_each_wait_reason_has_its_own_span() -> None:
    assert [span.kind for span in spans_of([(10, 10, 0, 0), (20, 10, 10, 0), (30, 10, 10, 10)])] == [
        "input",
        "place",
        "turn",
    ]


def test_short_waits_are_combined_into_one_span() -> None:
    half = FINEST_NS // 2
    worker = WorkerSpans(0)
    spans = [span for n in (1, 2, 3) for span in worker.read(10 * n * MS, (n * half, 0, 0))]
    assert totals([*spans, *worker.end(30 * MS)]) == {"input": 2 * half, "busy": 30 * MS - 2 * half}


@pytest.mark.parametrize("seed", range(20))
def test_spans_of_random_readings_keep_totals_and_do_not_overlap(seed: int) -> None:
    def readings(draw: random.Random) -> Iterator[tuple[int, tuple[int, int, int]]]:
        now, waited = 0, [0, 0, 0]
        for _ in range(200):
            left = length = draw.randrange(1, 30 * MS)
            for kind in draw.sample(range(3), 3):
                waited[kind] += (part := draw.choice([0, 0, draw.randrange(left + 1)]))
                left -= part
            now += length
            yield now, (waited[0], waited[1], waited[2])

    worker, spans = WorkerSpans(0), []
    for now, waited in readings(random.Random(seed)):
        spans += worker.read(now, waited)
    spans += worker.end(now)
    assert spans[0].begin == 0
    assert spans[-1].end == now
    assert all(earlier.end == later.begin for earlier, later in itertools.pairwise(spans))
    expected = dict(zip(KINDS, (now - sum(waited), *waited), strict=True))
    for kind, time in totals(spans).items():
        assert abs(time - expected[kind]) <= 4 * FINEST_NS


def test_reset_wait_totals_do_not_produce_negative_spans() -> None:
    spans = spans_of([(10, 8, 0, 0), (20, 0, 0, 0), (30, 0, 0, 0)])
    assert all(span.end > span.begin for span in spans)
    assert totals(spans)["input"] == 8 * MS


def test_number_of_spans_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_spans, "MOST_SPANS", 100)
    worker, count = WorkerSpans(0), 0
    for n in range(1, 5000):
        count += len(list(worker.read(10 * n * MS, ((n + 1) // 2 * 10 * MS, 0, 0))))
    assert worker.finest > 10 * MS
    assert count < 1000
