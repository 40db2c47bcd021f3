"""Invalid arguments raise an error that names the argument, its value and the allowed values.

C13: put raises if an item cannot be serialised. The error names the faulty part, and the channel stays
unchanged.
"""

from __future__ import annotations

import math
import pickle
import re
import threading
from dataclasses import dataclass, field

import pytest
from support.waiting import wait_blocked

from flowchan import Channel

MISUSE = (TypeError, ValueError)
UNPICKLABLE = (TypeError, ValueError, AttributeError, pickle.PicklingError)


@pytest.mark.parametrize("capacity", [0, -1, 2.0, "8", True])
def test_capacity_must_be_a_positive_int(make, capacity):
    with pytest.raises(MISUSE, match=rf"capacity.*{re.escape(repr(capacity))}") as caught:
        make(capacity)
    assert "1" in str(caught.value)


def test_error_of_capacity_0_names_an_alternative(make):
    with pytest.raises(
        ValueError,
        match=("capacity must be at least 1, got 0; to learn when an item is read, send an answer channel"),
    ):
        make(0)


def test_capacity_none_between_processes_raises():
    """C2: between processes, the capacity must be finite, because items need shared memory."""
    ch = Channel(None)
    assert repr(ch) == "<Channel(None, across='threads') open, 0 inside>"
    for number in range(100_000):
        ch.put_nowait(number)
    ch.close()
    assert list(ch) == list(range(100_000))
    for across in ("processes", "hosts"):
        with pytest.raises(
            ValueError, match=r"capacity must be an int with across='.*', got None.*capacity=10"
        ):
            Channel(None, across=across)


def test_capacity_beyond_the_limit_raises(make):
    """The error has the usual format, unlike an OverflowError."""
    with pytest.raises(ValueError, match="capacity"):
        make(1 << 70)


@pytest.mark.parametrize("across", ["moon", "", 3])
def test_unknown_transport_raises(across):
    with pytest.raises(MISUSE, match=rf"across.*{re.escape(repr(across))}") as caught:
        Channel(1, across=across)
    assert "threads" in str(caught.value)
    assert "processes" in str(caught.value)


@pytest.mark.parametrize("max_bytes", [0, -5, 1.5, "1k", True])
def test_max_bytes_must_be_a_positive_int(make, max_bytes):
    with pytest.raises(MISUSE, match=rf"max_bytes.*{re.escape(repr(max_bytes))}"):
        make(1, max_bytes=max_bytes)


@pytest.mark.parametrize("timeout", [-1, -0.001, math.nan, "1", True])
@pytest.mark.parametrize("call", ["put", "put_many", "get", "get_many"])
def test_timeout_must_be_a_non_negative_number(make, call, timeout):
    """The error comes whether or not the call would wait, and the channel stays unchanged."""
    ch = make(2)
    ch.put("inside")
    calls = {
        "put": lambda: ch.put(1, timeout=timeout),
        "put_many": lambda: ch.put_many([1], timeout=timeout),
        "get": lambda: ch.get(timeout=timeout),
        "get_many": lambda: ch.get_many(1, timeout=timeout),
    }
    with pytest.raises(MISUSE, match=rf"timeout.*{re.escape(repr(timeout))}"):
        calls[call]()
    assert ch.get_many(5) == ["inside"]


@pytest.mark.parametrize("most", [0, -1, "3", 1.0, True])
def test_get_many_rejects_max_that_is_not_a_positive_int(make, most):
    ch = make()
    ch.put("inside")
    with pytest.raises(MISUSE, match=rf"max.*{re.escape(repr(most))}"):
        ch.get_many(most)
    assert ch.get() == "inside"


def test_put_many_rejects_arguments_that_are_not_iterable(make):
    with pytest.raises(TypeError, match="int"):
        make().put_many(5)


def test_unknown_keyword_argument_raises(make):
    with pytest.raises(TypeError, match="block"):
        make().put(1, block=False)
    with pytest.raises(TypeError, match="maxsize"):
        make(1, maxsize=3)


def test_put_many_raises_the_error_from_its_iterable(make):
    """Items that were put earlier remain, and the channel still works."""
    ch = make()

    def broken():
        yield 1
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ch.put_many(broken())
    ch.put("next")
    assert ch.get_many(5) == [1, "next"]


