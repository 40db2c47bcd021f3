"""Test how many workers the policy chooses for stages with ``workers="auto"``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from flowchan.run.policy.autoscale import (
    BLOCKED_WINDOWS,
    IDLE_WINDOWS,
    LEAST_ITEMS,
    AutoLimit,
    FreeMemory,
    Scaler,
    choose,
    pinned,
)
from flowchan.run.policy.scaling import Scale, ScalingDecision
from flowchan.run.policy.stats import Cause, CauseKind, RunStats, StageStats

PLENTY = FreeMemory()


def stage_stats(name: str, workers: int, rate: float, busy: float) -> StageStats:
    return StageStats(
        name,
        "map",
        "thread",
        workers,
        workers,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        rate,
        busy,
        1 - busy,
        0.0,
        working=workers,
    )


@dataclass(frozen=True)
class Line:
    """A chain of stages with fixed work times, and bounds that a real run may have.

    ``most`` bounds the rate of the run. ``hidden`` is another bound, but the model does not know it.
    """

    seconds: Mapping[str, float]
    most: float = math.inf
    hidden: float = math.inf

    def rate(self, workers: Mapping[str, int]) -> float:
        return min(self.most, *(workers.get(name, 1) / each for name, each in self.seconds.items()))

    def window(self, workers: Mapping[str, int], cause: CauseKind | None = None, at: float = 1.0) -> RunStats:
        rate = min(self.hidden, self.rate(workers))
        stages = tuple(
            stage_stats(name, workers[name], rate, min(1.0, rate * each / workers[name]))
            for name, each in self.seconds.items()
        )
        # upstream stages wait for room only when their channels are full, so the slowest stage is always busy
        return RunStats(
            "graph", "running", at, stages, (), None, window=1.0, cause=cause and Cause(cause, None, "")
        )


@dataclass
class Played:
    """A simulated run, with statistics only: each decision takes effect in the next window."""

    line: Line
    limits: Mapping[str, AutoLimit]
    workers: dict[str, int] = field(default_factory=dict)
    memory: FreeMemory = PLENTY
    cause: CauseKind | None = None

    def __post_init__(self) -> None:
        self.scaler = Scaler(self.limits)
        self.workers = {**dict.fromkeys(self.line.seconds, 1), **self.workers}

    def play(self, windows: int = 1) -> list[dict[str, int]]:
        """Simulate some windows, and return each stage's number of workers after each window."""
        seen = []
        for _ in range(windows):
            window = self.line.window(self.workers, self.cause)
            self.scaler, made = choose(self.scaler, window, lambda _: self.line, self.memory)
            self.workers.update((decision.stage, decision.workers) for decision in made)
            seen.append(dict(self.workers))
        return seen


def own(most: int, own_process: bool = False, *stages: str) -> dict[str, AutoLimit]:
    """Return a separate limit for each stage."""
    return {name: AutoLimit(most, name, own_process) for name in stages or ("a", "b")}


def shared(most: int) -> dict[str, AutoLimit]:
    return {name: AutoLimit(most, "both", False) for name in ("a", "b")}


def numbers(seen: list[dict[str, int]], stage: str) -> list[int]:
    return [workers[stage] for workers in seen]


# --- more workers ---


def test_workers_of_bottleneck_at_most_double_per_window() -> None:
    played = Played(Line({"a": 0.1, "b": 0.001}), own(32))
    assert numbers(played.play(6), "a") == [2, 4, 8, 16, 32, 32]
    assert played.workers["b"] == 1


def test_no_workers_are_added_beyond_a_fixed_bound() -> None:
    played = Played(Line({"a": 0.1, "b": 0.001}, most=50.0), own(32))
    assert numbers(played.play(4), "a") == [2, 4, 5, 5]


@pytest.mark.parametrize(("most", "after"), [(10.4, 1), (10.6, 2)])
def test_workers_are_added_only_if_predicted_gain_reaches_5_percent(most: float, after: int) -> None:
    played = Played(Line({"a": 0.1, "b": 0.001}, most=most), own(32))
    assert numbers(played.play(), "a") == [after]


def test_stages_that_share_a_limit_split_workers_optimally() -> None:
    played = Played(Line({"a": 0.017, "b": 0.021}), shared(8))
    assert played.play(3)[-1] == {"a": 4, "b": 4}
    assert played.line.rate(played.workers) == max(
        played.line.rate({"a": one, "b": 8 - one}) for one in range(1, 8)
    )


def test_workers_move_between_stages_once_shared_limit_is_reached() -> None:
    """Doubling alone would give each stage 64 workers, and the run would be 9 % slower."""
    played = Played(Line({"a": 0.17, "b": 0.21}), shared(128))
    played.play(12)
    best = max(played.line.rate({"a": one, "b": 128 - one}) for one in range(1, 128))
    assert sum(played.workers.values()) <= 128
    assert played.line.rate(played.workers) >= 0.97 * best


