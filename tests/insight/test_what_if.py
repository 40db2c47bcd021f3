"""Test predictions and advice, on hand-made statistics and in real runs."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from support.waiting import wait_until
from throughput_samples import chain, source, stage

from flowchan import Graph, Prediction, Run, RunStats
from flowchan.run.observe.report import render
from flowchan.run.observe.what_if import advice, predict, predictions

SLOW = chain(source(), stage("slow", 0.01), stage("next", 0.004), cause=("bottleneck", "slow"))


def test_prediction_counts_items_that_leave_the_graph() -> None:
    halved = chain(source(), stage("slow", 0.01, out=0.5), stage("end", 0.001, 50))
    found = predict(halved, "slow", workers=1)
    assert found.now == 50
    assert found.predicted == pytest.approx(100, rel=0.02)


def test_predicted_rate_is_within_its_range() -> None:
    found = predict(SLOW, "slow", workers=1)
    assert found.low < found.predicted < found.high
    assert found.gain == pytest.approx(2, rel=0.02)


def test_predicted_range_is_wider_after_fewer_items() -> None:
    few = chain(source(4), stage("slow", 0.25, 4))
    many = chain(source(), stage("slow", 0.01))
    assert _width(predict(few, "slow", workers=1)) > _width(predict(many, "slow", workers=1)) + 0.2


def _width(found: Prediction) -> float:
    return (found.high - found.low) / found.predicted


def test_predicted_range_allows_for_code_that_releases_the_lock() -> None:
    found = predict(chain(source(), stage("burn", 0.01, cpu=0.01)), "burn", workers=1)
    assert found.limited_by == "the interpreter lock"
    assert found.predicted < 1.2 * found.now
    assert found.high > 1.9 * found.now


def test_predicted_range_of_an_ordered_stage_includes_the_current_rate() -> None:
    ordered = chain(
        source(), stage("s", 0.03, workers=8, wait="turn", waiting_turn=0.6), cause=("order", "s")
    )
    found = predict(ordered, "s", workers=8)
    assert found.low < found.now < found.predicted
    assert "its outputs wait for earlier items" in found.why


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"workers": 1}, "one more worker"),
        ({"workers": 3}, "3 more workers"),
        ({"workers": -1}, "one fewer worker"),
        ({"workers": 0}, "no change"),
        ({"faster": 2.0}, "twice as fast"),
        ({"faster": 1.5}, "1.5 times as fast"),
        ({"workers": 1, "faster": 2.0}, "one more worker and twice as fast"),
    ],
)
def test_prediction_describes_the_change(change: dict[str, Any], words: str) -> None:
    assert predict(chain(source(), stage("slow", 0.02, workers=2)), "slow", **change).change == words


def test_prediction_names_the_next_limit() -> None:
    found = predict(SLOW, "slow", workers=4)
    assert (found.limited_by, found.why) == ("next", "its worker spends 4 ms on an item")
    found = predict(SLOW, "slow", workers=1)
    assert (found.limited_by, found.why) == ("slow", "each of its 2 workers spends 10 ms on an item")


def test_prediction_explains_limit_outside_the_stages() -> None:
    found = predict(chain(source(), stage("work", 0.002), cause=("consumer", None)), "work", workers=1)
    assert (found.limited_by, found.why) == ("the program", "the program reads no more results")


def test_prediction_notes_that_workers_wait_for_a_core() -> None:
    found = predict(chain(source(), stage("slow", 0.01, ready=0.005)), "slow", workers=1)
    assert "workers wait for a core 50 % of the time" in found.why


def test_all_predictions_are_ranked_by_rate() -> None:
    stats = chain(source(), stage("slow", 0.01), stage("batch", 0.0, kind="batch"), stage("next", 0.004))
    found = predictions(stats)
    assert {one.stage for one in found[:2]} == {"slow"}
    assert [one.predicted for one in found] == sorted((one.predicted for one in found), reverse=True)
    changes = {(one.stage, one.change) for one in found}
    assert ("slow", "one more worker") in changes
    assert ("source", "twice as fast") in changes
    assert ("source", "one more worker") not in changes
    assert not any(stage == "batch" for stage, _ in changes)


# --- advice ---


def test_advice_names_number_of_workers_that_reaches_next_bound() -> None:
    assert advice(SLOW) == "1 more worker for 'slow' would give 2.0 × the rate"
    two = chain(source(), stage("slow", 0.04, workers=4), stage("n", 0.0066), cause=("bottleneck", "slow"))
    assert advice(two) == "2 more workers for 'slow' would give 1.5 × the rate"


def test_advice_suggests_processes_for_compute_bound_threads() -> None:
    burning = stage("burn", 0.04, workers=4, cpu=0.0095)
    found = advice(chain(source(), burning, cause=("gil", None)))
    assert found is not None
    assert found.startswith("on='process' for 'burn' would give ")
    alone = advice(chain(source(), stage("burn", 0.01, cpu=0.01), cause=("bottleneck", "burn")))
    assert alone is not None
    assert alone.startswith("on='process' and workers=2 for 'burn' would give 2.0 ×")


def test_advice_for_ordered_stage_gives_upper_limit_of_gain() -> None:
    ordered = chain(
        source(), stage("s", 0.03, workers=8, wait="turn", waiting_turn=0.6), cause=("order", "s")
    )
    assert advice(ordered) == "ordered=False or a larger buffer for 's' would give up to 2.7 × the rate"


def test_advice_names_buffer_between_stages_that_wait_alternately() -> None:
    """Work times vary, so stage a sometimes waits for room, and stage b sometimes waits for input."""
    varied = chain(source(), stage("a", 0.0065, wait="place"), stage("b", 0.007), cause=("bottleneck", "b"))
    assert advice(varied) == "a larger buffer before 'b' would give up to 1.4 × the rate"
    varied = chain(source(), stage("a", 0.007, wait="place"), stage("b", 0.0065), cause=("bottleneck", "a"))
    assert advice(varied) == "a larger buffer after 'a' would give up to 1.4 × the rate"


@pytest.mark.parametrize(
    "stats",
    [
        chain(source(), stage("slow", 0.002)),
        chain(source(), stage("slow", 0.005, wait="place"), cause=("bottleneck", "slow")),
        chain(source(kind="input"), stage("work", 0.002), cause=("input", "source")),
        chain(source(1), stage("slow", 1.0, 1), cause=("bottleneck", "slow")),
        chain(source(), stage("a", 0.01), stage("b", 0.0097), cause=("bottleneck", "a")),
        chain(source(), stage("fetch", 0.01, rate_limit=100.0), cause=("bottleneck", "fetch")),
    ],
    ids=["no cause", "idle stage", "input", "few items", "small gain", "rate limit"],
)
def test_no_advice_is_given_if_no_change_would_help(stats: RunStats) -> None:
    assert advice(stats) is None


def test_report_shows_the_advice() -> None:
    assert "advice: 1 more worker for 'slow' would give 2.0 × the rate" in render(SLOW).splitlines()


# --- real runs ---


def nap_2(item: Any) -> Any:
    time.sleep(0.002)
    return item


def nap_8(item: Any) -> Any:
    time.sleep(0.008)
    return item


def ended(graph: Graph) -> Run:
    run = graph.start()
    run.wait()
    return run


def test_predictions_rank_worker_for_slowest_stage_first() -> None:
    graph = Graph("two stages")
    graph.source(range(60)).map(nap_8, name="slow").sink(nap_2, name="end")
    run = ended(graph)
    more, other = run.what_if("slow", workers=+1), run.what_if("end", workers=+1)
    assert more.gain > other.gain  # the difference depends on the load of the machine
    assert more.limited_by == "slow"
    assert other.gain < 1.1
    assert {found.stage for found in run.what_if()[:2]} == {"slow"}


def test_prediction_for_many_workers_names_the_next_limit() -> None:
    graph = Graph("four to one")
    numbers = graph.source(range(60)).map(nap_8, name="slow", workers=2, on="process")
    numbers.sink(nap_2, name="end")
    run = ended(graph)
    assert run.what_if("slow", workers=+14).limited_by == "end"
    assert run.what_if("slow", workers=-1).gain < 0.7


def test_prediction_is_available_while_graph_runs() -> None:
    graph = Graph("running")
    slow = graph.source(itertools.count, capacity=4).map(nap_8, name="slow")
    slow.sink(nap_2, name="end")
    with graph.start() as run:
        wait_until(lambda: run.stats().stages[-1].items_in > 30)
        assert run.what_if(slow, faster=2.0, window=0.5).gain > 1.5
        run.abort()


# --- arguments ---


@pytest.fixture(scope="module")
def run() -> Run:
    graph = Graph("arguments")
    graph.source(range(10)).map(abs, name="abs").batch(5, name="pairs").sink(len, name="end")
    return ended(graph)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("abs",), ValueError, "workers or faster must be given"),
        (("abs", {"workers": 1.5}), TypeError, "workers must be an int"),
        (("abs", {"workers": -1}), ValueError, "must be at least 0, got -1; stage 'abs' has 1 now"),
        (("pairs", {"workers": 1}), ValueError, "stage 'pairs' is a batch, so its number of workers cannot"),
        (("abs", {"faster": 0}), ValueError, "faster must be greater than 0"),
        (("abs", {"faster": "twice"}), TypeError, "faster must be a number"),
        (("other", {"workers": 1}), KeyError, "no stage named 'other'; its stages are 'source', 'abs'"),
        ((None, {"workers": 1}), ValueError, "workers needs a stage"),
        (("abs", {"workers": 1, "window": -1}), ValueError, "window must be greater than 0"),
    ],
)
def test_error_names_the_wrong_argument(
    run: Run, arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    stage, *options = arguments
    with pytest.raises(error, match=message):
        run.what_if(stage, **(options[0] if options else {}))


def test_prediction_raises_if_no_item_has_left_the_graph() -> None:
    graph = Graph("empty")
    items = graph.input()
    items.map(abs, name="abs").sink(print)
    with graph.start() as run:
        with pytest.raises(RuntimeError, match="no item has left the graph in the last"):
            run.what_if()
        with pytest.raises(RuntimeError, match="no item has left the graph in the last"):
            run.what_if("abs", workers=1)
