"""Another process receives a value as an equal copy of the same type. Threads receive the object itself."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import math
import pathlib
import struct
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


class Colour(enum.Enum):
    RED = 1


class Point(NamedTuple):
    x: int
    y: int


@dataclasses.dataclass(frozen=True)
class Record:
    name: str
    values: tuple
    inner: Any = None


class Text(str):
    """A subclass of a built-in type, which must arrive as such."""


class Whole(int):
    pass


class Pair(tuple):
    pass


def same(sent: Any, arrived: Any) -> bool:
    """Return whether two values and all their parts are equal and of the same type.

    Floats are compared bit by bit.
    """
    if type(sent) is not type(arrived):
        return False
    if isinstance(sent, float):
        return struct.pack("d", sent) == struct.pack("d", arrived)
    if isinstance(sent, (tuple, list)):
        return len(sent) == len(arrived) and all(map(same, sent, arrived))
    if isinstance(sent, dict):
        return same(list(sent.items()), list(arrived.items()))
    if isinstance(sent, np.ndarray):
        return (
            sent.dtype == arrived.dtype
            and sent.shape == arrived.shape
            and bool(np.array_equal(sent, arrived))
        )
    return bool(sent == arrived)


EDGES = [1 << bits for bits in (7, 8, 15, 16, 31, 32, 53, 62, 63, 64, 127, 128, 1_000, 5_000)]
INTS = [0, 1, -1, 42, *(sign * (edge + step) for edge in EDGES for sign in (1, -1) for step in (-1, 0, 1))]
FLOATS = [0.0, -0.0, 1.5, -1e300, 5e-324, sys.float_info.max, math.inf, -math.inf, math.nan]
STRINGS = [
    "",
    "a",
    "ä",
    "Ω",
    "\u2028",
    "\U0001f600",
    "\ud800",
    "a\udfffb",
    "\x00",
    "x\x00y",
    "ab" * 5_000,
    "\U0001f600" * 70_000,
]
BYTES = [bytes(size) for size in (0, 1, 7, 8, 255, 256, 4_095, 4_096, 65_535, 65_536, 1 << 20, (5 << 20) + 3)]
TUPLES = [
    (),
    (1,),
    (1, "abc", 2.5),
    (None, True, False, b"x", "y"),
    ((), ((),), (((1,),),)),
    tuple(range(100)),
    (1, [2, 3]),
    (1 << 80, "\ud800", -0.0),
    tuple("x" * 100 for _ in range(300)),
    (b"x" * 300_000, 1, "end"),
]
CONTAINERS = [
    [],
    [1, [2]],
    {},
    {"a": {"b": [1, (2,)]}},
    {1, 2},
    frozenset({3}),
    bytearray(b"abc"),
    range(5),
    slice(1, 2),
]
OBJECTS = [
    Colour.RED,
    Point(1, 2),
    Record("a", (1, 2.5), Record("b", ())),
    Text("abc"),
    Whole(7),
    Pair((1, 2)),
    (Whole(7), Text("x"), Pair()),
    collections.OrderedDict(a=1, b=2),
    collections.Counter("abca"),
    decimal.Decimal("1.10"),
    datetime.datetime(2024, 2, 29, tzinfo=datetime.UTC),
    pathlib.PurePosixPath("/a/b"),
    1 + 2j,
    len,
    dict,
    Record,
    NotImplemented,
    ...,
]
ARRAYS = [
    np.arange(10),
    np.zeros((0, 3)),
    np.array(3.5),
    np.arange(24.0).reshape(2, 3, 4)[:, ::2],
    np.asfortranarray(np.arange(6).reshape(2, 3)),
    np.array(["a", "bc"]),
    np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    np.arange(1 << 20),
    np.float32(1.5),
    np.int64(-3),
]
GROUPS = {
    "ints": INTS,
    "floats": FLOATS,
    "strings": STRINGS,
    "bytes": BYTES,
    "tuples": TUPLES,
    "containers": CONTAINERS,
    "objects": OBJECTS,
    "arrays": ARRAYS,
}


@pytest.mark.parametrize("group", GROUPS)
def test_values_arrive_as_they_were_sent(make, group):
    """The test puts each value as a separate item."""
    ch = make(1)
    for sent in GROUPS[group]:
        ch.put(sent)
        arrived = ch.get()
        assert same(sent, arrived), f"{sent!r:.200} arrived as {arrived!r:.200}"


@pytest.mark.each_value
@pytest.mark.parametrize("group", GROUPS)
def test_values_sent_to_a_peer_and_back_are_equal(make, spawn_peer, group):
    """Values go in both directions, one at a time and in batches."""
    outward, inward = make(8), make(8)

    def echo():
        for item in outward:
            inward.put(item)
        inward.close()

    peer = spawn_peer(echo)
    writer = spawn_peer(lambda: (outward.put_many(GROUPS[group]), outward.close()))
    arrived = list(inward)
    writer.result()
    peer.result()
    assert len(arrived) == len(GROUPS[group])
    assert all(map(same, GROUPS[group], arrived))


def test_singletons_keep_their_identity(make):
    """The singletons include None, True and False."""
    ch = make()
    for value in (None, True, False, NotImplemented, ..., Colour.RED):
        ch.put(value)
        assert ch.get() is value
        ch.put((value,))
        assert ch.get()[0] is value


def test_bools_and_ints_arrive_with_their_types(make):
    ch = make()
    ch.put((True, 1, False, 0))
    assert [type(value) for value in ch.get()] == [bool, int, bool, int]


def test_object_used_twice_in_an_item_arrives_as_one(make):
    """Two references to a mutable object stay references to one object, as with pickle."""
    shared = [1]
    ch = make()
    ch.put({"first": shared, "second": shared})
    item = ch.get()
    assert item["first"] is item["second"]


def test_item_that_contains_itself_arrives(make):
    ch = make()
    loop: list[Any] = [1]
    loop.append(loop)
    ch.put(loop)
    arrived = ch.get()
    assert arrived[1] is arrived


def test_tuple_that_contains_itself_through_a_list_arrives(make):
    """Small tuples of built-ins have a direct encoding, which must reject this tuple."""
    ch = make()
    inner: list[Any] = []
    loop = (inner,)
    inner.append(loop)
    ch.put(loop)
    arrived = ch.get()
    assert arrived[0][0] is arrived


@pytest.mark.copying
def test_deeply_nested_tuple_raises_a_readable_error(make):
    """The put must not crash, and must put nothing."""
    deep: Any = ()
    for _ in range(100_000):
        deep = (deep,)
    ch = make()
    with pytest.raises((RecursionError, TypeError)) as caught:
        ch.put(deep)
    assert len(str(caught.value)) < 2_000
    assert len(ch) == 0
    # take the tuple apart level by level: freeing all levels at once could overflow the interpreter's stack
    while deep:
        deep = deep[0]


def test_local_functions_arrive(make, spawn_peer):
    """Plain pickle rejects lambdas, closures and local classes."""
    calls, results = make(), make()
    factor = 3

    class Local:
        def __call__(self, x):
            return x * factor

    def work():
        for function in calls:
            results.put(function(7))
        results.close()

    peer = spawn_peer(work)
    calls.put_many([lambda x: x + 1, lambda x: x * factor, Local()])
    calls.close()
    assert list(results) == [8, 21, 21]
    peer.result()


@pytest.mark.copying
def test_item_between_processes_is_a_copy(make):
    """A change to the object after the put must not change the item."""
    ch = make()
    sent, array, raw = [1, 2], np.arange(100_000), bytearray(b"abc" * 50_000)
    ch.put_many([sent, array, raw])
    sent.append(3)
    array[:] = -1
    raw[:3] = b"xyz"
    arrived = ch.get_many(3)
    assert arrived[0] == [1, 2]
    assert arrived[1][5] == 5
    assert arrived[2][:3] == b"abc"


@pytest.mark.copying
def test_received_array_stays_unchanged(make):
    """The array is read-only, and stays the same while the channel is used and when the channel ends."""
    ch = make(2)
    ch.put(np.arange(200_000))
    arrived = ch.get()
    for _ in range(20):
        ch.put(np.full(200_000, -1))
        ch.get()
    del ch
    assert np.array_equal(arrived, np.arange(200_000))
    with pytest.raises(ValueError, match="read-only"):
        arrived[0] = 99


def test_the_object_itself_is_passed_between_threads(transport):
    """Threads need no copy."""
    ch = transport.make()
    sent = [object()] if not transport.copies else [1]
    ch.put(sent)
    assert (ch.get() is sent) == (not transport.copies)


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters(codec=None, exclude_categories=())),
    st.binary(max_size=300),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=5), inner, max_size=4),
    ),
    max_leaves=12,
)


def test_random_nested_values_arrive_as_they_were_sent(transport, long_walk):
    """Small built-in values are nested at random, and sent singly and in batches."""
    examples = 150 if long_walk else 20

    slow = [HealthCheck.too_slow]  # the machine may be slow, so ignore the speed

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=slow)
    @given(values=st.lists(VALUES, min_size=1, max_size=8))
    def arrive(values):
        ch = transport.make(8)
        ch.put_many(values)
        assert same(values, [ch.get() for _ in values])
        for value in values:
            ch.put(value)
        assert same(values, ch.get_many(8))

    arrive()
