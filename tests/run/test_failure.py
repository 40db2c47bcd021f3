"""Test R3 (Failure): an exception that no ``errors`` stream receives ends the run.

Sources stop, channels break and workers end. ``run()`` raises one RunError that contains StageErrors with
stage, item, worker and the original traceback. The first failure comes first. No error is lost, not even a
BaseException in a worker.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from runs import Gate, everywhere
from support.waiting import wait_until

from flowchan import Broken, Failed, Graph, In, Out, RunError, StageError
from flowchan.run.policy.failures import LostError


class UsersError(Exception):
    """User-defined exception with additional attributes."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message, code)
        self.code = code


class UnpicklableError(Exception):
    """Exception that cannot be pickled, because it has a lock."""

    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class NotRebuiltError(Exception):
    """Exception that can be pickled but not unpickled, because its constructor requires two arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class MuteError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class BrokenItem:
    def __repr__(self) -> str:
        raise SystemExit("no repr")


def fail_at_three(item: int) -> Any:
    if item == 3:
        raise UsersError("three", 33)
    return item


def fails(graph: Graph) -> tuple[StageError, ...]:
    with pytest.raises(RunError) as caught:
        graph.run()
    return caught.value.exceptions


def fails_once(graph: Graph) -> StageError:
    (error,) = fails(graph)
    return error


def raises(error: BaseException | type[BaseException]) -> Callable[[Any], Any]:
    def function(item: Any) -> Any:
        raise error

    return function


def text_of(error: BaseException) -> str:
    """Return the whole text that a user sees for an error."""
    return "".join(traceback.format_exception(error))


@everywhere
def test_failure_names_stage_item_and_worker_and_keeps_the_exception(on: Any) -> None:
    graph = Graph("r3")
    graph.source(range(10)).map(fail_at_three, on=on, name="decode").sink(print)
    error = fails_once(graph)
    assert (error.stage, error.item, error.worker) == ("decode", "3", "decode 1")
    assert isinstance(error.__cause__, UsersError)
    assert (error.__cause__.args, error.__cause__.code) == (("three", 33), 33)
    for word in ("'decode'", "item 3", "decode 1", "pid", "UsersError"):
        assert word in str(error)


@everywhere
def test_failure_shows_the_original_traceback(on: Any) -> None:
    graph = Graph("r3")
    graph.source(range(10)).map(fail_at_three, on=on).sink(print)
    shown = text_of(fails_once(graph))
    assert 'raise UsersError("three", 33)' in shown
    assert "in fail_at_three" in shown


@everywhere
def test_causes_of_an_exception_are_shown(on: Any) -> None:
    def chained(item: int) -> None:
        try:
            raise KeyError("the root")
        except KeyError as root:
            raise UsersError("on top", 1) from root

    graph = Graph("r3")
    graph.source([1]).map(chained, on=on).sink(print)
    shown = text_of(fails_once(graph))
    assert "the root" in shown
    assert "on top" in shown


@everywhere
@pytest.mark.parametrize("operator", ["map", "filter", "flat_map", "sink"])
def test_function_that_raises_fails_the_run(operator: str, on: Any) -> None:
    graph = Graph("r3")
    stream = getattr(graph.source(itertools.count), operator)(fail_at_three, on=on, name="bad")
    if stream is not None:
        stream.sink(id)
    error = fails_once(graph)
    assert error.stage == "bad"


@everywhere
def test_partition_key_that_raises_fails_the_run(on: Any) -> None:
    graph = Graph("r3")
    for branch in graph.source(itertools.count).partition(fail_at_three, 2, on=on, name="bad"):
        branch.sink(id)
    assert fails_once(graph).stage == "bad"


def test_reduce_that_raises_fails_the_run() -> None:
    graph = Graph("r3")
    graph.source(range(10)).reduce(lambda so_far, item: so_far + fail_at_three(item), 0, name="bad")
    error = fails_once(graph)
    assert (error.stage, error.item) == ("bad", "3")


@everywhere
def test_source_that_raises_midway_fails_the_run(on: Any) -> None:
    def half_way() -> Iterator[int]:
        yield from range(5)
        raise UsersError("half way", 5)

    graph = Graph("r3")
    graph.source(half_way, on=on).sink(id)
    error = fails_once(graph)
    assert (error.stage, error.item, type(error.__cause__)) == ("half_way", None, UsersError)


@everywhere
def test_source_that_cannot_be_called_fails_the_run(on: Any) -> None:
    graph = Graph("r3")
    graph.source(fail_at_three, 3, on=on).sink(id)
    assert isinstance(fails_once(graph).__cause__, UsersError)


@everywhere
def test_generator_that_raises_midway_fails_the_run_with_its_item(on: Any) -> None:
    def half_way(item: int) -> Iterator[int]:
        yield item
        raise UsersError("half way", item)

    graph = Graph("r3")
    graph.source([7]).flat_map(half_way, on=on).sink(id)
    error = fails_once(graph)
    assert (error.item, type(error.__cause__)) == ("7", UsersError)


@everywhere
def test_flat_map_without_an_iterable_fails_the_run(on: Any) -> None:
    graph = Graph("r3")
    graph.source([7]).flat_map(abs, on=on).sink(id)
    assert "must return an iterable, got 7" in str(fails_once(graph))


def test_element_that_is_not_iterable_fails_unbatch() -> None:
    graph = Graph("r3")
    graph.source([[1], 2]).unbatch(name="bad").sink(id)
    error = fails_once(graph)
    assert (error.stage, error.item) == ("bad", "2")


@everywhere
def test_general_stage_that_raises_fails_the_run(on: Any) -> None:
    def bad(items: In[int], out: Out[int]) -> None:
        for item in items:
            out.put(fail_at_three(item))

    graph = Graph("r3")
    graph.stage(bad, graph.source(itertools.count), on=on).sink(id)
    error = fails_once(graph)
    assert (error.stage, type(error.__cause__)) == ("bad", UsersError)


@everywhere
def test_constructor_that_raises_fails_the_run(on: Any) -> None:
    class Model:
        def __init__(self) -> None:
            raise UsersError("no weights", 404)

        def __call__(self, item: int) -> int:
            return item

    graph = Graph("r3")
    graph.source(itertools.count).map(Model, on=on).sink(id)
    error = fails_once(graph)
    assert (error.stage, error.item, type(error.__cause__)) == ("Model", None, UsersError)


@everywhere
def test_close_that_raises_fails_the_run(on: Any) -> None:
    class Model:
        def __call__(self, item: int) -> int:
            return item

        def close(self) -> None:
            raise UsersError("disk full", 28)

    graph = Graph("r3")
    graph.source(range(3)).map(Model, on=on).sink(id)
    assert isinstance(fails_once(graph).__cause__, UsersError)


@everywhere
def test_close_that_raises_does_not_hide_an_earlier_failure(on: Any) -> None:
    class Model:
        def __call__(self, item: int) -> int:
            raise UsersError("first", 1)

        def close(self) -> None:
            raise UsersError("second", 2)

    graph = Graph("r3")
    graph.source(range(3)).map(Model, on=on).sink(id)
    shown = text_of(fails(graph)[0])
    assert "first" in shown
    assert "second" in shown


@everywhere
@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), BaseException("base")]
)
def test_base_exception_in_a_worker_fails_the_run(error: BaseException, on: Any) -> None:
    graph = Graph("r3")
    graph.source(itertools.count).map(raises(error), on=on, name="bad", retries=3).sink(id)
    failed = fails_once(graph)
    assert (failed.stage, failed.item, type(failed.__cause__)) == ("bad", "0", type(error))


@everywhere
def test_sys_exit_called_by_a_source_fails_the_run(on: Any) -> None:
    graph = Graph("r3")
    graph.source(sys.exit, "enough", on=on, name="bad").sink(id)
    assert isinstance(fails_once(graph).__cause__, SystemExit)


@everywhere
def test_base_exception_does_not_go_to_the_errors_stream(on: Any) -> None:
    graph = Graph("r3")
    mapped = graph.source([1]).map(raises(SystemExit), on=on)
    mapped.sink(id)
    mapped.errors.sink(print)
    assert isinstance(fails_once(graph).__cause__, SystemExit)


@everywhere
def test_errors_from_user_channels_are_failures(on: Any) -> None:
    graph = Graph("r3")
    graph.source([1]).map(raises(Broken("a channel of the user's")), on=on).sink(id)
    assert isinstance(fails_once(graph).__cause__, Broken)


def test_unpicklable_exception_arrives_as_text() -> None:
    graph = Graph("r3")
    graph.source([1]).map(lambda _: raises(UnpicklableError())(1), on="process").sink(id)
    error = fails_once(graph)
    assert isinstance(error.__cause__, LostError)
    assert "UnpicklableError: holds a lock" in str(error)
    assert re.search(r"in the worker \S+ 1:", text_of(error))


def test_unpicklable_exception_passes_unchanged_between_threads() -> None:
    graph = Graph("r3")
    graph.source([1]).map(raises(UnpicklableError())).sink(id)
    assert isinstance(fails_once(graph).__cause__, UnpicklableError)


def test_exception_that_cannot_be_rebuilt_arrives_as_text() -> None:
    graph = Graph("r3")
    graph.source([1]).map(lambda _: raises(NotRebuiltError("this", "that"))(1), on="process").sink(id)
    error = fails_once(graph)
    assert "NotRebuiltError: this and that" in str(error)


def test_exception_that_pickles_without_notes_keeps_its_traceback() -> None:
    graph = Graph("r3")
    graph.source(["{"]).map(json.loads, on="process").sink(id)
    error = fails_once(graph)
    assert isinstance(error.__cause__, json.JSONDecodeError)
    assert re.search(r"in the worker \S+ 1:", text_of(error))


@everywhere
def test_exception_with_failing_str_is_reported(on: Any) -> None:
    graph = Graph("r3")
    graph.source([1]).map(lambda _: raises(MuteError())(1), on=on).sink(id)
    assert "MuteError" in str(fails_once(graph))


@everywhere
def test_item_with_failing_repr_is_reported(on: Any) -> None:
    graph = Graph("r3")
    graph.source([BrokenItem()]).map(raises(UsersError("x", 1)), on=on).sink(id)
    assert fails_once(graph).item == "<BrokenItem whose repr raises SystemExit>"


@pytest.mark.parametrize("operator", ["map", "flat_map"])
def test_result_that_cannot_be_sent_fails_with_its_item(operator: str) -> None:
    def locks(item: int) -> Any:
        return [threading.Lock()]

    graph = Graph("r3")
    getattr(graph.source([5]), operator)(locks, on="process", name="locks").sink(id)
    error = fails_once(graph)
    assert (error.stage, error.item) == ("locks", "5")
    assert "lock" in str(error)


@everywhere
def test_first_failure_is_listed_first(on: Any) -> None:
    entered, first_failure_is_reported = Gate(), Gate()

    def second(item: int) -> None:
        entered.open()
        first_failure_is_reported.wait()
        raise UsersError("second", 2)

    def first(item: int) -> None:
        entered.wait()
        raise UsersError("first", 1)

    graph = Graph("r3")
    left, right = graph.source([1]).tee(2)
    left.sink(first, on=on)
    right.sink(second, on=on)
    run = graph.start()
    wait_until(lambda: bool(run._supervisor.state.failures))
    first_failure_is_reported.open()
    with pytest.raises(RunError) as caught:
        run.wait()
    assert [error.stage for error in caught.value.exceptions] == ["first", "second"]


@everywhere
def test_failure_ends_workers_that_wait_for_their_channels(on: Any) -> None:
    """Each stage is waiting to put or to get when another stage fails."""
    gate = Gate()

    def hold(item: int) -> int:
        gate.wait()
        raise UsersError("late", 1)

    graph = Graph("r3")
    held = graph.source(itertools.count, on=on, capacity=1).map(abs, on=on, capacity=1)
    held.map(hold, on=on, name="hold").map(abs, on=on).sink(id, on=on)
    run = graph.start()
    gate.wait_held()
    gate.open()
    with pytest.raises(RunError) as caught:
        run.wait()
    assert [error.stage for error in caught.value.exceptions] == ["hold"]
    assert run.stats().state == "failed"


@everywhere
def test_failures_in_an_errors_stream_do_not_end_the_run(on: Any) -> None:
    graph = Graph("r3")
    mapped = graph.source(range(6)).map(fail_at_three, on=on, workers=2)
    good, bad = mapped.collect(), mapped.errors.collect()
    results = graph.run()
    assert results[good] == [0, 1, 2, 4, 5]
    (failed,) = results[bad]
    assert isinstance(failed, Failed)
    assert (failed.item, type(failed.error), failed.attempts) == (3, UsersError, 1)


@pytest.mark.parametrize(
    ("on", "reader"), [("thread", "process"), ("process", "thread"), ("process", "process")]
)
def test_errors_stream_between_placements_carries_any_exception(on: Any, reader: Any) -> None:
    def fail(item: int) -> None:
        raise (UnpicklableError(), NotRebuiltError("a", "b"), json.JSONDecodeError("bad", "{", 1))[item]

    def described(failed: Failed) -> str:
        return f"{type(failed.error).__name__} {failed.error} {failed.error.__notes__}"

    graph = Graph("r3")
    mapped = graph.source(range(3)).map(fail, on=on)
    mapped.sink(id)
    texts = mapped.errors.map(described, on=reader).collect()
    lost, not_rebuilt, decode = graph.run()[texts]
    assert "LostError UnpicklableError: holds a lock" in lost
    assert "NotRebuiltError: a and b" in not_rebuilt
    assert decode.startswith("JSONDecodeError")
    assert all("in the worker fail 1:" in text and "in fail" in text for text in (lost, not_rebuilt, decode))


def test_item_that_the_errors_stream_cannot_carry_fails_the_run() -> None:
    graph = Graph("r3")
    mapped = graph.source([threading.Lock()]).map(raises(UsersError("x", 1)))
    mapped.sink(id)
    mapped.errors.sink(id, on="process")
    error = fails_once(graph)
    assert isinstance(error.__cause__, UsersError)
    assert "the errors stream did not accept the item" in text_of(error)


def test_run_error_is_an_exception_group() -> None:
    graph = Graph("r3")
    graph.source([1]).map(raises(UsersError("x", 1))).sink(id)
    caught = None
    try:
        graph.run()
    except* StageError as group:
        caught = group
    assert caught is not None
    assert isinstance(caught, RunError)


@everywhere
def test_graph_runs_again_after_a_failure(on: Any) -> None:
    graph = Graph("r3")
    numbers = graph.input()
    mapped = numbers.map(fail_at_three, on=on).collect()
    run = graph.start()
    run[numbers].put(3)
    with pytest.raises(RunError):
        run.wait()
    run = graph.start()
    run[numbers].put(4)
    run[numbers].close()
    assert run.wait()[mapped] == [4]


@everywhere
@pytest.mark.parametrize("culprit", ["source", "map", "stage"])
def test_stages_after_a_failed_stage_see_a_broken_channel(culprit: str, on: Any) -> None:
    """A stage that saves its results when its input ends must not save half of them."""
    gate = Gate()  # opened only if a stage sees a clean end

    def half(out: Out[int]) -> None:
        out.put(1)
        raise UsersError("half way", 1)

    def half_of(items: In[int], out: Out[int]) -> None:
        out.put(items.get())
        raise UsersError("half way", 1)

    def save_at_the_end(items: In[int]) -> None:
        for _ in items:
            pass
        gate.open()

    graph = Graph("r3")
    stream = {
        "source": lambda: graph.stage(half, on=on),
        "map": lambda: graph.source(range(9)).map(fail_at_three, on=on),
        "stage": lambda: graph.stage(half_of, graph.source(range(9)), on=on),
    }[culprit]()
    graph.stage(save_at_the_end, stream)
    assert isinstance(fails_once(graph).__cause__, UsersError)
    assert not gate.channel.closed


@everywhere
def test_failed_item_is_not_repeated_by_another_worker(on: Any) -> None:
    graph = Graph("r3")
    graph.source(range(10)).map(fail_at_three, on=on, workers=3, name="map").sink(id)
    run = graph.start()
    with pytest.raises(RunError) as caught:
        run.wait()
    assert [error.item for error in caught.value.exceptions] == ["3"]
