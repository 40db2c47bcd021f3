"""Test the JSON form of statistics, which other programs receive."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace

import pytest
from support.sample_stats import EDGE, STAGE, STATS

from flowchan import Graph
from flowchan.run.observe.stats_json import from_json, to_json


def test_stats_with_every_field_set_survive_json_round_trip() -> None:
    assert from_json(json.loads(json.dumps(to_json(STATS)))) == STATS


def test_stats_of_real_run_survive_json_round_trip() -> None:
    graph = Graph("real")
    graph.source(range(10)).map(str, on="process").sink(len)
    run = graph.start()
    run.wait()
    stats = run.stats()
    assert from_json(json.loads(json.dumps(to_json(stats)))) == stats


def test_stats_without_a_cause_survive_json_round_trip() -> None:
    stats = replace(STATS, cause=None, bottleneck=None, stages=(replace(STAGE, cores=None),))
    assert from_json(json.loads(json.dumps(to_json(stats)))) == stats


def test_json_includes_state_of_each_stage() -> None:
    assert [stage["state"] for stage in to_json(STATS)["stages"]] == ["running"]


def test_from_json_ignores_unknown_keys_and_fills_in_defaults() -> None:
    document = to_json(STATS) | {"new": 1}
    document["stages"][0]["newer"] = {"a": 1}
    del document["edges"][0]["put"]
    assert from_json(document).edges[0] == replace(EDGE, put=0)


def test_from_json_refuses_stats_without_a_required_key() -> None:
    document = to_json(STATS)
    del document["graph"]
    with pytest.raises(TypeError, match="graph"):
        from_json(document)


def test_sample_stats_set_every_field_with_a_default() -> None:
    """If a field kept its default, the tests in this file would miss it."""
    for sample in (STATS, STAGE, EDGE, *STATS.hosts, *STATS.decisions):
        for field in dataclasses.fields(sample):
            if field.default is not dataclasses.MISSING:
                assert getattr(sample, field.name) != field.default, f"{type(sample).__name__}.{field.name}"


def test_json_names_change_only_with_the_schema() -> None:
    """Users' programs depend on these names. If you remove a name or change its meaning, increment SCHEMA."""
    document = to_json(STATS)
    assert set(document) >= {
        *("graph", "state", "elapsed", "stages", "edges", "bottleneck", "seed", "memory", "hosts"),
        *("last_error", "window", "cause", "warnings"),
    }
    assert set(document["stages"][0]) >= {
        *("name", "kind", "on", "workers", "alive", "items_in", "items_out", "failed", "retried", "restarts"),
        *("unwanted", "discarded", "in_hand", "rate", "busy", "waiting_input", "waiting_output", "hosts"),
        *("pids", "members_failed", "waiting_turn", "cores", "working", "seconds", "per_worker"),
        *("rate_limit", "starting", "state"),
    }
    assert set(document["stages"][0]["seconds"]) >= {"working", "input", "place", "turn", "cpu", "ready"}
    assert set(document["edges"][0]) >= {
        *("name", "writer", "reader", "transport", "inside", "capacity", "passed", "rate", "put"),
        *("waiting_readers", "waiting_writers", "readers_waiting_for", "writers_waiting_for", "bytes"),
    }
    assert set(document["cause"]) >= {"kind", "stage", "why"}
    assert set(document["hosts"][0]) >= {"name", "state", "workers", "sent", "received", "round_trip"}
