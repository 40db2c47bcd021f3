"""The native core of flowchan: channels and their ports."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, Literal, Self, TypeVar, overload

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)

class View:
    """A buffer over memory of a channel or of this process."""

    @staticmethod
    def of(address: int, size: int, owner: Any) -> View:
        """Return a read-only view of memory that ``owner`` keeps alive."""
    def private(self) -> View:
        """Return a writable view of the same bytes, which copies each page on the first write."""
    def lent(self, array: Any) -> None:
        """Remember ``array``, which uses this loan, and make it read-only when the loan is put."""
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Channel(Generic[T]):
    """A bounded FIFO that can be closed. Use flowchan.Channel instead, which checks its arguments."""

    @overload
    def __init__(self, capacity: int, processes: bool, max_bytes: int, name: str) -> None: ...
    @overload
    def __init__(self, fd: int, socket: int, name: str) -> None: ...
    def put(self, item: T, timeout: float | None = None) -> None:
        """Put an item, waiting while the channel is full.

        Args:
            item: The item. A channel between processes passes a copy.
            timeout: Seconds to wait (default: no limit).

        Raises:
            Full: The channel stayed full for ``timeout`` seconds.
            Closed: The channel was closed, or its last reader left.
            Broken: The channel is broken.
            TypeError: The item cannot be serialised for another process.

        Example:
            >>> from flowchan import Channel
            >>> channel = Channel(capacity=2)
            >>> channel.put("a")
            >>> channel.put("b", timeout=0.1)
            >>> channel.get_many(2)
            ['a', 'b']
        """
    def put_nowait(self, item: T, /) -> None:
        """Put an item if there is room now.

        Args:
            item: The item. A channel between processes passes a copy.

        Raises:
            Full: The channel is full.
            Closed: The channel was closed, or its last reader left.
            Broken: The channel is broken.
            TypeError: The item cannot be serialised for another process.

        Example:
            >>> from flowchan import Channel, Full
            >>> channel = Channel(capacity=1)
            >>> channel.put_nowait("a")
            >>> try:
            ...     channel.put_nowait("b")
            ... except Full:
            ...     print("full")
            full
        """
    def put_many(self, items: Iterable[T], timeout: float | None = None) -> None:
        """Put all items of an iterable in order, waiting while the channel is full.

        Args:
            items: The items. The iterable is read as the channel accepts them.
            timeout: Seconds to wait for all items together (default: no limit).

        Raises:
            Full: The timeout expired. The error's ``items_put`` counts the items that were put.
            Closed: The channel was closed, or its last reader left. The error has ``items_put``.
            Broken: The channel is broken. The error has ``items_put``.
            TypeError: An item cannot be serialised for another process.

        Example:
            >>> from flowchan import Channel
            >>> channel = Channel(capacity=3)
            >>> channel.put_many(range(3))
            >>> len(channel)
            3
        """
    def get(self, timeout: float | None = None) -> T:
        """Take the oldest item, waiting while the channel is empty.

        Args:
            timeout: Seconds to wait (default: no limit).

        Returns:
            The item.

        Raises:
            Empty: No item arrived within ``timeout`` seconds.
            Drained: The channel is closed, and all its items have been taken.
            Broken: The channel is broken.

        Example:
            >>> from flowchan import Channel
            >>> channel = Channel()
            >>> channel.put("a")
            >>> channel.get(timeout=1)
            'a'
        """
    def get_nowait(self) -> T:
        """Take the oldest item if there is one now.

        Returns:
            The item.

        Raises:
            Empty: The channel is empty.
            Drained: The channel is closed, and all its items have been taken.
            Broken: The channel is broken.

        Example:
            >>> from flowchan import Channel, Empty
            >>> channel = Channel()
            >>> try:
            ...     channel.get_nowait()
            ... except Empty:
            ...     print("empty")
            empty
        """
    def get_many(self, max: int, timeout: float | None = None) -> list[T]:
        """Take up to ``max`` items as a list.

        The call waits for the first item like ``get``, and then takes what is already available. The list
        ends before an item that cannot be unpickled. The next call raises that item's error.

        Args:
            max: Largest number of items to take.
            timeout: Seconds to wait for the first item (default: no limit).

        Returns:
            A list of at least one item.

        Raises:
            Empty: No item arrived within ``timeout`` seconds.
            Drained: The channel is closed, and all its items have been taken.
            Broken: The channel is broken.
            KeyboardInterrupt: The error's ``items_got`` contains the items already taken.

        Example:
            >>> from flowchan import Channel
            >>> channel = Channel()
            >>> channel.put_many("abc")
            >>> channel.get_many(2)
            ['a', 'b']
        """
    def close(self) -> None:
        """Close the channel, so that later puts raise ``Closed``.

        Readers can still take the remaining items. Any user may close the channel, even repeatedly.

        Example:
            >>> from flowchan import Channel
            >>> channel = Channel()
            >>> channel.put("a")
            >>> channel.close()
            >>> channel.closed, list(channel), channel.drained
            (True, ['a'], True)
        """
    def abort(self, cause: BaseException | None = None) -> None:
        """Break the channel and discard its items.

        All waiting and later calls raise ``Broken`` from ``cause``.
        """
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[T]: ...
    def __next__(self) -> T: ...
    @property
    def capacity(self) -> int:
        """Return how many items fit into the channel before a put must wait."""
    @property
    def max_bytes(self) -> int | None:
        """Return the maximum number of bytes in the channel, or None if there is no limit."""
    @property
    def across(self) -> Literal["threads", "processes", "hosts"]:
        """Return the transport: ``"threads"``, ``"processes"`` or ``"hosts"``."""
    _hosts: bool
    _elsewhere: bool
    def _uncounted_session(self) -> int: ...
    def _allow(self, puts: int) -> None: ...
    @property
    def closed(self) -> bool:
        """Return whether the channel accepts no more puts."""
    @property
    def drained(self) -> bool:
        """Return whether the channel is closed and empty, and no item is on lease."""
    @property
    def broken(self) -> bool:
        """Return whether the channel was aborted or ended with a failure."""
    _name: str
    @property
    def _fd(self) -> int: ...
    _share: int
    def _leaves_host(self) -> None: ...
    def _keep_numbers(self) -> None: ...
    def _number_from(self, arg: int, /) -> None: ...
    def _undo_abort(self) -> None: ...
    @property
    def _socket(self) -> int: ...
    def _stats(self) -> dict[str, Any]: ...
    def _peek(self, first: int, most: int, most_bytes: int) -> list[tuple[int, bool, int, int, Any]]: ...
    def _pinned(self) -> list[int]: ...
    def _loan(self, size: int, timeout: float | None) -> View: ...

class ItemTracing:
    """Follows sampled items through one worker; see items/sampled_item.py."""

    def __init__(self, recorder: Any, countdown: int = 0) -> None: ...

class In(Generic[T_co]):
    """A port that reads a channel. Use flowchan.In, which channel.reader() returns."""

    def __init__(self, channel: Channel[T_co], session: int = 0) -> None: ...
    def get(self, timeout: float | None = None) -> T_co:
        """Take the oldest item, waiting while the channel is empty.

        Args:
            timeout: Seconds to wait (default: no limit).

        Returns:
            The item.

        Raises:
            Empty: No item arrived within ``timeout`` seconds.
            Drained: The channel is closed, and all its items have been taken.
            Broken: The channel is broken.

        Example:
            >>> from flowchan import Channel
            >>> channel = Channel()
            >>> channel.put("a")
            >>> channel.get(timeout=1)
            'a'
        """
    def get_nowait(self) -> T_co:
        """Take the oldest item if there is one now.

        Returns:
            The item.

        Raises:
            Empty: The channel is empty.
            Drained: The channel is closed, and all its items have been taken.
            Broken: The channel is broken.

        Example:
            >>> from flowchan import Channel, Empty
            >>> channel = Channel()
            >>> try:
            ...     channel.get_nowait()
            ... except Empty:
            ...     print("empty")
            empty
        """
    def get_many(self, max: int, timeout: float | None = None) -> list[T_co]:
        """Take up to ``max`` items as a list.

        The call waits for the first item like ``get``, and then takes what is already available. The list
        ends before an item that cannot be unpickled. The next call raises that item's error.

        Args:
            max: Largest number of items to take.
            timeout: Seconds to wait for the first item (default: no limit).

        Returns:
            A list of at least one item.

        Raises:
            Empty: No item arrived within ``timeout`` seconds.
            Drained: The channel is closed, and all its items have been taken.
            Broken: The channel is broken.
            KeyboardInterrupt: The error's ``items_got`` contains the items already taken.

        Example:
            >>> from flowchan import Channel
            >>> channel = Channel()
            >>> channel.put_many("abc")
            >>> channel.get_many(2)
            ['a', 'b']
        """
    def get_more(self, timeout: float | None = None) -> T_co:
        """Take an item like ``get``, but keep the earlier items on lease.

        The item and the earlier ones count as unfinished until the next ``get``.

        Args:
            timeout: Seconds to wait (default: no limit).

        Returns:
            The item.

        Raises:
            Empty: No item arrived within ``timeout`` seconds.
            Drained: The channel is closed, and all its items have been taken.
            Broken: The channel is broken.

        Example:
            >>> from flowchan import Channel
            >>> channel = Channel(across="processes")
            >>> channel.put_many("ab")
            >>> with channel.reader() as reader:
            ...     pair = [reader.get(), reader.get_more()]
            >>> pair
            ['a', 'b']
        """
    def close(self) -> None:
        """Close the port. Its leased items count as finished."""
    def __iter__(self) -> Iterator[T_co]: ...
    def __next__(self) -> T_co: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, type: Any, error: Any, traceback: Any) -> None: ...
    @property
    def channel(self) -> Any:
        """Return the channel that the port reads."""
    @property
    def closed(self) -> bool:
        """Return whether the port can get no more items.

        This is true if the port was closed, or if the channel is drained or broken.
        """
    def _give_up(self) -> None: ...
    def _supervise(self) -> None: ...
    def _hand_over(self) -> tuple[Any, int]: ...
    def _leave_open(self) -> None: ...
    def _wake_lazily(self) -> None: ...
    def _nap(self) -> None: ...
    def _waited(self) -> tuple[float, float]: ...
    def _remain(self) -> None: ...
    def _leave_alone(self) -> None: ...
    def _begin_again(self) -> None: ...
    def _retire(self) -> None: ...
    def _keep_turns(self) -> None: ...
    @property
    def _retired(self) -> bool: ...
    @property
    def _number(self) -> int: ...
    def _read_alone(self) -> None: ...
    def _begin_once(self) -> None: ...
    def _map(self, out: Out[Any], function: Callable[[T], Any]) -> bool | tuple[T, BaseException, bool]: ...
    def _trace(self, tracing: ItemTracing | None) -> None: ...
    def _on_poison(
        self, deaths: int, handler: Callable[[Any, int, Exception | None], None] | None
    ) -> None: ...

class Out(Generic[T_contra]):
    """A port that writes to a channel. Use flowchan.Out, which channel.writer() returns."""

    def __init__(self, channel: Channel[T_contra], session: int = 0) -> None: ...
    def put(self, item: T_contra, timeout: float | None = None) -> None:
        """Put an item, waiting while the channel is full.

        Args:
            item: The item. A channel between processes passes a copy.
            timeout: Seconds to wait (default: no limit).

        Raises:
            Full: The channel stayed full for ``timeout`` seconds.
            Closed: The channel was closed, or its last reader left.
            Broken: The channel is broken.
            TypeError: The item cannot be serialised for another process.

        Example:
            >>> from flowchan import Channel
            >>> channel = Channel(capacity=2)
            >>> channel.put("a")
            >>> channel.put("b", timeout=0.1)
            >>> channel.get_many(2)
            ['a', 'b']
        """
    def put_nowait(self, item: T_contra, /) -> None:
        """Put an item if there is room now.

        Args:
            item: The item. A channel between processes passes a copy.

        Raises:
            Full: The channel is full.
            Closed: The channel was closed, or its last reader left.
            Broken: The channel is broken.
            TypeError: The item cannot be serialised for another process.

        Example:
            >>> from flowchan import Channel, Full
            >>> channel = Channel(capacity=1)
            >>> channel.put_nowait("a")
            >>> try:
            ...     channel.put_nowait("b")
            ... except Full:
            ...     print("full")
            full
        """
    def put_many(self, items: Iterable[T_contra], timeout: float | None = None) -> None:
        """Put all items of an iterable in order, waiting while the channel is full.

        Args:
            items: The items. The iterable is read as the channel accepts them.
            timeout: Seconds to wait for all items together (default: no limit).

        Raises:
            Full: The timeout expired. The error's ``items_put`` counts the items that were put.
            Closed: The channel was closed, or its last reader left. The error has ``items_put``.
            Broken: The channel is broken. The error has ``items_put``.
            TypeError: An item cannot be serialised for another process.

        Example:
            >>> from flowchan import Channel
            >>> channel = Channel(capacity=3)
            >>> channel.put_many(range(3))
            >>> len(channel)
            3
        """
    def close(self) -> None:
        """Close the port. If it is the last writer, the channel closes."""
    def __enter__(self) -> Self: ...
    def __exit__(self, type: Any, error: Any, traceback: Any) -> None: ...
    @property
    def channel(self) -> Any:
        """Return the channel to which the port writes."""
    @property
    def closed(self) -> bool:
        """Return whether the port accepts no more puts.

        This is true if the port or the channel was closed, the channel broke, or its readers left.
        """
    def _follow(self, reader: In[Any], ordered: bool, single: bool, later: bool = False) -> None: ...
    def _trace(self, tracing: ItemTracing | None) -> None: ...
    def _replay(self) -> None: ...
    def _waited(self) -> tuple[float, float]: ...
    def _fall(self, pid: int) -> None: ...
    def _loan(self, size: int, timeout: float | None) -> View: ...
    def _supervise(self) -> None: ...
    def _hand_over(self) -> tuple[Any, int]: ...
    def _leave_open(self) -> None: ...

def _references() -> int:
    """Return how many outputs in this process's channels are still stored on other hosts."""

