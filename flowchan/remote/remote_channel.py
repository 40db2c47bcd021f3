"""Channels across hosts as those have them in whose process they were not made.

Calls on the channel itself are done by its home, one after the other. A port, which ``reader()`` and
``writer()`` give, has a ring of its own here, which a link fills and empties: many items are under way at a
time, and no call waits for home. docs/hosts.md says what differs.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import math
import numbers
import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NoReturn, TypeVar

from flowchan import _core
from flowchan.channel.channel import Channel, ChannelStats, beside_packed, hears_aborts
from flowchan.channel.ports import In, Out, moved
from flowchan.channel.transports import HOSTS
from flowchan.errors import Broken, ChannelError, Drained, Empty, FlowchanError, HostError
from flowchan.items.arguments import flag, is_whole, refuses_misspelt, secret_bytes
from flowchan.remote import remote_select
from flowchan.remote.channel_server import home_at, home_of
from flowchan.remote.connection import PEER_TIMEOUT_S, Connection, RemotePort, using
from flowchan.remote.messages import Recalled, Reply, opened, seal, sealed_cause
from flowchan.remote.pending_calls import Unanswered, is_not_now
from flowchan.transport import descriptors
from flowchan.transport.addresses import channel_address, mark_of, number_in, place_in
from flowchan.transport.interrupts import unless_interrupted

T = TypeVar("T")
R = TypeVar("R")


class _RemoteEnd(Generic[T]):
    """What both ends of a channel whose home is elsewhere have in common."""

    def __init__(self, far: RemoteChannel[T], line: RemotePort) -> None:
        super().__init__(line.ring)  # type: ignore[call-arg]  # the port that stands beside it
        self._far, self._line = far, line
        self.is_open = True

    @property
    def channel(self) -> RemoteChannel[T]:
        """The channel whose port it is."""
        return self._far

    def close(self) -> None:
        """Leave. Returns when home knows it, and has all that was put."""
        self.__exit__(None, None, None)

    def __exit__(self, *how: Any) -> None:
        """As ``close``; of a reading end that is left by an exception, home has the items in hand again."""
        self.is_open = False
        super().__exit__(*how)  # type: ignore[misc]
        self._line.finished.wait()

    def __reduce__(self) -> tuple[Any, ...]:
        return moved(self)  # type: ignore[arg-type]


class RemoteIn(_RemoteEnd[T], In[T]):
    """A reading end of a channel whose home is elsewhere."""

    def get(self, timeout: float | None = None) -> T:
        """As every port's; but an item that is at home now has two round trips, however short the time."""
        return self._in_two_round_trips(super().get, timeout)

    def get_many(self, max: int, timeout: float | None = None) -> list[T]:
        """As every port's, with the same difference."""
        return self._in_two_round_trips(functools.partial(super().get_many, max), timeout)

    def get_nowait(self) -> T:
        """As ``get`` with no time at all."""
        return self.get(0)

    def _in_two_round_trips(self, call: Callable[[float | None], R], timeout: float | None) -> R:
        try:
            return call(timeout)
        except Empty:
            assert timeout is not None
            rest = self._far._two_round_trips() - timeout
            if rest <= 0:
                raise
        return call(rest)


class RemoteOut(_RemoteEnd[T], Out[T]):
    """A writing end of a channel whose home is elsewhere."""


