"""Test each bound of the throughput model, on statistics made by hand."""

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


def test_rate_without_a_change_is_the_measured_rate() -> None:
    assert model(chain(source(), stage("slow", 0.01))).rate() == pytest.approx(100, rel=0.02)


def test_rate_with_variable_work_times_is_the_measured_rate() -> None:
    """No stage is always busy, because the stages wait for each other."""
    blocked = model(chain(source(), stage("a", 0.007, wait="place"), stage("b", 0.007)))
    assert blocked.rate() == pytest.approx(100, rel=0.02)
    assert gain(blocked, Change({"a": 2})) == pytest.approx(1 / 0.7 / (1 + 2**-1.94) ** (1 / 1.94), rel=0.02)


def test_workers_raise_the_rate_up_to_the_next_bound() -> None:
    one = model(chain(source(), stage("slow", 0.01), stage("next", 0.004)))
    assert one.limited_by() == "slow"
    assert one.rate({"slow": 2}) == pytest.approx(200, rel=0.05)
    assert one.rate({"slow": 8}) == pytest.approx(250, rel=0.05)
    assert one.limited_by({"slow": 8}) == "next"


def test_workers_of_other_stages_do_not_raise_the_rate() -> None:
    one = model(chain(source(), stage("slow", 0.01), stage("next", 0.004)))
    assert one.rate({"next": 4}) == pytest.approx(one.rate(), rel=0.01)


def test_fewer_workers_lower_the_rate() -> None:
    one = model(chain(source(400), stage("slow", 0.01, 400, workers=4)))
    assert one.rate({"slow": 2}) == pytest.approx(200, rel=0.02)


def test_twice_the_speed_halves_the_work_time() -> None:
    one = model(chain(source(), stage("slow", 0.01), stage("next", 0.001)))
    assert gain(one, Change(faster={"slow": 2.0})) == pytest.approx(2, rel=0.02)


def test_items_that_a_stage_adds_count_for_later_stages() -> None:
    """Stage b takes 10 items of 1 ms per item of stage a, which takes 5 ms."""
    one = model(chain(source(), stage("a", 0.005, out=10), stage("b", 0.001, 1000)))
    assert one.bounds()["a"] == pytest.approx(200)
    assert one.bounds()["b"] == pytest.approx(100)


def test_batches_count_once_for_later_stages() -> None:
    one = model(chain(source(), stage("batch", 0.0, kind="batch", out=0.1), stage("b", 0.05, 10)))
    assert one.bounds()["b"] == pytest.approx(200)


def test_two_sources_count_by_their_items() -> None:
    """Stage b takes 100 items of both sources per second, and 75 of them come from the first one."""
    first, second = source(75, "first"), source(25, "second")
    both = stage("b", 0.01, 100, kind="merge")
    stats = chain(first, both)
    edge = EdgeStats("second", "second", "b", "threads", 0, 64, 50, 25.0)
    stats = dataclasses.replace(stats, stages=(second, *stats.stages), edges=(*stats.edges, edge))
    one = model(stats)
    assert one.works["first"].visits == 0.75
    assert one.works["b"].visits == pytest.approx(1)
    assert one.rate() == pytest.approx(100, rel=0.02)


def test_interpreter_lock_bounds_threads_that_compute() -> None:
    burning = stage("burn", 0.02, 100, workers=2, cpu=0.009)
    one = model(chain(source(), burning))
    assert one.limited_by({"burn": 4}) == LOCK
    assert one.rate({"burn": 4}) / one.rate() < 1.15
    assert model(chain(source(), burning), gil=False).rate({"burn": 4}) == pytest.approx(200, rel=0.02)


def test_threads_that_use_several_cores_do_not_hold_the_lock() -> None:
    one = model(chain(source(), stage("numpy", 0.02, 100, workers=2, cpu=0.02)))
    assert one.rate({"numpy": 4}) / one.rate() == pytest.approx(2, rel=0.02)


def test_faster_thread_leaves_more_of_the_lock_to_others() -> None:
    """Each of two stages needs 5 ms of the lock, and waits for the other for 5 ms."""
    one = model(chain(source(), stage("a", 0.01, cpu=0.005), stage("b", 0.01, cpu=0.005)))
    assert gain(one, Change(faster={"a": 2.0})) == pytest.approx(4 / 3, rel=0.1)


def test_stage_on_processes_does_not_need_the_lock() -> None:
    one = model(chain(source(), stage("burn", 0.04, workers=4, cpu=0.0095)))
    assert one.limited_by() == LOCK
    assert gain(one, Change(on_process=("burn",))) > 3


def test_cores_bound_processes_that_compute() -> None:
    burning = stage("burn", 0.02, 100, workers=2, cpu=0.0195, on="process")
    one = model(chain(source(), burning), cores=2)
    assert one.limited_by({"burn": 4}) == CORES
    assert one.rate({"burn": 4}) / one.rate() == pytest.approx(1, abs=0.05)
    assert model(chain(source(), burning)).rate({"burn": 4}) == pytest.approx(200, rel=0.02)


def test_work_excludes_waits_for_a_core_that_the_run_causes() -> None:
    waiting = stage("burn", 0.04, 100, workers=4, cpu=0.02, ready=0.02, on="process")
    assert model(chain(source(), waiting), cores=2).works["burn"].each == pytest.approx(0.02)
    assert model(chain(source(), waiting), cores=8).works["burn"].each == pytest.approx(0.04)


def test_hosts_use_no_core_of_this_machine() -> None:
    remote = stage("burn", 0.01, cpu=None, on="pool", hosts=("there",))
    assert model(chain(source(), remote), cores=1).rate({"burn": 4}) == pytest.approx(400, rel=0.02)


def test_rate_limit_is_a_bound() -> None:
    one = model(chain(source(), stage("fetch", 0.01, rate_limit=100.0)))
    assert one.rate({"fetch": 4}) == pytest.approx(one.rate(), rel=0.01)
    assert one.limited_by({"fetch": 4}) == "fetch"


@pytest.mark.parametrize(
    ("kind", "limit"), [("input", "the input"), ("consumer", "the program"), ("memory", "the memory")]
)
def test_cause_outside_the_stages_is_a_bound(kind: str, limit: str) -> None:
    stats = chain(source(kind="input"), stage("work", 0.002), cause=(kind, None))  # type: ignore[arg-type]
    one = model(stats)
    assert one.limited_by() == limit
    assert one.rate({"work": 4}) == pytest.approx(one.rate(), rel=0.01)


def test_items_in_flight_bound_a_loop() -> None:
    """Two items are in the loop of p and q. Only a faster stage shortens the loop."""
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


def test_stage_that_has_taken_no_item_is_left_out() -> None:
    assert "idle" not in model(chain(source(), stage("idle", 0.0, 0.0))).works