class ReadyLinks:
    """The links that need attention, for one thread that serves many."""

    def add(self, number: int) -> None: ...
    def wait(self, timeout: float | None = None) -> list[int]:
        """Wait for links and return their numbers, or [] after the timeout and after ``close``."""
    def close(self) -> None: ...

def _route_outputs(out: Out[Any], route: Callable[[Any], int | None]) -> None:
    """Let ``route(item)`` choose the worker for each large item, from 0. None lets the program choose."""

class Reference:
    """An output that stays on its host while a stage passes it from channel to channel."""

    worker: int

class Link:
    """A connection between two hosts of a run, which serves the ports of remote workers."""

    def __init__(self, owner_side: bool) -> None: ...
    def attach(self, fd: int) -> None:
        """Continue over this connected socket and take ownership of it.

        The link resends all frames that did not arrive over the previous socket.
        """
    def open_stream(
        self,
        number: int,
        inputs: list[Any],
        outputs: list[Any],
        on_demand: bool = False,
        limited: bool = False,
        lends: bool = False,
    ) -> None:
        """Start to serve the ports of one worker. Both sides must use the same ``number``.

        ``on_demand``: send items only to workers that wait for an item or process one.
        ``limited``: the worker puts only as many items as the owner has room for.
        ``lends``: large outputs of the first port stay on the worker's side until a host fetches them.
        """
    def set_fetch_address(self, address: str) -> None:
        """Set the address where other hosts can fetch the outputs that this agent keeps."""
    def serve_fetches(self, fd: int) -> None:
        """Send outputs to the host behind this socket until that host closes it."""
    def request(self, fd: int, location: bytes) -> None:
        """Request an output over this socket; call ``fetch`` once for each request, in the same order."""
    def fetch(self, fd: int, location: bytes) -> bool:
        """Receive the oldest requested output. Return False if the other host does not have it."""
    def report_unreachable(self, location: bytes) -> None:
        """Report to the owner that an output cannot be fetched, so that the owner sends it."""
    def pair(self, writes: int, reads: int) -> None:
        """Reduce the room of stream ``writes`` by the items that stream ``reads`` has prefetched."""
    def offer(self, number: int, most: int) -> tuple[int, bool] | None:
        """Send up to ``most`` more items of this stream.

        Returns how many items were sent in total, and whether the channel has ended. Returns None during a
        recall.
        """
    def room(self, number: int) -> tuple[int, bool]:
        """Return how many puts this stream was granted in total, and whether its channel has ended."""
    def await_used(self, number: int, count: int, timeout: float | None = None) -> bool | None:
        """Wait until the other side has put ``count`` items of this stream.

        Returns True if it has put them, False if it never will, and None after the timeout.
        """
    def drop(self, number: int) -> None:
        """Stop serving a worker's ports, but keep their sessions. Ignore unknown numbers."""
    def wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Wait for the next event and return its kind and values, or () after the timeout.

        flowchan.transport.link_events converts events to typed objects.
        """
    def announce(self, number: int, events: ReadyLinks, reports: ReadyLinks) -> None:
        """Add ``number`` to ``events`` or ``reports`` when an event or an item of stream 0 arrives."""
    def excuse(self, seconds: float) -> None:
        """Do not count the last ``seconds`` as the peer's silence, because this process was delayed."""
    def state(self) -> dict[str, Any]:
        """Return the state of the connection and the counters of the link."""
    def close(self) -> None:
        """End the connection and the link's threads."""