def test_item_larger_than_max_bytes_raises_at_once(make):
    """The put raises even into a full channel, where other puts would wait."""
    ch = make(1, max_bytes=100_000)
    for _ in range(2):
        with pytest.raises(ValueError, match="max_bytes") as caught:
            ch.put(bytes(123_456))
        words = str(caught.value).replace(",", "").replace("_", "")
        numbers = [int(digits) for digits in re.findall(r"\d+", words)]
        assert 100_000 in numbers
        assert any(123_456 <= number < 125_000 for number in numbers)
        if len(ch) == 0:
            ch.put("inside")
    assert ch.get_many(5) == ["inside"]


@dataclass
class Order:
    number: int
    connection_lock: object = field(default_factory=threading.Lock)


@dataclass
class Basket:
    orders: dict


def holder_of_a_lock():
    captured_lock = threading.Lock()

    def function():
        return captured_lock

    return function


@pytest.mark.copying
@pytest.mark.parametrize(
    ("item", "part"),
    [
        (threading.Lock(), "lock"),
        (Order(3), "connection_lock"),
        (Basket({"monday": Order(3)}), "connection_lock"),
        ({"plain": 1, "sharp": threading.Lock()}, "sharp"),
        ([1, [2, (3, threading.Lock())]], "lock"),
        (holder_of_a_lock(), "captured_lock"),
        ((i for i in range(3)), "generator"),
    ],
    ids=["itself", "attribute", "attribute within", "key", "nested", "captured", "generator"],
)
def test_put_of_an_unpicklable_item_names_the_part(make, item, part):
    """C13: every method that puts raises this error, and the channel stays unchanged."""
    ch = make(2)
    ch.put("before")
    for put in (ch.put, ch.put_nowait, lambda item: ch.put_many([item])):
        with pytest.raises(UNPICKLABLE, match=re.escape(part)):
            put(item)
    assert len(ch) == 1
    assert ch.stats().items_in == 1
    ch.put("after")
    assert ch.get_many(5) == ["before", "after"]


@pytest.mark.copying
def test_unpicklable_item_in_put_many_does_not_affect_earlier_items(make):
    """C13: the earlier items are in the channel, and the error counts them."""
    ch = make()
    with pytest.raises(UNPICKLABLE) as caught:
        ch.put_many([1, 2, threading.Lock(), 4])
    assert caught.value.items_put == 2
    ch.close()
    assert list(ch) == [1, 2]


class FailsToPickle:
    def __reduce__(self):
        raise ArithmeticError("no way to write me down")


class FailsToUnpickle:
    def __reduce__(self):
        return fail_to_build, ()


def fail_to_build():
    raise ArithmeticError("no way to read me back")


@pytest.mark.copying
def test_error_raised_by_pickling_an_item_is_chained(make):
    """C13: the put raises the user's exception, or an exception that is chained to it."""
    ch = make()
    with pytest.raises(Exception, match="no way to write me down"):
        ch.put(FailsToPickle())
    ch.put("next")
    assert ch.get_many(5) == ["next"]


@pytest.mark.copying
def test_item_that_cannot_be_unpickled_raises_in_get_once(make):
    """C13: one call raises the user's exception, and later calls return the next items."""
    ch = make()
    ch.put_many([FailsToUnpickle(), "next"])
    with pytest.raises(Exception, match="no way to read me back"):
        ch.get()
    assert ch.get() == "next"
    assert len(ch) == 0


@pytest.mark.copying
def test_failed_put_does_not_wake_readers_or_block_writers(make, spawn_peer):
    """C13: a reader keeps waiting when a put fails."""
    ch = make()
    peer = spawn_peer(ch.get)
    wait_blocked(ch, readers=1)
    with pytest.raises(UNPICKLABLE):
        ch.put(threading.Lock())
    assert ch.stats().waiting_readers == 1
    ch.put("good")
    assert peer.result() == "good"


def test_any_object_can_be_an_item_between_threads():
    """C13: the object itself is passed, so nothing is serialised."""
    ch = Channel(across="threads")
    lock = threading.Lock()
    ch.put(lock)
    assert ch.get() is lock
