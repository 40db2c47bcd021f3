"""Implement channels between threads and their ports, with the methods of the native core."""

from __future__ import annotations

import math
import os
import weakref
from abc import abstractmethod
from collections.abc import Iterable
from types import GenericAlias, TracebackType
from typing import Any, NoReturn, Self

from flowchan.errors import ChannelError, _needs_native
from flowchan.pure.call_results import deadline_of, forks, raise_step
from flowchan.pure.item_tracing import ItemTracing
from flowchan.pure.local_gets import get_all, get_item, next_item, pass_turns
from flowchan.pure.local_puts import put_all, put_item
from flowchan.pure.local_queue import KEEP_TURNS, RETIRE, LocalQueue, QueueState, QueueStep
from flowchan.pure.wait_line import NEVER, ReaderState, WriterState


class LocalChannel:
    """Bounded, closable FIFO between threads. ``flowchan.Channel`` extends it and checks the arguments."""

    __class_getitem__: Any = classmethod(GenericAlias)
    _hosts = _elsewhere = False
    _fd = _socket = -1

    def __init__(
        self,
        capacity: int = 0,
        processes: bool = False,
        max_bytes: int = 0,
        name: str = "",
        fd: int = -1,
        socket: int = -1,
    ) -> None:
        if processes or fd >= 0:
            raise _needs_native("Channel: across must be 'threads', got a channel that copies")
        self._name = name
        self._queue = LocalQueue(capacity, math.inf if max_bytes == 2**64 - 1 else max_bytes)
        self._made_in, self.awaiting = forks(), 0

    def usable(self) -> LocalQueue:
        """Return the queue, or raise ``ChannelError`` in a forked child."""
        if self._made_in != forks():
            raise ChannelError(
                f"{self.describe()} was created in another process (this is process {os.getpid()}), and "
                "across='threads' does not reach a forked child; create it with across='processes'"
            )
        return self._queue

    def describe(self) -> str:
        """Return a string that names the channel in messages."""
        return f"channel {self._name!r}" if self._name else f"Channel({self.capacity}, across='threads')"

    def put(self, item: Any, timeout: float | None = None) -> None:
        """Put an item, waiting while the channel is full."""
        put_item(self, None, item, deadline_of(timeout))

    def put_nowait(self, item: Any, /) -> None:
        """Put an item if there is room now."""
        put_item(self, None, item, 0)

    def put_many(self, items: Iterable[Any], timeout: float | None = None) -> None:
        """Put all items of an iterable in order, waiting while the channel is full."""
        put_all(self, None, items, deadline_of(timeout))

    def get(self, timeout: float | None = None) -> Any:
        """Take the oldest item, waiting while the channel is empty."""
        return get_item(self, None, deadline_of(timeout))

    def get_nowait(self) -> Any:
        """Take the oldest item if there is one now."""
        return get_item(self, None, 0)

    def get_many(self, max: int, timeout: float | None = None) -> list[Any]:
        """Take up to ``max`` items as a list."""
        return get_all(self, None, max, deadline_of(timeout))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return next_item(self, None)

    def close(self) -> None:
        """Close the channel: later puts raise ``Closed``."""
        queue = self.usable()
        with queue.held():
            queue.close()

    def abort(self, cause: BaseException | None = None) -> None:
        """Break the channel and discard its items."""
        queue = self.usable()
        with queue.held():
            dropped = queue.abort(cause)
        del dropped  # without holding the lock, because destructors may run arbitrary code

    @property
    def across(self) -> str:
        """Return the transport."""
        return "threads"

    def __len__(self) -> int:
        return len(self.usable().items)

    @property
    def capacity(self) -> int:
        """Return the number of items at which ``put`` waits."""
        return self._queue.capacity

    @property
    def max_bytes(self) -> int | None:
        """Return the number of bytes at which ``put`` waits, or None without a limit."""
        return None if self._queue.max_bytes == math.inf else int(self._queue.max_bytes)

    @property
    def closed(self) -> bool:
        """Return whether no more items can be put."""
        return self.usable().state is not QueueState.OPEN

    @property
    def drained(self) -> bool:
        """Return whether the channel is closed and empty, and no item is leased."""
        return self.usable().drained

    @property
    def broken(self) -> bool:
        """Return whether the channel was aborted."""
        return self.usable().state is QueueState.BROKEN

    @property
    def _share(self) -> int:
        return self._queue.share

    @_share.setter
    def _share(self, size: int) -> None:
        self._queue.share = size

    def _keep_numbers(self) -> None:
        self._queue.keeps_numbers = True

    def _stats(self) -> dict[str, Any]:
        queue = self.usable()
        with queue.held():
            return {**queue.stats(), "awaiting": self.awaiting}

    def _peek(self, first: int, most: int, most_bytes: int) -> list[tuple[int, bool, int, int, Any]]:
        return self.usable().peek(first, most)

    def _pinned(self) -> list[int]:
        return []

    def _loan(self, size: int, timeout: float | None) -> NoReturn:
        raise TypeError(
            f"{self.describe()} has no shared memory for a loan; create it with across='processes'"
        )