class Group:
    """A member of a group. Use flowchan.collective instead."""

    def __init__(self, fd: int, rank: int) -> None: ...
    def allreduce(
        self, x: Any, op: Any = "sum", out: Any = None, timeout: float | None = None, wait: bool = True
    ) -> Any:
        """Combine the values of all members element by element, in the order of the ranks.

        See flowchan.collective.Group.allreduce.
        """
    def broadcast(self, x: Any = None, root: int = 0, timeout: float | None = None, wait: bool = True) -> Any:
        """Copy the value of ``root`` to all members.

        See flowchan.collective.Group.broadcast.
        """
    def barrier(self, timeout: float | None = None, wait: bool = True) -> Any:
        """Wait until all members have called ``barrier``.

        See flowchan.collective.Group.barrier.
        """
    def allgather(self, x: Any, out: Any = None, timeout: float | None = None, wait: bool = True) -> Any:
        """Gather one value from each member on all members.

        See flowchan.collective.Group.allgather.
        """
    def _choose(self, doing: int, algorithm: int) -> None: ...
    def _plan(self, doing: int, size: int) -> tuple[int, int, bool, bool, bool]: ...
    def _took(self, doing: int, size: int) -> list[tuple[tuple[int, int, bool, bool, bool], int]]: ...
    def alltoall(self, xs: Any, out: Any = None, timeout: float | None = None, wait: bool = True) -> Any:
        """Send one value to each member, and receive one from each.

        See flowchan.collective.Group.alltoall.
        """
    def reduce_scatter(
        self, x: Any, op: Any = "sum", out: Any = None, timeout: float | None = None, wait: bool = True
    ) -> Any:
        """Combine the arrays of all members, and return this member's part of the result.

        See flowchan.collective.Group.reduce_scatter.
        """
    @property
    def rank(self) -> int:
        """Return the rank of this member, from 0."""
    @property
    def size(self) -> int:
        """Return the number of members."""
    @staticmethod
    def _make(size: int) -> int: ...
    @property
    def _fd(self) -> int: ...
    @property
    def _joined(self) -> bool: ...
    @property
    def _broken(self) -> bool: ...
    def _join(self) -> int: ...
    def _leave(self) -> None: ...
    def _hold(self) -> None: ...
    def _give_up(self) -> None: ...
    def _queue(self, change: int) -> None: ...
    def _count_out(self, member: int) -> None: ...
    def _disband(self) -> None: ...
    @property
    def _disbanded(self) -> bool: ...
    def _publish_channel(self, member: int, fd: int, inode: int, offer: bool = False) -> None: ...
    def _channel_from(self, member: int, offer: bool = False) -> tuple[int, int, int] | None: ...
    def _see(self, member: int) -> tuple[int, int, int, int, bool, bool, bool, bool]: ...
    def _exchange(
        self, doing: int, key: int, data: Any, only: int, timeout: float | None, x: Any, more: Any
    ) -> list[bytes]: ...
    def _allgather_into(
        self, doing: int, key: int, mine: list[Any], outs: list[Any], timeout: float | None
    ) -> None: ...
    def _alltoall(
        self, doing: int, key: int, ins: list[Any], outs: list[Any], timeout: float | None, more: Any
    ) -> None: ...
    def _reduce(
        self, doing: int, x: Any, out: Any, op: str, root: int, timeout: float | None, part_of: int = 0
    ) -> Any: ...
    def _spread(self, x: Any, root: int, timeout: float | None) -> Any: ...
    def _wait_for_all(self, timeout: float | None) -> None: ...
    def _reduce_scatter(self, x: Any, out: Any, op: str, timeout: float | None) -> Any: ...