class RemoteChannel(Channel[T]):
    """A channel across hosts that was made in another process. ``flowchan.hosts.open_channel`` and items that
    hold one give it."""

    across = HOSTS.name
    is_elsewhere = True

    def __init__(
        self, at: tuple[str, bytes, bool], connection: Connection, within: float | None = None
    ) -> None:
        capacity, max_bytes, name = connection.open(number_in(at[0]), within)
        _core.Channel.__init__(  # it is empty for ever: all calls go to home
            self, capacity=capacity, processes=False, max_bytes=max_bytes or 2**64 - 1, name=name
        )
        self._at, self._link = at, connection  # `at`: address, secret, TLS
        self._number = number_in(at[0])
        self._returned: collections.deque[Any] = collections.deque()  # what comes before home's next item

    @property
    def _connection(self) -> Connection:
        if self._link.pid != os.getpid():  # a forked child has one of its own
            with using(place_in(self._at[0]), *self._at[1:]) as link:
                link.open(self._number)
                link.adopt(self._number, self)
            self._link = link
            self._returned.clear()
        return self._link

    def _ask(self, what: str, *arguments: Any) -> Any:
        return self._connection.ask(self._number, what, *arguments)

    def _two_round_trips(self) -> float:
        return 0.002 + self._connection.two_round_trips()

    # --- items ---

    def put(self, item: T, timeout: float | None = None) -> None:
        """As every channel's; home has it when this returns."""
        wait = _seconds(timeout)
        letter, take_back = seal(item)
        self._connection.ask(self._number, "put", letter, wait, undone=take_back)

    def put_nowait(self, item: T, /) -> None:
        """As every channel's; takes a round trip."""
        self.put(item, 0)

    def put_many(self, items: Iterable[T], timeout: float | None = None) -> None:
        """As every channel's: one after the other."""
        give_up = math.inf if (wait := _seconds(timeout)) is None else time.monotonic() + wait
        done = 0
        try:
            for item in items:
                left = None if give_up == math.inf else max(0.0, give_up - time.monotonic())
                self.put(item, left)
                done += 1
        except BaseException as error:
            error.items_put = done  # type: ignore[attr-defined]
            raise

    async def aput(self, item: T) -> None:
        """As ``put``, for coroutines. One that is cancelled may have put it."""
        letter, take_back = seal(item)
        await self._connection.await_answer(self._number, "put", letter, None, undone=take_back)

    def get(self, timeout: float | None = None) -> T:
        """As every channel's."""
        wait = _seconds(timeout)
        return self._take("get", (), wait, opened, self._return_one)  # type: ignore[no-any-return]

    def _take(self, what: str, how: tuple[Any, ...], wait: float | None, take: Any, late: Any) -> Any:
        """What has come here already, else what home gives within the time."""
        give_up = math.inf if wait is None else time.monotonic() + wait
        while True:
            if came := self._came_before(*how):
                return self._open_here(came, take if what == "get_many" else _first_opened)
            left = None if give_up == math.inf else max(0.0, give_up - time.monotonic())
            within = None if left is None else self._connection.answered_within(left)
            try:
                return self._connection.ask(
                    self._number, what, *how, left, late=late, take=take, reads=(self,), within=within
                )
            except Recalled:
                continue
            except Unanswered:
                if not self._returned:
                    raise Empty(f"nothing was heard of {self._at[0]} within {wait:g} s") from None
            except (Drained, Empty):
                if not self._returned:  # what an interrupted call asked for may have come meanwhile
                    raise

    def get_nowait(self) -> T:
        """As every channel's; takes a round trip."""
        return self.get(0)

    def get_many(self, max: int, timeout: float | None = None) -> list[T]:
        """As every channel's."""
        if not is_whole(max) or max < 1:
            raise ValueError(f"get_many: max must be an int of at least 1, got {max!r}")
        wait = _seconds(timeout)
        return self._take("get_many", (max,), wait, self._open_all, self._return_many)  # type: ignore[no-any-return]

    async def aget(self) -> T:
        """As ``get``, for coroutines. A cancelled call has taken nothing."""
        while True:
            if came := self._came_before():
                return self._open_here(came, _first_opened)  # type: ignore[no-any-return]
            try:
                return await self._connection.await_answer(  # type: ignore[no-any-return]
                    self._number, "get", None, late=self._return_one, take=opened, reads=(self,)
                )
            except Recalled:
                continue
            except Drained:
                if not self._returned:
                    raise

    def _came_before(self, most: int = 1) -> list[Any]:
        """What has come, still sealed, that earlier calls asked for which were interrupted."""
        found: list[Any] = []
        with contextlib.suppress(IndexError):
            while len(found) < most:
                found.append(self._returned.popleft())
        return found

    def _open_here(self, found: list[Any], take: Callable[[list[Any]], Any]) -> Any:
        """What ``take`` makes of what is no more among the returned ones."""
        try:
            return take(found)
        except BaseException as error:
            if is_not_now(error):
                self.put_back(found)
            raise

    def _open_all(self, found: list[Any]) -> list[Any]:
        """The items. One that can't be received tells its error if it is the first, else to the next call."""
        items: list[Any] = []
        try:
            for item in found:
                items.append(opened(item))
        except unless_interrupted(Exception) as error:
            stays = bool(items) or is_not_now(error)
            back = found[len(items) + (not stays) :]
            found.clear()  # nobody puts it back again
            self.put_back(back)
            if not items:
                raise
        return items

    def put_back(self, items: Sequence[Any]) -> None:
        """They are the next ones here, also of who waits for home's."""
        self._returned.extendleft(reversed(items))
        self._link.recall_readers(self)

    def _return_one(self, answer: Reply) -> None:
        """An item has come for a call that waits no more: it is the next one here."""
        if answer.wrong is None:
            self._return_items([answer.value])

    def _return_many(self, answer: Reply) -> None:
        if answer.wrong is None:
            self._return_items(answer.value)

    def _return_items(self, items: Sequence[Any]) -> None:
        self._returned.extend(items)
        self._link.recall_readers(self)

    def __next__(self) -> T:
        try:
            return self.get()
        except Drained:
            raise StopIteration from None

    async def __anext__(self) -> T:
        try:
            return await self.aget()
        except Drained:
            raise StopAsyncIteration from None

    @staticmethod
    def _select(gets: list[Any], puts: list[Any], timeout: Any, ready: list[Any]) -> tuple[int, Any]:
        """``select`` with a channel as this one among others."""
        return remote_select.select(gets, puts, _seconds(timeout), ready)

    def loan(self, *_: Any, **__: Any) -> NoReturn:
        """Memory of home can't be lent."""
        raise ChannelError(f"{self!r} has its memory on another host: put an array of your own")

    # --- the channel ---

    def close(self) -> None:
        """As every channel's."""
        self._ask("close")

    def abort(self, cause: BaseException | None = None) -> None:
        """As every channel's."""
        if cause is not None and not isinstance(cause, BaseException):
            raise TypeError(f"abort: cause must be an exception or None, got {cause!r}")
        if (hear := hears_aborts.get()) is not None:
            hear(self, cause)
        with contextlib.suppress(Broken):  # home is lost
            self._ask("abort", sealed_cause(cause))

    def reader(self) -> In[T]:
        """A counted reading end, with many items under way at a time."""
        return self._port(RemoteIn, True)  # type: ignore[no-any-return]

    def writer(self) -> Out[T]:
        """A counted writing end, with many items under way at a time."""
        return self._port(RemoteOut, False)  # type: ignore[no-any-return]

    def _port(self, kind: Any, reads: bool) -> Any:
        name = self._name or f"of {self.address}"
        line = self._connection.new_line(name, self.max_bytes, reads)
        port = kind(self, line)
        line.port = weakref.ref(port)
        self._connection.open_line(line, self._number)
        return port

    def _look(self) -> tuple[int, bool, bool, bool, ChannelStats]:
        looked: tuple[int, bool, bool, bool, ChannelStats] = self._ask("look")
        return looked

    def __len__(self) -> int:
        return self._look()[0]

    @property
    def closed(self) -> bool:
        """Whether nobody can put any more."""
        return self._look()[1]

    @property
    def drained(self) -> bool:
        """Whether it is closed and nothing more can be got."""
        return self._look()[2]

    @property
    def broken(self) -> bool:
        """Whether it ended by failure."""
        try:
            return self._look()[3]
        except Broken:
            return True

    def stats(self) -> ChannelStats:
        """Counts of this moment at home."""
        return self._look()[4]

    @property
    def address(self) -> str:
        """Where it is reached."""
        return self._at[0]

    @property
    def secret(self) -> bytes:
        """What has to be proved there."""
        return self._at[1]

    def __repr__(self) -> str:
        return f"<Channel({self.capacity}, across={self.across!r}) of {self.address}>"

    def came(self) -> None:
        """An item that it was in is finished here. The server keeps it for that item until then."""
        self._connection.tell("come", self._number)

    def _another(self, capacity: int) -> Channel[Any]:
        connection = self._connection
        return make_elsewhere(connection, place_in(self.address), *self._at[1:], capacity)

    def __reduce__(self) -> tuple[Any, ...]:
        if (beside := beside_packed(self)) is not None:
            return beside
        sent, parcel = False, descriptors.now.packing
        if parcel is not None:
            with contextlib.suppress(Broken, HostError):  # home is lost: who receives it is told
                # Before the item is anywhere: we may be killed then.
                sent = self._connection.send(self._number)
        if parcel is not None and sent:
            parcel.counted.append(self.came)
        home = self._link.home
        return arrive, (*self._at, home, sent and mark_of(home, self._number))


