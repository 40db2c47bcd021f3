"""Test R10: an item that cannot be unpickled is an ordinary failed item and does not affect other items."""

from __future__ import annotations

import pytest

from flowchan import Broken, Failed, Graph, RunError, Unreadable


class NeverArrives:
    def __reduce__(self):
        return fails, ()


def fails():
    raise ArithmeticError("no way to read me back")


def items(number):
    return NeverArrives() if number % 4 == 2 else number


def double(number):
    return 2 * number


async def double_async(number):
    return 2 * number


def is_failure(failed):
    return (
        type(failed) is Failed
        and type(failed.item) is Unreadable
        and b"fails" in failed.item.data
        and type(failed.error) is ArithmeticError
        and failed.attempts == 0
    )


# the third case is an async stage, which runs on threads of this process
@pytest.mark.parametrize(
    ("function", "on"), [(double, "thread"), (double, "process"), (double_async, "thread")]
)
def test_item_that_cannot_be_unpickled_goes_to_the_errors_stream(function, on):
    """Test R10: the items before and after the unreadable item pass in order."""
    graph = Graph("unreadable")
    made = graph.source(range(8)).map(items, on="process")
    doubled = made.map(function, on=on, workers=2)
    good, bad = doubled.collect(), doubled.errors.collect()
    results = graph.run()
    assert results[good] == [2 * number for number in range(8) if number % 4 != 2]
    assert [is_failure(failed) for failed in results[bad]] == [True, True]


def test_unreadable_item_ends_the_run_if_errors_are_unread():
    """Test R10: the failure names the unreadable item instead of None."""
    graph = Graph("unreadable")
    graph.source(range(8)).map(items, on="process").sink(id, name="last")
    with pytest.raises(RunError) as caught:
        graph.run()
    (error,) = caught.value.exceptions
    assert error.stage == "last"
    assert error.item.startswith("<an item that can't be unpickled, ")
    assert type(error.__cause__) is ArithmeticError


class FailsBy:
    def __init__(self, kind):
        self.kind = kind

    def __reduce__(self):
        return raise_it, (self.kind,)


def raise_it(kind):
    raise kind("no way to read me back")


@pytest.mark.parametrize("kind", [ArithmeticError, ValueError, Broken])
def test_unreadable_item_in_collect_ends_a_run_with_input(kind):
    """Test R3 and R10 for each kind of error that unpickling the item may raise."""
    graph = Graph("unreadable")
    kinds = graph.input()
    result = kinds.map(FailsBy, on="process").collect(name="last")
    run = graph.start()
    run[kinds].put(kind)
    run[kinds].close()
    with pytest.raises(RunError) as caught:
        run.wait(timeout=60)
    (error,) = caught.value.exceptions
    assert error.stage == result.stage
    assert type(error.__cause__) is kind


def test_unreadable_item_in_collect_ends_the_run():
    """Test R10 for ``collect``, which takes many items at once."""
    graph = Graph("unreadable")
    graph.source(range(8)).map(items, on="process").collect()
    with pytest.raises(RunError) as caught:
        graph.run()
    assert caught.value.exceptions[0].item.startswith("<an item that can't be unpickled, ")
