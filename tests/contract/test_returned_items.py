"""C1: items that readers return keep the order of their puts, in every history of calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.state_machines import histories

LARGE = 50_000
"""Size of an item that is copied or viewed without holding the lock."""


class Item:
    """An item whose unpickling calls ``on_arrival``, if that is set."""

    on_arrival: Callable[[], None] | None = None

    def __init__(self, number: int, size: int) -> None:
        self.number, self.rest = number, bytes(size)

    def __reduce__(self) -> tuple[Any, ...]:
        return arrive, (self.number, len(self.rest), self.rest)


def arrive(number: int, size: int, _: bytes) -> Item:
    if Item.on_arrival is not None:
        Item.on_arrival()
    return Item(number, size)


@contextmanager
def on_arrival(call: Callable[[], None]) -> Iterator[None]:
    Item.on_arrival = staticmethod(call)
    try:
        yield
    finally:
        Item.on_arrival = None


def fail(reader: Any) -> None:
    """Close the reader with an exception, so that it returns its items."""
    with pytest.raises(ZeroDivisionError), reader:
        raise ZeroDivisionError


def interrupt() -> None:
    raise KeyboardInterrupt


def number_of(item: Any) -> int:
    return item.number if isinstance(item, Item) else item


READER = st.integers(0, 2)


class Machine(RuleBasedStateMachine):
    """One user with a channel and three readers. The items have the numbers of their puts."""

    def __init__(self, make: Callable[[int], Any], copies: bool) -> None:
        super().__init__()
        self.make, self.copies = make, copies
        self.inside: list[int] = []
        self.number = 0

    @initialize(capacity=st.integers(3, 8))
    def begin(self, capacity: int) -> None:
        self.channel = self.make(capacity)
        self.capacity = capacity
        self.readers = [self.channel.reader() for _ in range(3)]
        self.leased: list[list[int]] = [[], [], []]  # each reader's items, in the order of its gets
        # This port stays open to the end, because the channel closes with its last port.
        self.writer = self.channel.writer()

    @precondition(lambda self: len(self.inside) < self.capacity)
    @rule(size=st.sampled_from([None, 10, LARGE]))
    def fill(self, size: int | None) -> None:
        numbers = range(self.number, self.number + self.capacity - len(self.inside))
        self.channel.put_many([number if size is None else Item(number, size) for number in numbers])
        self.number += len(numbers)
        self.inside.extend(numbers)

    @precondition(lambda self: self.inside)
    @rule()
    def get(self) -> None:
        assert number_of(self.channel.get_nowait()) == self.inside.pop(0)

    @precondition(lambda self: self.inside)
    @rule(reader=READER, most=st.integers(1, 3))
    def lease(self, reader: int, most: int) -> None:
        leased = self.leased[reader] = self.inside[:most]
        del self.inside[:most]
        assert [number_of(item) for item in self.readers[reader].get_many(most, timeout=0)] == leased

    @precondition(lambda self: self.inside)
    @rule(reader=READER)
    def lease_another(self, reader: int) -> None:
        number = self.inside.pop(0)
        self.leased[reader].append(number)
        assert number_of(self.readers[reader].get_more(timeout=0)) == number

    @rule(reader=READER)
    def leave_unfinished(self, reader: int) -> None:
        port, self.readers[reader] = self.readers[reader], self.channel.reader()
        fail(port)
        self.inside = sorted([*self.leased[reader], *self.inside])
        self.leased[reader] = []

    @precondition(lambda self: self.copies and self.inside)
    @rule(reader=READER, through_port=st.booleans(), other=READER)
    def interrupt_get(self, reader: int, through_port: bool, other: int) -> None:
        """Interrupt a get that is unpickling an item, after another reader has returned its items."""
        port = self.readers[reader] if through_port else self.channel
        if through_port:
            self.leased[reader] = []
        first = self.inside[0]

        def arrive_late() -> None:
            if other != reader:
                self.leave_unfinished(other)
            interrupt()

        with on_arrival(arrive_late), suppress(KeyboardInterrupt):
            assert port.get_nowait() == first  # a plain number needs no unpickling
            self.inside.remove(first)
            if through_port:
                self.leased[reader] = [first]

    @invariant()
    def counts_items(self) -> None:
        stats = self.channel.stats()
        assert (stats.inside, stats.leased) == (len(self.inside), sum(map(len, self.leased)))

    def teardown(self) -> None:
        if not hasattr(self, "channel"):
            return
        for reader in range(3):
            self.leave_unfinished(reader)
        assert [number_of(self.channel.get_nowait()) for _ in self.inside] == self.inside
        for port in [*self.readers, self.writer]:
            port.close()
        assert self.channel.drained


def test_returned_items_leave_in_order_of_puts(transport, long_walk):
    run_state_machine_as_test(
        lambda: Machine(transport.make, transport.copies), settings=histories(long_walk, 60, 600)
    )


def test_reader_returns_item_that_another_reader_had_returned(make):
    """C1: the last reader has item 3 before item 1."""
    ch = make()
    ch.put_many([1, 2, 3, 4])
    with ch.reader() as other:
        first, last = ch.reader(), ch.reader()
        assert first.get_many(2) == [1, 2]
        assert last.get() == 3
        fail(first)
        assert last.get_more() == 1
        fail(last)
        assert other.get_many(5) == [1, 2, 3, 4]


@pytest.mark.copying
@pytest.mark.parametrize("size", [10, LARGE])
@pytest.mark.parametrize("port", [False, True])
def test_interrupted_get_returns_its_item_behind_earlier_ones(make, port, size):
    """C1, C9: while the get unpickles item 2, another reader returns item 1."""
    ch = make()
    ch.put_many([Item(number, size) for number in (1, 2, 3)])
    with ch.reader() as other:
        first = ch.reader()
        assert first.get().number == 1

        def arrive_late() -> None:
            fail(first)
            interrupt()

        with on_arrival(arrive_late), pytest.raises(KeyboardInterrupt):
            (other if port else ch).get()
        assert [item.number for item in ch.get_many(4)] == [1, 2, 3]