def arrive(address: str, secret: bytes, tls: bool, home: str, sent: str | bool) -> Channel[Any]:
    """The channel of that address: the one that was made here, if it was. ``sent``: a mark, if it has come in
    an item, for which its home keeps it until that is finished."""
    here = home_of(home)
    try:
        if here is not None and here.is_here(number_in(address)):
            found = here.find(number_in(address))
            if sent:
                here.keep(found, number_in(address))
                _core._when_finished(functools.partial(here.come, number_in(address)))
            return found
        far = remote_channel(address, secret, tls, PEER_TIMEOUT_S)
        if sent:
            _core._when_finished(far.came)
        return far
    except FlowchanError as error:
        raise Broken(f"the channel of {address} can't be received: {error}") from error
    except OSError as error:
        lacking = descriptors.shortage(f"the channel of {address}", error)
        if lacking is None:
            raise
        raise lacking from error


def remote_channel(
    address: str, secret: bytes, tls: bool, timeout: float, give_up: float | None = None
) -> RemoteChannel[Any]:
    """That of this process for a channel whose home is elsewhere. ``timeout``: for a home that this process
    does not know yet. ``give_up``: when to, whether it knows it or not."""
    with using(place_in(address), secret, tls, timeout) as connection:
        known: RemoteChannel[Any] | None = connection.user(number_in(address))
        if known is not None:
            return known
        within = None if give_up is None else max(0.0, give_up - time.monotonic())
        opened: RemoteChannel[Any] = RemoteChannel((address, secret, tls), connection, within)
        adopted: RemoteChannel[Any] = connection.adopt(opened._number, opened)
        return adopted


