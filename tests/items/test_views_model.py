"""Use arrays in a channel's memory at random, and check that their contents never change.

One process does all operations. Memory is short and sizes vary, so free memory is often divided around the
arrays in use. Each array is filled with its number, and all arrays are checked after each step.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy
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

from flowchan import Channel, Drained, Full

MAX_BYTES = 300_000
HEADROOM = 4096
"""Bytes that an item may need in addition to its array."""

WASTE = 1.25
"""Largest ratio of a block to its contents."""

SIZES = st.one_of(st.integers(1, 2000), st.integers(4000, 20_000), st.integers(20_000, MAX_BYTES - HEADROOM))


def check(array: Any, number: int) -> None:
    assert array[0] == number % 251
    assert (array == array[0]).all()


class Machine(RuleBasedStateMachine):
    """One user with a channel, its ports, and the arrays that were received, lent, or put."""

    def __init__(self) -> None:
        super().__init__()
        # number of the first array, size, and number of arrays
        self.inside: deque[tuple[int, int, int]] = deque()
        self.held: list[tuple[Any, int]] = []
        self.lent: list[tuple[Any, int]] = []
        self.released: list[Any] = []  # former loans that have been put
        self.readers: list[tuple[Any, list[tuple[int, int, int]]]] = []  # readers with their leased items
        self.writers: list[Any] = []
        self.number = self.puts = 0

    @initialize(capacity=st.integers(1, 8))
    def begin(self, capacity: int) -> None:
        self.capacity = capacity
        self.channel: Any = Channel(capacity, across="processes", max_bytes=MAX_BYTES)
        # These ports stay open to the end, because the channel closes with its last port.
        self.remain = self.channel.reader(), self.channel.writer()

    def new(self) -> int:
        self.number += 1
        return self.number

    def is_in_use(self) -> bool:
        return bool(self.held or self.lent or self.released or any(hand for _, hand in self.readers))

    def room(self) -> float:
        """Return a size that fits: the free bytes, or the largest gap if the memory is fragmented."""
        used = sum(size + HEADROOM for _, size, _ in self.inside)
        largest_gap = (4 * MAX_BYTES - WASTE * used) / (len(self.inside) + 1)
        return min(MAX_BYTES - used, largest_gap / WASTE)

    def put_now(self, to: Any, array: Any, number: int) -> bool:
        try:
            to.put_nowait(array)
        except Full:
            assert (
                len(self.inside) >= self.capacity or array.nbytes + HEADROOM > self.room() or self.is_in_use()
            )
            return False
        self.puts += 1
        self.inside.append((number, array.nbytes, self.puts))
        return True

    @rule(size=SIZES, through_port=st.booleans())
    def put(self, size: int, through_port: bool) -> None:
        number = self.new()
        port = self.writers[-1] if through_port and self.writers else self.channel
        self.put_now(port, numpy.full(size, number % 251, "uint8"), number)

    @precondition(lambda self: self.inside)
    @rule(keep=st.booleans())
    def get(self, keep: bool) -> None:
        array = self.channel.get_nowait()
        number, size, _ = self.inside.popleft()
        assert array.nbytes == size
        check(array, number)
        if keep:
            self.held.append((array, number))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        del self.held[data.draw(st.integers(0, len(self.held) - 1))]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def put_what_is_held(self, data: st.DataObject) -> None:
        self.put_now(self.channel, *self.held[data.draw(st.integers(0, len(self.held) - 1))])

    @rule(size=SIZES, from_port=st.booleans())
    def loan(self, size: int, from_port: bool) -> None:
        port = self.writers[-1] if from_port and self.writers else self.channel
        try:
            array = port.loan(size, "uint8", timeout=0)
        except Full:
            assert self.is_in_use() or self.inside
            return
        number = self.new()
        array[:] = number % 251
        self.lent.append((array, number))

    @precondition(lambda self: self.lent)
    @rule(data=st.data(), keep=st.booleans())
    def put_a_loan(self, data: st.DataObject, keep: bool) -> None:
        i = data.draw(st.integers(0, len(self.lent) - 1))
        if self.put_now(self.channel, *self.lent[i]):
            array, _ = self.lent.pop(i)
            assert not array.flags.writeable
            if keep:
                self.released.append(array)

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def drop_a_loan(self, data: st.DataObject) -> None:
        del self.lent[data.draw(st.integers(0, len(self.lent) - 1))]

    @precondition(lambda self: self.released)
    @rule()
    def drop_what_was_put(self) -> None:
        self.released.clear()

    @precondition(lambda self: len(self.readers) < 3)
    @rule()
    def open_reader(self) -> None:
        self.readers.append((self.channel.reader(), []))

    @precondition(lambda self: self.readers and self.inside)
    @rule(data=st.data(), more=st.booleans(), keep=st.booleans())
    def lease(self, data: st.DataObject, more: bool, keep: bool) -> None:
        port, hand = self.readers[data.draw(st.integers(0, len(self.readers) - 1))]
        array = port.get_more(timeout=0) if more else port.get_nowait()
        taken = self.inside.popleft()
        check(array, taken[0])
        if not more:
            hand.clear()
        hand.append(taken)
        if keep:
            self.held.append((array, taken[0]))

    def give_back(self, hand: list[tuple[int, int, int]]) -> None:
        """Return the items to the front, in the order of their puts."""
        self.inside = deque(sorted([*hand, *self.inside], key=lambda item: item[2]))

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), finished=st.booleans())
    def leave_reader(self, data: st.DataObject, finished: bool) -> None:
        port, hand = self.readers.pop(data.draw(st.integers(0, len(self.readers) - 1)))
        if finished:
            port.close()
        else:
            port._give_up()
            self.give_back(hand)

    @precondition(lambda self: len(self.writers) < 3)
    @rule()
    def open_writer(self) -> None:
        self.writers.append(self.channel.writer())

    @precondition(lambda self: self.writers)
    @rule()
    def leave_writer(self) -> None:
        self.writers.pop().close()

    @invariant()
    def nothing_was_written_over(self) -> None:
        for array, number in [*self.held, *self.lent]:
            check(array, number)
        stats = self.channel.stats()
        assert stats.inside == len(self.inside)
        assert stats.leased == sum(len(hand) for _, hand in self.readers)
        if not self.held and not self.lent and not self.released and not self.inside:
            assert stats.holders == ()

    def teardown(self) -> None:
        """Release everything, and check that two items of the largest size fit."""
        if not hasattr(self, "channel"):
            return
        for port, hand in self.readers:
            port._give_up()
            self.give_back(hand)
        for port in self.writers:
            port.close()
        self.held.clear()
        self.lent.clear()
        self.released.clear()
        while self.inside:
            number, _, _ = self.inside.popleft()
            check(self.channel.get_nowait(), number)
        assert self.channel.stats().holders == ()
        for number in (1, 2):
            self.channel.put_nowait(numpy.full(MAX_BYTES - HEADROOM, number, "uint8"))
            self.held.append((self.channel.get_nowait(), number))
            check(*self.held[-1])
        self.held.clear()
        for port in self.remain:
            port.close()
        try:
            self.channel.get_nowait()
        except Drained:
            return
        raise AssertionError("it is not drained")


def test_c1_arrays_in_shared_memory_keep_their_contents(
    long_walk: bool,
) -> None:
    run_state_machine_as_test(
        Machine,
        settings=histories(long_walk, 25, 200),
    )


def test_put_waits_if_items_between_dropped_loans_leave_no_gap() -> None:
    """Seven small items split the memory, so no gap fits the large item even though enough bytes are free."""
    channel: Any = Channel(8, across="processes", max_bytes=MAX_BYTES)
    loans = []
    for number in range(7):
        loans.append(channel.loan(140_000, "uint8", timeout=0))
        channel.put_nowait(numpy.full(1000, number, "uint8"))
    loans.clear()
    large = numpy.full(250_000, 7, "uint8")
    with pytest.raises(Full):
        channel.put_nowait(large)
    for number in range(3):
        check(channel.get_nowait(), number)
    channel.put_nowait(large)
    channel.close()
    for number, array in enumerate(channel, 3):
        check(array, number)