def test_stage_with_separate_limit_keeps_workers_when_another_gains_some() -> None:
    played = Played(Line({"a": 0.1, "b": 0.15}), own(4), workers={"a": 4, "b": 2})
    assert played.play(1)[-1] == {"a": 4, "b": 4}


def test_partly_idle_stage_gains_no_workers() -> None:
    line = Line({"a": 0.1, "b": 0.001})
    window = line.window({"a": 1, "b": 1})
    waiting = tuple(dataclasses.replace(stage, busy=0.8) for stage in window.stages)
    _, made = choose(Scaler(own(8)), dataclasses.replace(window, stages=waiting), lambda _: line, PLENTY)
    assert made == ()


def test_decision_reason_states_load_and_predicted_rate() -> None:
    played = Played(Line({"a": 0.1, "b": 0.001}), own(8))
    played.play()
    assert played.scaler.decisions == (
        ScalingDecision(1.0, "a", 1, 2, "busy 100 % of the time; 2.00 × the rate is predicted"),
    )


# --- resources ---


@pytest.mark.parametrize(("own_process", "after"), [(False, 1), (True, 2)])
def test_threads_are_not_added_while_the_gil_limits_the_run(own_process: bool, after: int) -> None:
    played = Played(Line({"a": 0.1, "b": 0.001}), own(8, own_process), cause="gil")
    assert numbers(played.play(), "a") == [after]


@pytest.mark.parametrize("own_process", [False, True])
def test_no_workers_are_added_while_all_cores_are_in_use(own_process: bool) -> None:
    played = Played(Line({"a": 0.1, "b": 0.001}), own(8, own_process), cause="cores")
    assert numbers(played.play(), "a") == [1]


@pytest.mark.parametrize(("free", "after"), [(-5.0, 2), (99.0, 2), (100.0, 3), (250.0, 4), (math.inf, 4)])
def test_process_is_added_only_if_enough_memory_is_free(free: float, after: int) -> None:
    memory = FreeMemory(free, {"a": 100})
    played = Played(Line({"a": 0.1, "b": 0.001}), own(8, True), {"a": 2}, memory)
    assert numbers(played.play(), "a") == [after]


def test_new_processes_of_several_stages_share_the_free_memory() -> None:
    memory = FreeMemory(300.0, {"a": 100, "b": 100})
    played = Played(Line({"a": 0.1, "b": 0.1}), own(8, True), {"a": 2, "b": 2}, memory)
    assert sum(played.play()[-1].values()) <= 4 + 3


def test_threads_are_added_without_free_memory() -> None:
    played = Played(Line({"a": 0.1, "b": 0.001}), own(8), memory=FreeMemory(0.0, {}))
    assert numbers(played.play(), "a") == [2]


def test_stage_at_its_rate_limit_gains_no_workers() -> None:
    line = Line({"a": 0.1})
    window = line.window({"a": 1})
    limited = tuple(dataclasses.replace(stage, rate_limit=10.0) for stage in window.stages)
    _, made = choose(
        Scaler(own(8, False, "a")), dataclasses.replace(window, stages=limited), lambda _: line, PLENTY
    )
    assert made == ()


# --- whether a change is kept ---


def test_increase_that_does_not_raise_the_rate_is_reverted() -> None:
    played = Played(Line({"a": 0.1, "b": 0.001}, hidden=10.0), own(8))
    assert numbers(played.play(2), "a") == [2, 1]
    grown, reverted = played.scaler.decisions
    assert grown.outcome == "reverted: 1.00 × the rate"
    assert (reverted.workers_before, reverted.workers) == (2, 1)
    assert reverted.reason == "2 workers gave 1.00 × the rate of 1"


def test_increase_that_raises_the_rate_is_kept() -> None:
    played = Played(Line({"a": 0.1, "b": 0.001}), own(2))
    played.play(2)
    assert [decision.outcome for decision in played.scaler.decisions] == ["kept: 2.00 × the rate"]


def test_reverted_increase_is_blocked_for_ten_windows() -> None:
    played = Played(Line({"a": 0.1, "b": 0.001}, hidden=10.0), own(8))
    seen = numbers(played.play(2 + BLOCKED_WINDOWS + 1), "a")
    assert seen == [2, 1, *[1] * BLOCKED_WINDOWS, 2]


def test_increase_is_kept_if_the_input_becomes_slow() -> None:
    played = Played(Line({"a": 0.1, "b": 0.001}), own(8))
    played.play()
    played.line, played.cause = dataclasses.replace(played.line, most=5.0), "input"
    assert numbers(played.play(), "a") == [2]
    assert played.scaler.decisions[0].outcome == "kept: 0.50 × the rate"
    assert not played.scaler.blocked


def test_change_of_a_stage_that_has_ended_is_not_checked() -> None:
    played = Played(Line({"a": 0.1, "b": 0.001}), own(8))
    played.play()
    window = played.line.window(played.workers)
    ended = tuple(dataclasses.replace(stage, working=0, alive=0) for stage in window.stages)
    scaler, made = choose(
        played.scaler, dataclasses.replace(window, stages=ended), lambda _: played.line, PLENTY
    )
    assert (made, scaler.trial) == ((), None)
    assert scaler.decisions[0].outcome == "not checked, because the stage ended"