class _Port:
    """Base class of reading and writing ports."""

    __class_getitem__: Any = classmethod(GenericAlias)
    reads: bool
    state: Any

    def __init__(self, channel: LocalChannel, session: int = 0) -> None:
        self.open = False  # __del__ must do nothing until the channel has counted the port
        if not isinstance(channel, LocalChannel):
            raise TypeError("port: channel must be a flowchan.Channel")
        self.tracing: ItemTracing | None = None
        self.channel, self._made_in = channel, forks()
        queue = channel.usable()
        with queue.held():
            queue.open_port(self.reads)
            self.open = True

    def ready(self) -> LocalChannel:
        """Return the channel, or raise an error if the port cannot be used."""
        if not self.open:
            raise_step(self.channel, QueueStep.PORT_CLOSED, self.reads, NEVER)
        self.channel.usable()
        return self.channel

    @abstractmethod
    def drop(self) -> None:
        """Close the port after its user has dropped it."""

    def __del__(self) -> None:
        if self.open and self._made_in == forks():
            self.drop()

    def __enter__(self) -> Self:
        return self

    def _waited(self) -> tuple[float, float]:
        return self.state.clock.all.seconds(), self.state.clock.turn.seconds()

    def _trace(self, tracing: ItemTracing | None) -> None:
        self.tracing = tracing

    def _supervise(self) -> None:
        """Do nothing, because a thread can only end together with its process."""

    def _hand_over(self) -> NoReturn:
        raise TypeError(
            f"{self.channel.describe()} and its ports can't be sent to another process; "
            "create it with across='processes'"
        )

    def _leave_open(self) -> None:
        self.open = False


