"""Export run metrics in the Prometheus text format.

Algorithm. Counters begin at 0 when the run starts. All times are in seconds, so that a query can compute
shares for any time window. A sum of times from several clocks may fall by a few microseconds between two
scrapes. Prometheus would interpret a falling counter as a restart of the program. :class:`PrometheusMetrics`
therefore reports the highest value of each counter so far.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

from flowchan.run.policy.stats import EdgeStats, HostStats, RunStats, StageStats

KIND = "text/plain; version=0.0.4"
"""Media type of the text, which is encoded in UTF-8."""


class Metric(NamedTuple):
    """One metric: its name, type and help text."""

    name: str
    kind: str
    text: str


class Sample(NamedTuple):
    """Value of a metric for one combination of labels."""

    metric: str
    labels: tuple[tuple[str, str], ...]
    value: float


def _counter(name: str, text: str) -> Metric:
    return Metric(f"flowchan_{name}", "counter", text)


def _gauge(name: str, text: str) -> Metric:
    return Metric(f"flowchan_{name}", "gauge", text)


METRICS = (
    _gauge("run_elapsed_seconds", "Seconds from the start of the run until now, or until the run ended."),
    _gauge("run_state", "1 for the current state of the run."),
    _counter("stage_items_in_total", "Items that the stage has taken."),
    _counter("stage_items_out_total", "Items that the stage has put."),
    _counter("stage_items_failed_total", "Items that failed in the stage."),
    _counter("stage_retries_total", "Item retries."),
    _counter("stage_restarts_total", "Workers that were replaced."),
    _counter("stage_busy_seconds_total", "Time that the workers were not waiting."),
    _counter(
        "stage_wait_seconds_total", "Time that the workers waited for an item, for room or for their turn."
    ),
    _counter("stage_cpu_seconds_total", "CPU time of the workers, if known."),
    _counter("stage_core_wait_seconds_total", "Time that the workers waited for a CPU core, if known."),
    _gauge("stage_items_in_hand", "Items that workers have taken but not finished."),
    _gauge("stage_workers", "Workers of the stage by state: starting, working or ended."),
    _gauge("channel_items", "Items in the channel."),
    _gauge("channel_capacity", "Maximum number of items in the channel."),
    _gauge("channel_bytes", "Bytes in the channel."),
    _counter("channel_items_total", "Items taken from the channel."),
    _gauge("host_connected", "1 if the host's agent is connected, otherwise 0."),
    _counter("host_sent_bytes_total", "Bytes sent to the host."),
    _counter("host_received_bytes_total", "Bytes received from the host."),
    _counter("host_breaks_total", "Connections to the host that broke and were restored."),
)
"""All metrics, in output order."""


def prometheus(stats: RunStats) -> str:
    """Return a run's statistics in the Prometheus text format.

    Every metric has the label ``graph``. Stage metrics also have ``stage``, channel metrics have ``channel``,
    ``writer`` and ``reader``, and host metrics have ``host``. Times are in seconds since the start of the
    run.

    Args:
        stats: Statistics from :meth:`Run.stats`.

    Returns:
        The text, in version 0.0.4 of the format.

    Example:
        >>> from flowchan import Graph
        >>> from flowchan.viz.insight import prometheus
        >>> graph = Graph("words")
        >>> graph.source(["a", "bb"]).sink(len, name="count")
        >>> run = graph.start()
        >>> results = run.wait()
        >>> lines = prometheus(run.stats()).splitlines()
        >>> [line for line in lines if line.startswith("flowchan_stage_items_in_total") and "count" in line]
        ['flowchan_stage_items_in_total{graph="words",stage="count"} 2']
    """
    return _text(samples(stats))


class PrometheusMetrics:
    """Metrics of one run. Their counters never fall.

    Args:
        stats: Function that returns the current statistics of the run.
    """

    def __init__(self, stats: Callable[[], RunStats]) -> None:
        self._stats = stats
        self._highest: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._lock = threading.Lock()

    def text(self) -> str:
        """Return the current metrics as text."""
        with self._lock:
            return _text(self._rising(sample) for sample in samples(self._stats()))

    def _rising(self, sample: Sample) -> Sample:
        if _KINDS[sample.metric] != "counter":
            return sample
        key = (sample.metric, sample.labels)
        highest = self._highest[key] = max(sample.value, self._highest.get(key, 0))
        return sample._replace(value=highest)


def samples(stats: RunStats) -> Iterator[Sample]:
    """Yield the value of each metric of a run."""
    run = (("graph", stats.graph),)
    yield Sample("flowchan_run_elapsed_seconds", run, stats.elapsed)
    yield Sample("flowchan_run_state", (*run, ("state", stats.state)), 1)
    for stage in stats.stages:
        yield from _of_stage(stage, (*run, ("stage", stage.name)))
    for edge in stats.edges:
        ends = (("channel", edge.name), ("writer", edge.writer), ("reader", edge.reader or ""))
        yield from _of_channel(edge, (*run, *ends))
    for host in stats.hosts:
        yield from _of_host(host, (*run, ("host", host.name)))


def _of_stage(stage: StageStats, labels: tuple[tuple[str, str], ...]) -> Iterator[Sample]:
    seconds = stage.seconds
    values: dict[str, float | None] = {
        "items_in_total": stage.items_in,
        "items_out_total": stage.items_out,
        "items_failed_total": stage.failed + stage.members_failed,
        "retries_total": stage.retried,
        "restarts_total": stage.restarts,
        "busy_seconds_total": seconds.work,
        "cpu_seconds_total": seconds.cpu,
        "core_wait_seconds_total": seconds.ready,
        "items_in_hand": stage.in_hand,
    }
    for name, value in values.items():
        if value is not None:
            yield Sample(f"flowchan_stage_{name}", labels, value)
    for reason, value in (("input", seconds.input), ("place", seconds.place), ("turn", seconds.turn)):
        yield Sample("flowchan_stage_wait_seconds_total", (*labels, ("for", reason)), value)
    workers = {
        "starting": stage.starting,
        "working": stage.alive - stage.starting,
        "ended": max(0, stage.workers - stage.alive),
    }
    for state, number in workers.items():
        yield Sample("flowchan_stage_workers", (*labels, ("state", state)), number)


def _of_channel(edge: EdgeStats, labels: tuple[tuple[str, str], ...]) -> Iterator[Sample]:
    yield Sample("flowchan_channel_items", labels, edge.inside)
    yield Sample("flowchan_channel_capacity", labels, edge.capacity)
    yield Sample("flowchan_channel_bytes", labels, edge.bytes)
    yield Sample("flowchan_channel_items_total", labels, edge.passed)


def _of_host(host: HostStats, labels: tuple[tuple[str, str], ...]) -> Iterator[Sample]:
    yield Sample("flowchan_host_connected", labels, host.state == "connected")
    yield Sample("flowchan_host_sent_bytes_total", labels, host.sent)
    yield Sample("flowchan_host_received_bytes_total", labels, host.received)
    yield Sample("flowchan_host_breaks_total", labels, host.breaks)


_KINDS = {metric.name: metric.kind for metric in METRICS}


def _text(found: Iterator[Sample]) -> str:
    """Return the samples as text. They are grouped by metric, as the format requires."""
    grouped: dict[str, list[Sample]] = {}
    for sample in found:
        grouped.setdefault(sample.metric, []).append(sample)
    lines = []
    for name, kind, text in METRICS:
        if name in grouped:
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *map(_line, grouped[name])]
    return "\n".join(lines) + "\n"


def _line(sample: Sample) -> str:
    labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in sample.labels)
    return f"{sample.metric}{{{labels}}} {_number(sample.value)}"


def _number(value: float) -> str:
    return str(int(value)) if math.isfinite(value) and value == int(value) else repr(float(value))


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
