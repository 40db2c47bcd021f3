"""Test the spans and metrics that a run sends to OpenTelemetry."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowchan import Graph, Run
from flowchan.run.policy.events import ItemTraced

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from flowchan.viz.insight import opentelemetry
from flowchan.viz.insight.metrics import samples


class Backend:
    """Collects the spans and metrics of a run."""

    def __init__(self) -> None:
        self._spans, self._metrics = InMemorySpanExporter(), InMemoryMetricReader()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self._spans))
        self.meters = MeterProvider([self._metrics])

    def instrument(self, run: Run) -> None:
        opentelemetry.instrument(run, tracer_provider=self.tracers, meter_provider=self.meters)

    def spans(self) -> list[ReadableSpan]:
        return list(self._spans.get_finished_spans())

    def values(self) -> dict[tuple[str, str], Any]:
        """Return the values of all instruments, by instrument name and by stage or channel."""
        data = self._metrics.get_metrics_data()
        assert data is not None
        found = {}
        for metric in data.resource_metrics[0].scope_metrics[0].metrics:
            for point in metric.data.data_points:
                labels = dict(point.attributes or {})
                assert labels["graph"] == "otel"
                found[metric.name, str(labels.get("stage") or labels.get("channel"))] = point.value
        return found


@pytest.fixture
def backend() -> Backend:
    return Backend()


def compute(number: int) -> int:
    """Use 5 ms of CPU time, because shorter work can be lost in the precision of the clocks."""
    end = time.thread_time() + 0.005
    while time.thread_time() < end:
        pass
    return number


def graph_of(numbers: int, function: Callable[[int], int] = abs) -> Graph:
    graph = Graph("otel")
    graph.source(range(numbers)).map(function, on="process", name="work").sink(str, name="end")
    return graph


def test_sampled_item_has_span_with_one_child_per_stage(backend: Backend, tmp_path: Path) -> None:
    run = graph_of(100).start(trace=tmp_path / "out.json")
    backend.instrument(run)
    run.wait()
    spans = backend.spans()
    roots = [span for span in spans if span.parent is None]
    assert roots
    for root in roots:
        assert root.name == "flowchan item"
        assert root.attributes == {"flowchan.graph": "otel", "flowchan.source": "source"}
        own = [
            span for span in spans if span.parent is not None and span.parent.span_id == root.context.span_id
        ]
        children = sorted(own, key=lambda span: span.start_time or 0)
        assert [child.name for child in children] == ["source", "work", "end"]
        assert root.start_time == children[0].start_time
        assert root.end_time == children[-1].end_time


def test_metrics_report_item_counts_and_busy_time(backend: Backend) -> None:
    run = graph_of(10, compute).start()
    backend.instrument(run)
    run.wait()
    values = backend.values()
    assert values["flowchan_stage_items_in_total", "work"] == 10
    assert values["flowchan_stage_items_out_total", "work"] == 10
    assert values["flowchan_stage_busy_seconds_total", "work"] > 0
    (edge, _) = run.stats().edges
    assert values["flowchan_channel_items_total", edge.name] == 10
    assert values["flowchan_channel_items", edge.name] == 0
    assert {name for name, _ in values} == {sample.metric for sample in samples(run.stats())}


def test_at_most_100_items_per_second_have_spans(backend: Backend) -> None:
    spans = opentelemetry._Spans(backend.tracers.get_tracer("test"), "otel")
    for number in range(250):
        at = 7.0 + number / 1000
        spans.add(ItemTraced("source", number, (("source", 1, at, at), ("end", 1, at, at))))
    spans.add(ItemTraced("source", 250, (("source", 1, 8.0, 8.0), ("end", 1, 8.0, 8.0))))
    assert sum(span.parent is None for span in backend.spans()) == 101


def test_run_without_sampling_sends_metrics_but_no_spans(backend: Backend) -> None:
    run = graph_of(10).start()
    backend.instrument(run)
    run.wait()
    assert backend.spans() == []
    assert backend.values()["flowchan_stage_items_in_total", "end"] == 10
