"""Test each bound of the throughput model, on hand-made statistics."""

from __future__ import annotations

import dataclasses

import pytest
from throughput_samples import chain, source, stage

from flowchan import EdgeStats, RunStats
from flowchan.run.observe.throughput import CORES, LOCK, LOOP, Change, Model


def model(stats: RunStats, cores: int = 8, gil: bool = True) -> Model:
    return Model.of(stats, cores, gil)


def gain(one: Model, change: Change) -> float:
    return one.rate(change=change) / one.rate()


def test_unchanged_model_predicts_measured_rate() -> None:
    assert model(chain(source(), stage("slow", 0.01))).rate() == pytest.approx(100, rel=0.02)


def test_model_with_variable_work_times_predicts_measured_rate() -> None:
    """The stages wait for each other, so none is always busy."""
    blocked = model(chain(source(), stage("a", 0.007, wait="place"), stage("b", 0.007)))
    assert blocked.rate() == pytest.approx(100, rel=0.02)
    assert gain(blocked, Change({"a": 2})) == pytest.approx(1 / 0.7 / (1 + 2**-1.94) ** (1 / 1.94), rel=0.02)


def test_added_workers_raise_rate_up_to_next_bound() -> None:
    one = model(chain(source(), stage("slow", 0.01), stage("next", 0.004)))
    assert one.limited_by() == "slow"
    assert one.rate({"slow": 2}) == pytest.approx(200, rel=0.05)
    assert one.rate({"slow": 8}) == pytest.approx(250, rel=0.05)
    assert one.limited_by({"slow": 8}) == "next"


def test_workers_added_to_other_stages_do_not_raise_rate() -> None:
    one = model(chain(source(), stage("slow", 0.01), stage("next", 0.004)))
    assert one.rate({"next": 4}) == pytest.approx(one.rate(), rel=0.01)


def test_removing_workers_lowers_rate() -> None:
    one = model(chain(source(400), stage("slow", 0.01, 400, workers=4)))
    assert one.rate({"slow": 2}) == pytest.approx(200, rel=0.02)


def test_doubling_speed_of_slowest_stage_doubles_rate() -> None:
    one = model(chain(source(), stage("slow", 0.01), stage("next", 0.001)))
    assert gain(one, Change(faster={"slow": 2.0})) == pytest.approx(2, rel=0.02)


def test_items_added_by_a_stage_increase_work_of_later_stages() -> None:
    """For each item of stage a (5 ms), stage b has 10 items (1 ms each)."""
    one = model(chain(source(), stage("a", 0.005, out=10), stage("b", 0.001, 1000)))
    assert one.bounds()["a"] == pytest.approx(200)
    assert one.bounds()["b"] == pytest.approx(100)


def test_later_stages_count_batch_as_one_item() -> None:
    one = model(chain(source(), stage("batch", 0.0, kind="batch", out=0.1), stage("b", 0.05, 10)))
    assert one.bounds()["b"] == pytest.approx(200)


def test_sources_are_weighted_by_their_number_of_items() -> None:
    """Stage b takes 100 items per second: 75 from the first source and 25 from the second."""
    first, second = source(75, "first"), source(25, "second")
    both = stage("b", 0.01, 100, kind="merge")
    stats = chain(first, both)
    edge = EdgeStats("second", "second", "b", "threads", 0, 64, 50, 25.0)
    stats = dataclasses.replace(stats, stages=(second, *stats.stages), edges=(*stats.edges, edge))
    one = model(stats)
    assert one.works["first"].visits == 0.75
    assert one.works["b"].visits == pytest.approx(1)
    assert one.rate() == pytest.approx(100, rel=0.02)


def test_interpreter_lock_limits_compute_bound_threads() -> None:
    burning = stage("burn", 0.02, 100, workers=2, cpu=0.009)
    one = model(chain(source(), burning))
    assert one.limited_by({"burn": 4}) == LOCK
    assert one.rate({"burn": 4}) / one.rate() < 1.15
    assert model(chain(source(), burning), gil=False).rate({"burn": 4}) == pytest.approx(200, rel=0.02)


