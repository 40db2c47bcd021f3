"""Test the Python code that runs when a ``threads`` channel releases an item.

A destructor may use the port that leased the item, and the garbage collector may visit leased items at any
time.
"""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.waiting import wait_blocked

from flowchan import Channel, In, select


class Item:
    def __init__(self, number):
        self.number = number


def count(cls):
    return [type(one) for one in gc.get_objects()].count(cls)


def numbers(ch):
    return [ch.get_nowait().number for _ in range(len(ch))]


def test_closing_port_releases_its_items_before_their_destructors_run():
    """A destructor may run the garbage collector, which must not visit items that are already released."""
    found = []

    class Looks:
        def __del__(self):
            found.append([type(one) for one in gc.get_referents(into)].count(Looks))

    ch = Channel(8)
    ch.put_many([Looks(), Looks()])
    into = ch.reader()
    into.get_many(2)
    into.close()
    assert found == [0, 0]


class Stage:
    """An object in a reference cycle, like many objects that have callbacks."""

    def __init__(self, ch):
        self.into = ch.reader()
        self.item = self.into.get()
        self.item.owner = self


def test_item_leased_by_a_collected_port_returns_intact():
    """C4: an unfinished item returns to its channel even when the collector clears the cycle around the
    item's port."""
    ch = Channel(8)
    other = ch.reader()
    ch.put(Item(7))
    stage = Stage(ch)
    assert ch.stats().leased == 1
    del stage
    gc.collect()
    assert ch.stats().leased == 0
    item = ch.get_nowait()
    assert item.number == 7
    with pytest.raises(ValueError, match="closed"):
        item.owner.into.get_nowait()
    reference = weakref.ref(item)
    del item
    gc.collect()
    assert reference() is None
    other.close()


def test_port_inside_its_own_leased_item_is_freed():
    gc.collect()
    before = count(In)
    ch = Channel(8)
    into = ch.reader()
    ch.put((into,))
    into.get()
    del into, ch
    gc.collect()
    assert count(In) == before


def test_destructor_of_a_leased_item_may_use_its_port():
    """The destructor's ``get`` finishes earlier items, like any ``get``, and leases another item."""
    got = []

    class GetsAnother(Item):
        def __del__(self):
            got.append(into.get_nowait().number)

    ch = Channel(8)
    ch.put(GetsAnother(0))
    ch.put_many([Item(1), Item(2), Item(3)])
    into, other = ch.reader(), ch.reader()

    def fail():
        into.get()
        assert into.get().number == 1
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), into:
        fail()
    assert got == [2]
    assert ch.stats().leased == 0
    assert numbers(ch) == [2, 3]
    other.close()


def test_select_puts_the_original_item_if_the_pair_is_changed():
    """The pairs are lists that the caller may change during the call."""
    ch = Channel(1)
    ch.put("full")
    pair = [ch, Item(1)]
    with ThreadPoolExecutor(1) as threads:
        selecting = threads.submit(lambda: select(puts=[pair]))
        wait_blocked(ch, writers=1)
        pair[1] = Item(2)
        assert ch.get() == "full"
        assert selecting.result().item.number == 1
    assert numbers(ch) == [1]