# --- fewer workers ---


def test_idle_stage_loses_at_most_half_of_its_workers() -> None:
    played = Played(Line({"a": 0.1, "b": 0.001}, most=5.0), own(8), {"a": 8})
    assert numbers(played.play(2 * IDLE_WINDOWS + 1), "a") == [8, 8, 4, 4, 4, 2, 2]


def test_stage_keeps_workers_needed_in_its_busiest_window() -> None:
    """Three workers instead of four would each be busy 83 % of the time."""
    played = Played(Line({"a": 0.1, "b": 0.001}, most=25.0), own(8), {"a": 4})
    assert numbers(played.play(5), "a") == [4] * 5


def test_one_busy_window_restarts_the_count_of_idle_windows() -> None:
    played = Played(Line({"a": 0.1, "b": 0.001}, most=5.0), own(8), {"a": 2})
    played.play(2)
    played.line = dataclasses.replace(played.line, most=15.0)
    played.play()
    played.line = dataclasses.replace(played.line, most=5.0)
    assert numbers(played.play(3), "a") == [2, 2, 1]


def test_reduction_that_slows_a_busy_stage_is_reverted_and_blocked() -> None:
    played = Played(Line({"a": 0.1, "b": 0.001}, most=10.0), own(8, False, "a"), {"a": 4})
    played.play(IDLE_WINDOWS)
    assert played.workers["a"] == 2
    played.line = Line({"a": 0.25, "b": 0.001}, most=10.0)
    assert numbers(played.play(), "a") == [4]
    assert played.scaler.decisions[0].outcome == "reverted: 0.80 × the rate"
    assert ("a", False) in played.scaler.blocked


def test_reduction_is_kept_if_something_else_lowered_the_rate() -> None:
    played = Played(Line({"a": 0.1, "b": 0.001}, most=10.0), own(8, False, "a"), {"a": 4})
    played.play(IDLE_WINDOWS)
    played.line = dataclasses.replace(played.line, most=2.0)
    played.play()
    assert played.workers["a"] == 2
    assert played.scaler.decisions[0].outcome == "kept: 0.20 × the rate"


# --- windows, and run.scale() ---


def test_window_is_extended_if_a_changed_stage_took_few_items() -> None:
    played = Played(Line({"a": 0.01, "b": 0.001}), own(8))
    played.play()
    window = played.line.window(played.workers)
    slow = tuple(dataclasses.replace(stage, busy=0.1, rate=LEAST_ITEMS - 1) for stage in window.stages)
    slow_window = dataclasses.replace(window, stages=slow)
    assert not played.scaler.full(slow_window)
    assert Scaler(own(8)).full(slow_window)


def test_first_window_starts_once_all_workers_have_begun() -> None:
    line = Line({"a": 0.1, "b": 0.001})
    window = line.window({"a": 1, "b": 1})
    starting = (window.stages[0], dataclasses.replace(window.stages[1], starting=1))
    assert not Scaler(own(8)).ready(dataclasses.replace(window, stages=starting))
    assert Scaler(own(8, False, "a")).ready(dataclasses.replace(window, stages=starting))


def test_next_window_starts_once_new_workers_have_begun() -> None:
    played = Played(Line({"a": 0.1, "b": 0.001}), own(8))
    played.play()
    window = played.line.window(played.workers)
    starting = (dataclasses.replace(window.stages[0], starting=1), window.stages[1])
    assert not played.scaler.ready(dataclasses.replace(window, stages=starting))
    assert played.scaler.ready(window)


@pytest.mark.parametrize(
    ("seconds", "items", "busy", "full"),
    [
        (0.9, 100, 1.0, False), (1.0, LEAST_ITEMS, 1.0, True), (1.0, LEAST_ITEMS - 1, 1.0, False),
        (10.0, 2, 1.0, True), (10.0, 1, 1.0, False), (10.0, 0, 0.0, True), (60.0, 0, 1.0, True),
    ],
)  # fmt: skip
def test_window_ends_after_enough_items_or_enough_time(
    seconds: float, items: int, busy: float, full: bool
) -> None:
    stats = RunStats(
        "graph", "running", seconds, (stage_stats("a", 1, items / seconds, busy),), (), None, window=seconds
    )
    assert Scaler(own(8)).full(stats) is full


def test_run_scale_pins_number_of_workers() -> None:
    played = Played(Line({"a": 0.1, "b": 0.001}), own(8))
    played.scaler = pinned(played.scaler, 2.0, 1, Scale("a", 3))
    decision = ScalingDecision(2.0, "a", 1, 3, "run.scale() was called", "pinned")
    assert played.scaler.decisions == (decision,)
    assert numbers(played.play(), "a") == [1]
    assert pinned(played.scaler, 3.0, 3, Scale("a", 4)) == played.scaler
