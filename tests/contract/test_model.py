"""C1 to C7, C15: random calls have the same results on a channel and on a simple model of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
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

from flowchan import Broken, ChannelError, Closed, Drained, Empty, Full

ITEMS = st.one_of(
    st.none(), st.integers(), st.text(max_size=3), st.tuples(st.integers(), st.binary(max_size=40))
)


class Model:
    """A model of the contract: a deque and some counters.

    One user makes all calls, so no call waits. ``hands`` maps each reading port to the number of items that
    it has taken but not finished.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.inside: deque[Any] = deque()
        self.closed = self.broken = False
        self.writers = self.items_in = self.items_out = 0
        self.hands: list[int] = []

    @property
    def drained(self) -> bool:
        return self.closed and not self.broken and not self.inside and not any(self.hands)

    def put_many(self, items: list[Any]) -> None:
        """Put the items that fit. If some do not, raise an error with ``items_put``."""
        if self.broken:
            raise counted(Broken(), 0)
        if self.closed:
            raise counted(Closed(), 0)
        fitting = items[: self.capacity - len(self.inside)]
        self.inside.extend(fitting)
        self.items_in += len(fitting)
        if len(fitting) < len(items):
            raise counted(Full(), len(fitting))

    def get_many(self, most: int, port: int | None = None) -> list[Any]:
        if port is not None and not self.broken:
            self.hands[port] = 0  # requesting more items finishes the leased ones
        if self.broken:
            raise Broken
        if not self.inside:
            raise Drained if self.drained else Empty
        got = [self.inside.popleft() for _ in range(min(most, len(self.inside)))]
        self.items_out += len(got)
        if port is not None:
            self.hands[port] = len(got)
        return got

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.broken = True
        self.inside.clear()

    def leave_writer(self) -> None:
        self.writers -= 1
        if self.writers == 0:
            self.close()

    def leave_reader(self) -> None:
        self.hands.pop()
        if not self.hands:
            self.close()


def counted(error: ChannelError, items_put: int) -> ChannelError:
    error.items_put = items_put  # type: ignore[attr-defined]
    return error


def outcome(call: Callable[[], Any]) -> Any:
    """Return a call's result, or the type of the channel error that it raised."""
    try:
        return call()
    except ChannelError as error:
        return type(error)


def count_of(call: Callable[[], Any]) -> Any:
    """Return the error type and ``items_put`` of a failed ``put_many``, or None if it put all items."""
    try:
        return call()
    except ChannelError as error:
        return type(error), error.items_put  # type: ignore[attr-defined]


class Machine(RuleBasedStateMachine):
    """Makes the same calls on a channel and on its model."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        super().__init__()
        self.make = make
        self.writers: list[Any] = []
        self.readers: list[Any] = []

    @initialize(capacity=st.integers(1, 5))
    def begin(self, capacity: int) -> None:
        self.channel = self.make(capacity)
        self.model = Model(capacity)

    @rule(item=ITEMS)
    def put_nowait(self, item: Any) -> None:
        expected = outcome(lambda: self.model.put_many([item]))
        assert outcome(lambda: self.channel.put_nowait(item)) == expected

    @rule(items=st.lists(ITEMS, min_size=1, max_size=8))
    def put_many(self, items: list[Any]) -> None:
        expected = count_of(lambda: self.model.put_many(items))
        assert count_of(lambda: self.channel.put_many(items, timeout=0)) == expected

    @rule()
    def get_nowait(self) -> None:
        expected = outcome(lambda: self.model.get_many(1)[0])
        assert outcome(self.channel.get_nowait) == expected

    @rule(most=st.integers(1, 8))
    def get_many(self, most: int) -> None:
        expected = outcome(lambda: self.model.get_many(most))
        assert outcome(lambda: self.channel.get_many(most, timeout=0)) == expected

    @precondition(lambda self: self.model.inside)
    @rule()
    def get_where_it_need_not_wait(self) -> None:
        assert self.channel.get() == self.model.get_many(1)[0]

    @precondition(lambda self: self.model.closed and not self.model.broken and not any(self.model.hands))
    @rule()
    def iterate_to_the_end(self) -> None:
        assert list(self.channel) == (self.model.get_many(100) if self.model.inside else [])

    @precondition(lambda self: self.model.items_in > 6)
    @rule()
    def close(self) -> None:
        self.channel.close()
        self.model.close()

    @precondition(lambda self: self.model.items_in > 10 and not self.model.drained)
    @rule()
    def abort(self) -> None:
        self.channel.abort(ValueError("by the machine"))
        self.model.abort()

    @precondition(lambda self: not (self.model.closed or self.model.broken))
    @rule()
    def open_ports(self) -> None:
        self.writers.append(self.channel.writer())
        self.readers.append(self.channel.reader())
        self.model.writers += 1
        self.model.hands.append(0)

    @precondition(lambda self: self.writers)
    @rule(again=st.booleans())
    def leave_writer(self, again: bool) -> None:
        port = self.writers.pop()
        port.close()
        if again:
            port.close()
        self.model.leave_writer()
        with pytest.raises(ValueError, match=r"port .*was closed"):
            port.put_nowait("late")

    @precondition(lambda self: self.readers)
    @rule()
    def leave_reader(self) -> None:
        port = self.readers.pop()
        port.close()
        self.model.leave_reader()
        with pytest.raises(ValueError, match=r"port .*was closed"):
            port.get_nowait()

    @precondition(lambda self: self.writers)
    @rule(item=ITEMS)
    def put_through_a_port(self, item: Any) -> None:
        expected = outcome(lambda: self.model.put_many([item]))
        assert outcome(lambda: self.writers[-1].put(item, timeout=0)) == expected

    @precondition(lambda self: self.readers)
    @rule(most=st.integers(1, 3), data=st.data())
    def get_through_a_port(self, most: int, data: st.DataObject) -> None:
        port = data.draw(st.integers(0, len(self.readers) - 1))
        expected = outcome(lambda: self.model.get_many(most, port))
        assert outcome(lambda: self.readers[port].get_many(most, timeout=0)) == expected

    @invariant()
    def looks_alike(self) -> None:
        channel, model, stats = self.channel, self.model, self.channel.stats()
        assert len(channel) == stats.inside == len(model.inside)
        assert (channel.broken, channel.drained) == (model.broken, model.drained)
        assert model.broken or channel.closed == model.closed
        assert (stats.items_in, stats.items_out) == (model.items_in, model.items_out)
        assert (stats.waiting_readers, stats.waiting_writers) == (0, 0)
        assert (stats.writers, stats.readers) == (model.writers, len(model.hands))
        assert model.broken or stats.leased == sum(model.hands)

    def teardown(self) -> None:
        for port in [*self.writers, *self.readers]:
            port.close()


def test_channel_behaves_like_its_model(transport, long_walk):
    """C1 to C7, C15: each history of calls is random."""
    run_state_machine_as_test(
        lambda: Machine(transport.make),
        settings=histories(long_walk, 12, 150),
    )
