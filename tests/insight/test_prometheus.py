"""Test that Prometheus can parse the metrics of a run, and that counters never decrease."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from support.optional_packages import optional
from support.sample_stats import EDGE, SECONDS, STAGE, STATS

from flowchan.run.policy.stats import RunStats
from flowchan.viz.insight import prometheus
from flowchan.viz.insight.metrics import METRICS, PrometheusMetrics, samples

parser = optional("prometheus_client.parser")

BOARD = Path(__file__).parents[2] / "examples" / "grafana" / "flowchan.json"

Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def values(text: str) -> Values:
    """Parse the metrics with Prometheus's own parser, and return the samples by name and sorted labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found: Values, name: str, **labels: str) -> float:
    return found[name, tuple(sorted(labels.items()))]


def test_prometheus_output_has_every_metric_with_help_and_type() -> None:
    families = list(parser.text_string_to_metric_families(prometheus(STATS)))
    found = [(family.samples[0].name, family.type, family.documentation) for family in families]
    assert found == [(metric.name, metric.kind, metric.text) for metric in METRICS]


def test_prometheus_metrics_report_counts_of_stages_and_channels() -> None:
    found = values(prometheus(STATS))
    stage = {"graph": "sample", "stage": "work"}
    assert value(found, "flowchan_stage_items_in_total", **stage) == 100
    assert value(found, "flowchan_stage_items_out_total", **stage) == 90
    # includes one failed member of a batch
    assert value(found, "flowchan_stage_items_failed_total", **stage) == 5
    assert value(found, "flowchan_stage_retries_total", **stage) == 5
    assert value(found, "flowchan_stage_restarts_total", **stage) == 1
    channel = {"graph": "sample", "channel": "numbers", "writer": "numbers", "reader": "work"}
    assert value(found, "flowchan_channel_items", **channel) == 7
    assert value(found, "flowchan_channel_capacity", **channel) == 64
    assert value(found, "flowchan_channel_items_total", **channel) == 100
    assert value(found, "flowchan_host_received_bytes_total", graph="sample", host="a") == 2000
    assert value(found, "flowchan_run_state", graph="sample", state="running") == 1


def test_prometheus_reports_wait_seconds_by_reason() -> None:
    found = values(prometheus(STATS))
    stage = {"graph": "sample", "stage": "work"}
    assert value(found, "flowchan_stage_busy_seconds_total", **stage) == SECONDS.work == 6
    waits = {
        reason: value(found, "flowchan_stage_wait_seconds_total", **stage, **{"for": reason})
        for reason in ("input", "place", "turn")
    }
    assert waits == {"input": 2, "place": 1.5, "turn": 0.5}
    assert value(found, "flowchan_stage_cpu_seconds_total", **stage) == 4


def test_prometheus_counts_workers_by_state() -> None:
    found = values(prometheus(STATS))
    states = {
        state: value(found, "flowchan_stage_workers", graph="sample", stage="work", state=state)
        for state in ("starting", "working", "ended")
    }
    assert states == {"starting": 1, "working": 1, "ended": 1}


def test_prometheus_omits_unknown_times() -> None:
    unknown = replace(STAGE, seconds=replace(SECONDS, cpu=None, ready=None))
    text = prometheus(replace(STATS, stages=(unknown,)))
    assert "cpu_seconds" not in text
    assert "core_wait_seconds" not in text


def test_prometheus_escapes_names_in_labels() -> None:
    name = 'a "quoted" \\ back\nslash, ünï } {'
    found = values(prometheus(replace(STATS, graph=name, stages=(replace(STAGE, name=name),))))
    assert value(found, "flowchan_stage_items_in_total", graph=name, stage=name) == 100


def test_graph_label_separates_metrics_of_two_runs() -> None:
    one, two = values(prometheus(STATS)), values(prometheus(replace(STATS, graph="other")))
    assert len(one) == len(two)
    assert not one.keys() & two.keys()


def test_counter_keeps_its_value_if_a_later_reading_is_lower() -> None:
    """Prometheus would treat a lower value as a counter reset, and count the whole value as an increase."""
    behind = replace(STAGE, seconds=replace(SECONDS, input=2.001), in_hand=1)
    series: Iterator[RunStats] = iter([STATS, replace(STATS, stages=(behind,))])
    metrics = PrometheusMetrics(lambda: next(series))
    first, second = values(metrics.text()), values(metrics.text())
    stage = {"graph": "sample", "stage": "work"}
    assert value(second, "flowchan_stage_busy_seconds_total", **stage) == 6
    assert value(second, "flowchan_stage_wait_seconds_total", **stage, **{"for": "input"}) == 2.001
    assert value(second, "flowchan_stage_items_in_hand", **stage) == 1  # a gauge may decrease
    assert value(first, "flowchan_stage_items_in_hand", **stage) == 3


def test_channel_without_reader_has_empty_reader_label() -> None:
    found = values(prometheus(replace(STATS, edges=(replace(EDGE, reader=None),))))
    labels = {"graph": "sample", "channel": "numbers", "writer": "numbers", "reader": ""}
    assert value(found, "flowchan_channel_items", **labels) == 7


# --- the Grafana dashboard ---


def queries() -> list[str]:
    board = json.loads(BOARD.read_text())
    variables = [one["query"]["query"] for one in board["templating"]["list"] if one["type"] == "query"]
    return variables + [target["expr"] for panel in board["panels"] for target in panel["targets"]]


def labels_in(query: str) -> set[str]:
    """Return the labels that a query selects or groups by."""
    listed = re.findall(r"\bby \(([^)]*)\)", query) + re.findall(r"label_values\(\w+, (\w+)\)", query)
    return {*re.findall(r"[{,]\s*(\w+)\s*=", query), *re.findall(r"\w+", " ".join(listed))}


def test_dashboard_uses_only_metrics_and_labels_that_runs_emit() -> None:
    emitted: dict[str, set[str]] = {}
    for sample in samples(STATS):
        emitted.setdefault(sample.metric, set()).update(name for name, _ in sample.labels)
    found = queries()
    assert len(found) > 10
    for query in found:
        names = re.findall(r"flowchan_\w+", query)
        assert names, query
        for name in names:
            assert name in emitted, f"{query}: a run does not emit {name}"
            assert labels_in(query) <= emitted[name], f"{query}: {name} has the labels {emitted[name]}"


def test_dashboard_legends_use_only_labels_kept_by_queries() -> None:
    for panel in json.loads(BOARD.read_text())["panels"]:
        for target in panel["targets"]:
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            groups = re.findall(r"\bby \(([^)]*)\)", target["expr"])
            kept = set(re.findall(r"\w+", groups[0])) if groups else {"instance", "channel"}
            assert shown <= kept, panel["title"]


def test_dashboard_panels_do_not_overlap() -> None:
    places = [panel["gridPos"] for panel in json.loads(BOARD.read_text())["panels"]]
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
