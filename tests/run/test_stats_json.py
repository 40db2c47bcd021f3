"""Test the dictionaries of statistics that other programs receive."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace

import pytest
from support.sample_stats import EDGE, STAGE, STATS

from flowchan import Graph
from flowchan.run.observe.stats_json import from_json, to_json


def test_stats_of_every_field_survive_json() -> None:
    assert from_json(json.loads(json.dumps(to_json(STATS)))) == STATS


def test_stats_of_a_real_run_survive_json() -> None:
    graph = Graph("real")
    graph.source(range(10)).map(str, on="process").sink(len)
    run = graph.start()
    run.wait()
    stats = run.stats()
    assert from_json(json.loads(json.dumps(to_json(stats)))) == stats


def test_stats_of_a_run_without_a_cause_survive_json() -> None:
    stats = replace(STATS, cause=None, bottleneck=None, stages=(replace(STAGE, cores=None),))
    assert from_json(json.loads(json.dumps(to_json(stats)))) == stats


def test_stage_has_its_state_in_json() -> None:
    assert [stage["state"] for stage in to_json(STATS)["stages"]] == ["running"]


def test_reader_ignores_unknown_keys_and_uses_defaults_for_missing_ones() -> None:
    document = to_json(STATS) | {"new": 1}
    document["stages"][0]["newer"] = {"a": 1}
    del document["edges"][0]["put"]
    assert from_json(document).edges[0] == replace(EDGE, put=0)


def test_reader_refuses_stats_without_a_necessary_key() -> None:
    document = to_json(STATS)
    del document["graph"]
    with pytest.raises(TypeError, match="graph"):
        from_json(document)


def test_sample_has_a_value_for_every_field() -> None:
    """A new field with a default would otherwise escape the tests of this file."""
    for sample in (STATS, STAGE, EDGE, *STATS.hosts, *STATS.decisions):
        for field in dataclasses.fields(sample):
            if field.default is not dataclasses.MISSING:
                assert getattr(sample, field.name) != field.default, f"{type(sample).__name__}.{field.name}"


def test_names_in_json_change_only_with_the_schema() -> None:
    """Programs of users depend on these names. If one changes its meaning or is removed, raise SCHEMA."""
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