class ReadingPort(_Port):
    """Reading end of a channel. ``flowchan.In`` extends it."""

    reads = True

    def __init__(self, channel: LocalChannel, session: int = 0) -> None:
        self.state, self.holds_traced = ReaderState(), False
        self._feeds: list[weakref.ref[WritingPort]] = []
        super().__init__(channel, session)

    def feeds(self) -> list[WritingPort]:
        """Return the writers whose outputs come from the leased item."""
        return [out for one in self._feeds if (out := one()) is not None]

    def get(self, timeout: float | None = None) -> Any:
        """Take the oldest item, waiting while the channel is empty."""
        return get_item(self.ready(), self, deadline_of(timeout))

    def get_nowait(self) -> Any:
        """Take the oldest item if there is one now."""
        return get_item(self.ready(), self, 0)

    def get_many(self, max: int, timeout: float | None = None) -> list[Any]:
        """Take up to ``max`` items as a list."""
        return get_all(self.ready(), self, max, deadline_of(timeout))

    def get_more(self, timeout: float | None = None) -> Any:
        """Take an item like ``get``, but keep the leases of earlier items."""
        return get_item(self.ready(), self, deadline_of(timeout), keep=True)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return next_item(self.ready(), self)

    def close(self) -> None:
        """Close the port; its leased items count as finished."""
        self._end(finished=True)

    def _give_up(self) -> None:
        self._end(finished=False)

    drop = _give_up

    def _end(self, finished: bool) -> None:
        queue = self.channel._queue
        if not self.open:
            return
        if finished:
            pass_turns(self)
        with queue.held():
            if not self.open:
                return
            self.open = False
            done = queue.acknowledge(self.state) if finished or queue.state is QueueState.BROKEN else []
            queue.give_back(self.state)
            queue.end_port(True, self)
        del done  # without holding the lock, because destructors may run arbitrary code

    def __exit__(
        self, type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(finished=type is None)

    @property
    def closed(self) -> bool:
        """Return whether the port can get no more items."""
        return not self.open or self.channel.broken or self.channel.drained

    def _order(self, what: int) -> None:
        queue = self.channel._queue
        with queue.held():
            if self.open:
                self.state.orders |= what
                queue.wake_port(True, self)

    def _retire(self) -> None:
        self._order(RETIRE)

    def _keep_turns(self) -> None:
        self._order(KEEP_TURNS)

    def _read_alone(self) -> None:
        self.state.alone = True

    @property
    def _retired(self) -> bool:
        return bool(self.state.orders & RETIRE)

    @property
    def _number(self) -> int:
        return int(self.state.number)

    def _on_poison(self, deaths: int, handler: Any) -> None:
        """Do nothing, because channels between threads never unpickle items."""

    def _does_nothing(self) -> None:
        """Do nothing, because this method is needed only between processes or for speed."""

    _wake_lazily = _leave_alone = _begin_once = _begin_again = _remain = _does_nothing


class WritingPort(_Port):
    """Writing end of a channel, which ``flowchan.Out`` extends."""

    reads = False

    def __init__(self, channel: LocalChannel, session: int = 0) -> None:
        self.state, self.may_have_turns, self.replays = WriterState(), False, False
        self.reader: ReadingPort | None = None
        super().__init__(channel, session)

    def put(self, item: Any, timeout: float | None = None) -> None:
        """Put an item, waiting while the channel is full."""
        put_item(self.ready(), self, item, deadline_of(timeout))

    def put_nowait(self, item: Any, /) -> None:
        """Put an item if there is room now."""
        put_item(self.ready(), self, item, 0)

    def put_many(self, items: Iterable[Any], timeout: float | None = None) -> None:
        """Put all items of an iterable in order, waiting while the channel is full."""
        put_all(self.ready(), self, items, deadline_of(timeout))

    def close(self) -> None:
        """Close the port. Closing the last writer closes the channel."""
        queue = self.channel._queue
        with queue.held():
            if self.open:
                self.open = False
                queue.end_port(False, self)

    drop = close

    def __exit__(
        self, type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        WritingPort.close(self)

    @property
    def closed(self) -> bool:
        """Return whether no more items can be put."""
        return not self.open or self.channel.closed

    def begin(self) -> None:
        """Record the input item to which the next outputs belong."""
        leased = self.reader is not None and self.reader.state.leased
        if not self.state.keyed and (self.replays or leased):
            self.state.begin(0 if self.replays or self.reader is None else self.reader.state.number)

    def _follow(self, reader: ReadingPort, ordered: bool, single: bool, later: bool = False) -> None:
        self.reader, self.may_have_turns = reader, later
        self.state.ordered, self.state.single = ordered, single
        reader._feeds.append(weakref.ref(self))

    def _replay(self) -> None:
        self.replays = True

    def _loan(self, size: int, timeout: float | None) -> NoReturn:
        self.ready()._loan(size, timeout)