def test_threads_that_use_several_cores_are_not_limited_by_lock() -> None:
    one = model(chain(source(), stage("numpy", 0.02, 100, workers=2, cpu=0.02)))
    assert one.rate({"numpy": 4}) / one.rate() == pytest.approx(2, rel=0.02)


def test_faster_thread_leaves_more_lock_time_to_others() -> None:
    """Each stage holds the lock for 5 ms per item, and waits 5 ms for the other stage."""
    one = model(chain(source(), stage("a", 0.01, cpu=0.005), stage("b", 0.01, cpu=0.005)))
    assert gain(one, Change(faster={"a": 2.0})) == pytest.approx(4 / 3, rel=0.1)


def test_stage_in_processes_does_not_need_interpreter_lock() -> None:
    one = model(chain(source(), stage("burn", 0.04, workers=4, cpu=0.0095)))
    assert one.limited_by() == LOCK
    assert gain(one, Change(on_process=("burn",))) > 3


def test_cores_limit_compute_bound_processes() -> None:
    burning = stage("burn", 0.02, 100, workers=2, cpu=0.0195, on="process")
    one = model(chain(source(), burning), cores=2)
    assert one.limited_by({"burn": 4}) == CORES
    assert one.rate({"burn": 4}) / one.rate() == pytest.approx(1, abs=0.05)
    assert model(chain(source(), burning)).rate({"burn": 4}) == pytest.approx(200, rel=0.02)


def test_work_excludes_core_waits_caused_by_the_run() -> None:
    waiting = stage("burn", 0.04, 100, workers=4, cpu=0.02, ready=0.02, on="process")
    assert model(chain(source(), waiting), cores=2).works["burn"].each == pytest.approx(0.02)
    assert model(chain(source(), waiting), cores=8).works["burn"].each == pytest.approx(0.04)


def test_workers_on_hosts_use_no_local_cores() -> None:
    remote = stage("burn", 0.01, cpu=None, on="pool", hosts=("there",))
    assert model(chain(source(), remote), cores=1).rate({"burn": 4}) == pytest.approx(400, rel=0.02)


def test_rate_limit_of_stage_limits_the_model() -> None:
    one = model(chain(source(), stage("fetch", 0.01, rate_limit=100.0)))
    assert one.rate({"fetch": 4}) == pytest.approx(one.rate(), rel=0.01)
    assert one.limited_by({"fetch": 4}) == "fetch"


@pytest.mark.parametrize(
    ("kind", "limit"), [("input", "the input"), ("consumer", "the program"), ("memory", "the memory")]
)
def test_cause_outside_the_stages_limits_the_rate(kind: str, limit: str) -> None:
    stats = chain(source(kind="input"), stage("work", 0.002), cause=(kind, None))  # type: ignore[arg-type]
    one = model(stats)
    assert one.limited_by() == limit
    assert one.rate({"work": 4}) == pytest.approx(one.rate(), rel=0.01)


def test_items_in_flight_limit_rate_of_loop() -> None:
    """Two items circulate between p and q. Only a faster stage shortens the round."""
    stats = chain(
        source(), stage("steer", 0.0, 200),
        stage("p", 0.01, workers=4), stage("q", 0.01, workers=4), cause=("in_flight", None),
    )  # fmt: skip
    back = EdgeStats("again", "q", "steer", "threads", 0, 64, 200, 100.0)
    one = model(dataclasses.replace(stats, edges=(*stats.edges, back)))
    assert one.limited_by() == LOOP
    assert one.rate({"p": 8}) == pytest.approx(one.rate(), rel=0.01)
    assert gain(one, Change(faster={"p": 2.0})) == pytest.approx(4 / 3, rel=0.02)


def test_stage_without_items_in_the_window_uses_older_items() -> None:
    slow = stage("slow", 0.0, 0.0, wait="place")
    since_start = dataclasses.replace(slow.seconds, working=30.0, place=0.0)
    stats = chain(source(), dataclasses.replace(slow, items_in=3, seconds=since_start))
    assert model(stats).works["slow"].each == pytest.approx(10)


def test_model_omits_stage_that_has_taken_no_items() -> None:
    assert "idle" not in model(chain(source(), stage("idle", 0.0, 0.0))).works