class Await:
    """A coroutine that waits in the queue of a channel or port; see awaiting.py."""

    def __init__(self, target: Any, reading: bool, again: bool) -> None: ...
    @property
    def channel(self) -> Any: ...
    def leave(self, unused: bool) -> None: ...

class Watch:
    """Lets one thread sleep on behalf of many coroutines."""

    def __init__(self) -> None: ...
    @property
    def heard(self) -> int: ...
    def ring(self) -> None: ...
    def sleep(self, heard: int, waits: list[Await], seconds: float) -> list[int]: ...

def _combine(out: Any, ins: list[Any], op: str) -> None: ...
def _plain_bytes(value: Any) -> bytes | None: ...
def _from_plain_bytes(data: Any) -> Any: ...
def _set_codec(
    dumps: Callable[[Any], Any],
    loads: Callable[[Any], Any],
    unreadable: Callable[[bytes], Any],
    is_of_a_handler: Callable[[BaseException], bool],
    not_put: Callable[[Any], None],
) -> None: ...
def _deaths_over(inputs: Sequence[In[Any]]) -> int: ...
def _take_up(
    inputs: Sequence[In[Any]],
    outputs: Sequence[Out[Any]],
    successors: Sequence[In[Any]],
    whole: bool = False,
    blame: bool = True,
) -> None: ...
def _set_traced(traced: type) -> None: ...
def _when_finished(call: Callable[[], object]) -> None:
    """Call ``call`` when this thread has finished unpickling its item, or now if it is unpickling none."""

def _observe(channels: list[Any]) -> tuple[int, int, int]: ...
def _size_of(item: Any) -> int: ...
def _descriptor_of(pid: int, fd: int) -> int: ...
def _select(
    gets: list[Any], puts: list[tuple[Any, Any]], timeout: float | None, ready: list[Any] = []
) -> tuple[int, Any]: ...
def _die_with(pid: int) -> None: ...
def _die_of(number: int) -> None: ...
def _claim_signal(number: int) -> bool: ...
def _frame_dumps(number: int, fd: int) -> None: ...
def _dump_before_death(number: int) -> None: ...