def make_elsewhere(
    connection: Connection, place: str, secret: bytes, tls: bool, capacity: int
) -> RemoteChannel[Any]:
    """A new channel whose home is there."""

    def drop(answer: Reply) -> None:
        if answer.wrong is None:
            connection.tell("drop", answer.value)

    number = connection.ask(0, "make", capacity, late=drop)
    try:
        made: RemoteChannel[Any] = RemoteChannel((channel_address(place, number), secret, tls), connection)
        connection.adopt(number, made)
        return made
    except BaseException:
        connection.tell("drop", number)  # home keeps what it has made until then
        raise


@refuses_misspelt("open_channel")
def open_channel(
    address: str, secret: bytes, *, tls: bool = False, timeout: float = PEER_TIMEOUT_S
) -> Channel[Any]:
    """Open a channel that another program has made by ``Channel(across="hosts")``.

    Args:
        address: The ``address`` of the channel in that program.
        secret: The ``secret`` of the channel in that program.
        tls: Whether that program uses TLS, as it said in :func:`serve` (default: False).
        timeout: Seconds to wait for that program (default: 10).

    Returns:
        The channel.

    Raises:
        HostError: The program was not reached within ``timeout`` seconds, or it refused the secret.
        ValueError: ``address`` or ``timeout`` is not valid.

    Example:
        >>> from flowchan import Channel, hosts
        >>> channel = Channel(across="hosts")
        >>> address, secret = channel.address, channel.secret  # give these to the other program
        >>> hosts.open_channel(address, secret).put("a")
        >>> channel.get()
        'a'
    """
    place, number = place_in(address), number_in(address)
    secret_bytes("open_channel", secret, "pass the secret of the owner, channel.secret")
    flag("open_channel", "tls", tls)
    wait = _seconds(timeout)
    here = home_at(place, secret)
    try:
        if here is not None:
            return here.find(number)
        if wait is None:
            return remote_channel(address, secret, tls, math.inf)
        return remote_channel(address, secret, tls, wait, time.monotonic() + wait)
    except ChannelError as error:
        raise HostError(str(error), address) from None


def _first_opened(found: list[Any]) -> Any:
    return opened(found[0])


def _seconds(timeout: Any) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, numbers.Real) and not isinstance(timeout, bool) and float(timeout) >= 0:
        return float(timeout) if float(timeout) < 1e9 else None
    raise ValueError(f"timeout must be None or a number of at least 0 seconds, got {timeout!r}")
