"""Send spans and metrics of a run to OpenTelemetry.

This module needs the package ``opentelemetry-api``. The program must set up an SDK, which exports the data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
from opentelemetry.trace import TracerProvider

from flowchan import Run, RunStats
from flowchan.run.policy.events import ItemTraced
from flowchan.viz.insight.metrics import METRICS, samples

__all__ = ["instrument"]

NAME = "flowchan"
MOST_ITEMS_PER_S = 100
"""Maximum number of items per second that get spans. A span costs tens of microseconds."""
STATS_EVERY_S = 1.0
"""Seconds between updates of the statistics that all instruments share."""


def instrument(
    run: Run, *, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
) -> None:
    """Send spans and metrics of a run to OpenTelemetry, until the run has ended.

    Each sampled item that reaches an end of the graph gets a span named "flowchan item", with one child per
    stage. Spans require a run that samples items: one that was started with ``trace=`` or ``page=True``. The
    metrics have the same names and labels as those for Prometheus.

    Args:
        run: The run.
        tracer_provider: Provider of the tracer (default: the global one).
        meter_provider: Provider of the meter (default: the global one).

    Example:
        >>> from flowchan import Graph
        >>> from flowchan.viz.insight.opentelemetry import instrument
        >>> graph = Graph()
        >>> graph.source(["a", "bb"]).sink(len)
        >>> with graph.start() as run:
        ...     instrument(run)
    """
    last = _LastStats(run.stats())
    spans = _Spans(trace.get_tracer(NAME, tracer_provider=tracer_provider), last.stats.graph)
    # The providers outlive the run, so the instruments must not refer to the run.
    run.subscribe(stats=last.update, events=spans.add, every=STATS_EVERY_S)
    meter = (meter_provider or metrics.get_meter_provider()).get_meter(NAME)
    for metric in METRICS:
        is_counter = metric.kind == "counter"
        create = meter.create_observable_counter if is_counter else meter.create_observable_gauge
        create(metric.name, [_callback(last, metric.name)], description=metric.text)


class _Spans:
    """Creates the spans of sampled items."""

    def __init__(self, tracer: trace.Tracer, graph: str) -> None:
        self._tracer, self._graph = tracer, graph
        self._ahead = time.time_ns() - time.monotonic_ns()
        self._second, self._count = 0, 0

    def add(self, event: Any) -> None:
        """Create the spans for a complete item, unless this second's limit on items has been reached."""
        if not isinstance(event, ItemTraced):
            return
        second = int(event.spans[-1][3])
        if second != self._second:
            self._second, self._count = second, 0
        self._count += 1
        if self._count <= MOST_ITEMS_PER_S:
            self._make(event)

    def _make(self, item: ItemTraced) -> None:
        facts = {"flowchan.graph": self._graph, "flowchan.source": item.source}
        begin, end = self._at(item.spans[0][2]), self._at(item.spans[-1][3])
        root = self._tracer.start_span("flowchan item", Context(), start_time=begin, attributes=facts)
        parent = trace.set_span_in_context(root, Context())
        for stage, worker, taken, put in item.spans:
            own: dict[str, str | int] = {"flowchan.stage": stage, "flowchan.worker": worker}
            child = self._tracer.start_span(stage, parent, start_time=self._at(taken), attributes=own)
            child.end(self._at(put))
        root.end(end)

    def _at(self, seconds: float) -> int:
        return round(seconds * 1e9) + self._ahead


class _LastStats:
    """Latest statistics of the run, shared by all instruments."""

    def __init__(self, stats: RunStats) -> None:
        self.stats = stats

    def update(self, stats: RunStats) -> None:
        self.stats = stats


def _callback(last: _LastStats, metric: str) -> Callable[[CallbackOptions], Iterator[Observation]]:
    def callback(_: CallbackOptions) -> Iterator[Observation]:
        for sample in samples(last.stats):
            if sample.metric == metric:
                yield Observation(sample.value, dict(sample.labels))

    return callback
