"""Manage the sessions of client processes at the server that owns their channels."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import threading
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol

from flowchan import _core
from flowchan.channel.channel import Channel, In, Out
from flowchan.errors import Broken, Closed, Full
from flowchan.remote.messages import (
    CallCancelled,
    CallRequest,
    Cancel,
    Finished,
    Reply,
    ServerClosed,
    cause_in,
    control_ring,
    describe_error,
    sealed_cause,
)
from flowchan.transport.addresses import number_in
from flowchan.transport.descriptors import lacks
from flowchan.transport.link_events import LinkBroken, LinkIdle, StreamFinished, watch
from flowchan.transport.local_peers import LocalPeer

if TYPE_CHECKING:
    from collections.abc import Callable

GOODBYE_TIMEOUT_S = 1.0
"""Seconds to wait for a client to disconnect when either side ends the session."""
POLL_INTERVAL_S = 0.05
"""Seconds between checks of whether a disconnected client on this machine has ended."""
TRANSIT_POLL_S = 0.0005
"""Seconds between checks for items in transit."""
NO_STREAM = {"taken": 0, "used": 0, "ahead": 0, "standing": 0, "staged": 0}
"""Counts for a stream that is not open."""


class SessionOwner(Protocol):
    """Methods of the channel server that its sessions use."""

    address: str
    peer_timeout: float
    requests: dict[str, Callable[..., Any]]

    def make(self, capacity: int) -> Channel[Any]:
        """Make a channel."""

    def find(self, number: int) -> Channel[Any]:
        """Return the channel with this number."""

    def item_done(self, number: int) -> None:
        """Stop counting an item that contained the channel, because the item is finished."""

    def send(self, number: int) -> bool:
        """Count an item that contains the channel."""

    def entrance(self, channel: Channel[Any], number: int) -> Channel[Any]:
        """Return the object of the channel through whose ports clients put."""

    def has_prefetched(self, channel: Channel[Any], other_than: ClientSession) -> bool:
        """Return whether another client has prefetched items of ``channel``."""

    def forget(self, session: ClientSession) -> None:
        """Remove a session that has ended."""


class ClientSession:
    """Session of one client process.

    In all methods, ``number`` is a channel's number. All methods except ``_watch`` run in the thread of the
    server's event loop. If the client's process has ended or is silent for too long, the session closes the
    client's ports as if a local process had died.

    Args:
        server: The server.
        loop: The server's event loop.
        id: Client's ID.
        pid: Client's process ID, which the cause names if a channel breaks.
        process: Client's process, if it runs on this machine.
    """

    def __init__(
        self,
        server: SessionOwner,
        loop: asyncio.AbstractEventLoop,
        id: str,
        pid: int,
        process: LocalPeer | None,
    ) -> None:
        self.id, self.pid, self._process = id, pid, process
        self._server, self._loop = server, loop
        self._over = self._left = False
        # Set once the client has left. The timer ends the session if the client stays connected.
        self._end_timer: asyncio.TimerHandle | None = None
        self._open: dict[int, Channel[Any]] = {}  # channels kept because the client has them open
        self._opened: Counter[int] = Counter()  # how often the client has opened each channel
        # Channels for which the client has opened a reading port.
        self._read: weakref.WeakSet[Channel[Any]] = weakref.WeakSet()
        self._ports: dict[int, In[Any] | Out[Any]] = {}  # by stream number
        # Stream numbers of the ports for the client's plain calls; the key True is for the reading port.
        self._plain: weakref.WeakKeyDictionary[Channel[Any], dict[bool, int]] = weakref.WeakKeyDictionary()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._answering: set[int] = set()  # ids of the calls whose replies are being sent
        self._replies, requests = control_ring(), control_ring()
        self._requests, self._request_writer = requests.reader(), requests.writer()
        self._reply_reader = self._replies.reader()
        self.link = _core.Link(True)
        self.link.open_stream(0, [self._reply_reader], [self._request_writer])
        self._listening = loop.create_task(self._receive_requests())
        name = f"flowchan client of {server.address}"
        self._watching = threading.Thread(target=self._watch, name=name, daemon=True)
        self._watching.start()

    def attach(self, sock: socket.socket) -> None:
        """Connect the link through a socket to the client."""
        self.link.attach(sock.detach())

    # --- the link ---

    def _watch(self) -> None:
        """Handle the link's events, in a separate thread.

        If the connection is lost, the session ends after 1.5 times the server's ``peer_timeout``. The session
        ends earlier if the client's process is known to have ended.
        """
        limit = 1.5 * self._server.peer_timeout
        interval = limit if self._process is None else POLL_INTERVAL_S
        for event in watch(self.link, self._server.peer_timeout / 4, interval):
            if isinstance(event, StreamFinished):
                self._call_soon(self._finish, event.stream)
            elif isinstance(event, LinkIdle):
                if event.silent > limit or (not event.connected and self._has_ended()):
                    self._call_soon(self._give_up)
                    break
            elif isinstance(event, LinkBroken) and event.stuck > self._server.peer_timeout:
                self._call_soon(self._give_up)
                break
            elif self._left:
                self._call_soon(self._give_up)
        if self._process is not None:
            self._process.close()

    def _has_ended(self) -> bool:
        return self._process is not None and self._process.has_ended()

    def _call_soon(self, work: Callable[..., Any], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(work, *arguments)

    def _finish(self, stream: int) -> None:
        port = self._ports.pop(stream, None)
        if port is None:
            return
        used = self._streams_of(stream)[0]["used"]
        self.link.drop(stream)
        why = _broken_by(port.channel) if isinstance(port, Out) else None
        cause = None if why is None else sealed_cause(why.__cause__)
        finished = Finished(stream, why is not None, cause, used)
        self._tasks[-stream] = self._loop.create_task(self._send_finished(finished))

    async def _send_finished(self, message: Finished) -> None:
        with contextlib.suppress(Closed, Broken):
            await self._replies.aput(message)
        self._tasks.pop(-message.stream, None)

    # --- requests ---

    async def _receive_requests(self) -> None:
        with contextlib.suppress(Closed, Broken):
            while True:
                request = await self._requests.aget()
                if isinstance(request, Cancel):
                    self._cancel(request.number)
                elif isinstance(request, CallRequest):
                    self._tasks[request.number] = self._loop.create_task(self._answer(request))
                del request

    def _cancel(self, number: int) -> None:
        """Cancel a call. The caller still gets a reply.

        If the call's task has not started yet, it never starts. A call has no task if the caller was
        interrupted before it sent the request.
        """
        if number in self._answering:
            return
        if (task := self._tasks.get(number)) is None:
            self._tasks[number] = self._loop.create_task(self._answer_cancelled(number))
        elif task.cancel():
            task.add_done_callback(functools.partial(self._answer_if_unstarted, number))

    def _answer_if_unstarted(self, number: int, task: asyncio.Task[None]) -> None:
        # If the task never started, remove it; a started task removes itself.
        if self._tasks.get(number) is task and not self._over:
            self._tasks[number] = self._loop.create_task(self._answer_cancelled(number))

    async def _answer_cancelled(self, number: int) -> None:
        await self._reply(Reply(number, error=describe_error(CallCancelled())))

    async def _answer(self, request: CallRequest) -> None:
        try:
            value = await self._do(request)
            reply = Reply(request.number, value)
        except asyncio.CancelledError:
            reply = Reply(request.number, error=describe_error(CallCancelled()))
        except Exception as error:
            reply = Reply(request.number, error=describe_error(error))
        await self._reply(reply)
        if request.what == "leave" and not self._over:
            self._left = True
            self._end_timer = self._loop.call_later(GOODBYE_TIMEOUT_S, self._give_up)

    async def _reply(self, reply: Reply) -> None:
        if self._over:
            return
        self._tasks.pop(reply.number, None)  # from now on, the call can't be cancelled
        self._answering.add(reply.number)
        try:
            while not await self._has_replied(reply):
                await asyncio.sleep(POLL_INTERVAL_S)
        except Exception as error:
            await self._has_replied(
                Reply(reply.number, error=describe_error(error))
            )  # the caller would wait forever without a reply
        finally:
            self._answering.discard(reply.number)

    async def _has_replied(self, reply: Reply) -> bool:
        """Send the reply, or return False if this process currently lacks memory or descriptors."""
        try:
            with contextlib.suppress(Closed, Broken):
                await self._replies.aput(reply)
        except (MemoryError, OSError) as error:
            if not lacks(error):
                raise
            return False
        return True

    async def _do(self, request: CallRequest) -> Any:
        if request.what == "leave":
            return None
        if request.what in self._server.requests:
            return self._server.requests[request.what](self, *request.arguments)
        if request.what == "make":
            return self._make(*request.arguments)
        if request.what == "open":
            return self._do_open(request.channel)
        if request.what == "send":
            return self._server.send(request.channel)
        if request.what == "drop":
            return self._drop(request.channel)
        if request.what == "item_done":
            return self._server.item_done(request.channel)
        done = getattr(self, f"_do_{request.what}")(self._open[request.channel], *request.arguments)
        return await done if asyncio.iscoroutine(done) else done

    def _make(self, capacity: int) -> int:
        made = self._server.make(capacity)
        return self.keep(made)

    def _do_open(self, number: int) -> tuple[int, int | None, str]:
        channel = self._server.find(number)
        self._open[number] = channel
        self._opened[number] += 1
        return channel.capacity, channel.max_bytes, channel._name

    def keep(self, channel: Channel[Any]) -> int:
        """Keep a channel until the client has opened and dropped the channel; return the channel's number."""
        number = number_in(channel.address)
        self._open[number] = channel
        return number

    def _drop(self, number: int) -> None:
        """Undo one opening of a channel.

        Openings are counted, because a drop may arrive after the next opening.
        """
        self._opened[number] -= 1
        if self._opened[number] <= 0:
            del self._opened[number]
            self._open.pop(number, None)

    def _do_close(self, channel: Channel[Any]) -> None:
        channel.close()

    def _do_abort(self, channel: Channel[Any], cause: Any) -> None:
        channel.abort(cause_in(cause))

    def _do_look(self, channel: Channel[Any], reads: int, writes: int) -> tuple[Any, ...]:
        """Return the state of the channel and of this client's streams at the same moment."""
        while True:
            streams = self._streams_of(reads, writes)
            stats = channel.stats()
            if self._streams_of(reads, writes) == streams:
                return channel.closed, channel.broken, stats, *streams

    def _streams_of(self, *numbers: int) -> list[dict[str, int]]:
        streams = self.link.state()["streams"]
        return [streams[number] if number and number in streams else NO_STREAM for number in numbers]

    async def _do_offer(
        self, channel: Channel[Any], stream: int, most: int, got: int | None, writes: int, put: int
    ) -> tuple[int, bool, int]:
        """Wait until ``put`` items of stream ``writes`` have arrived, and then send up to ``most`` items.

        If ``got`` is not None, the client has received ``got`` items, and its call will fail unless it gets
        another item. In that case, also wait for items that other clients have prefetched and are returning.

        Returns:
            The total number of items sent to the client, whether the channel has ended, and the sum of the
            channel's puts and gets.
        """
        while (
            (mine := self._streams_of(writes)[0])["used"] < put
            and not mine["staged"]
            and self._ports.get(writes)
        ):
            await asyncio.sleep(TRANSIT_POLL_S)
        while True:
            # Look for prefetched items before the offer. If another client returned an item between an offer
            # and a later check, neither step would see that item.
            prefetched, moves = self._server.has_prefetched(channel, self), _moves(channel)
            offered = self.link.offer(stream, most)
            # ``offered`` is None while the client is returning the items that it has prefetched.
            if offered is not None:
                sent, ended = offered
                if got is None or ended or sent > got:
                    return sent, ended, _moves(channel)
                if not prefetched and moves == _moves(channel):
                    return sent, ended, moves
            await asyncio.sleep(TRANSIT_POLL_S)

    def has_prefetched(self, channel: Channel[Any]) -> bool:
        """Return whether the client has prefetched items of ``channel`` that it has not taken yet.

        Items in a counted port do not count, because the client may process them for a long time.
        """
        streams = self.link.state()["streams"]
        plain = self._plain.get(channel, {}).values()
        return any(
            streams[stream]["ahead"] > (0 if stream in plain else streams[stream]["in_hand"])
            for stream, port in list(self._ports.items())
            if port.channel is channel and stream in streams
        )

    def _do_room(self, channel: Channel[Any], stream: int) -> tuple[int, bool, int]:
        """Return how many items the client may put into the channel, counted from its first put.

        Returns:
            The total number of items that the client may put, whether the channel has ended, and the sum of
            the channel's puts and gets.
        """
        return *self.link.room(stream), _moves(channel)

    def _do_reader(self, channel: Channel[Any], stream: int, counted: bool = True) -> None:
        self._ports[stream] = port = (
            channel.reader() if counted else In(channel, channel._uncounted_session())
        )
        self._read.add(channel)
        self.link.open_stream(stream, [port], [], True)
        if not counted:
            self._plain.setdefault(channel, {})[True] = stream
            self._pair(channel)

    def _pair(self, channel: Channel[Any]) -> None:
        streams = self._plain.get(channel, {})
        if len(streams) == 2:
            self.link.pair(streams[False], streams[True])

    def _do_writer(self, channel: Channel[Any], stream: int, counted: bool = True) -> int:
        """Open a writing port, and return how many items the client may put initially.

        A counted port ignores this number and sends items ahead.
        """
        entrance = self._server.entrance(channel, number_in(channel.address))
        self._ports[stream] = port = (
            entrance.writer() if counted else Out(entrance, entrance._uncounted_session())
        )
        self.link.open_stream(stream, [], [port], limited=not counted)
        if not counted:
            self._plain.setdefault(channel, {})[False] = stream
            self._pair(channel)
        room: int = self.link.room(stream)[0]
        return room

    # --- ending ---

    def has_read(self, channel: Channel[Any]) -> bool:
        """Return whether the channel has no items left for the client, except those that it is processing."""
        if self._over:
            return True
        streams = self.link.state()["streams"]
        ports = {stream: port for stream, port in list(self._ports.items()) if port.channel is channel}
        return channel in self._read and all(
            self._has_read(port, streams.get(stream))
            for stream, port in ports.items()
            if isinstance(port, In)
        )

    def _has_read(self, port: In[Any], stream: dict[str, int] | None) -> bool:
        return stream is None or (not len(port.channel) and stream["ahead"] <= stream["in_hand"])

    def _ended(self) -> tuple[int, ...]:
        """Return the IDs of this client's streams that ended without a failure."""
        streams = self.link.state()["streams"]
        return tuple(
            stream
            for stream, port in self._ports.items()
            if port.channel.closed
            and not port.channel.broken
            and (isinstance(port, Out) or self._has_read(port, streams.get(stream)))
        )

    async def notify_and_end(self, why: str) -> None:
        """Tell the client that the server is closing, wait briefly for its end, and end the session."""
        with contextlib.suppress(Closed, Broken, Full):
            self._replies.put_nowait(ServerClosed(why, self._ended()))
        give_up = self._loop.time() + GOODBYE_TIMEOUT_S
        while self._loop.time() < give_up:
            stats = self._replies.stats()
            if not self.link.state()["connected"] or not stats.inside + stats.leased:
                break  # the client has received the message
            await asyncio.sleep(0.005)
        self._give_up()
        self._watching.join()

    def _give_up(self) -> None:
        """End the session, and release the ports that the client has not closed."""
        if self._over:
            return
        self._over = True
        if self._end_timer is not None:
            self._end_timer.cancel()  # a pending timer would keep this session alive
        self.link.close()
        for task in list(self._tasks.values()):
            task.cancel()
        self._replies.close()
        self._request_writer.close()
        for port in self._ports.values():
            if isinstance(port, Out):
                port._fall(self.pid)
            else:
                port._give_up()
        self._ports.clear()
        self._open.clear()
        self._opened.clear()
        self._server.forget(self)


def _moves(channel: Channel[Any]) -> int:
    stats = channel.stats()
    return stats.items_in + stats.items_out


def _broken_by(channel: Channel[Any]) -> Broken | None:
    """Return the error that a put into an aborted channel raises, or None if the channel was not aborted."""
    if channel.broken:
        try:
            channel.put_nowait(None)  # raises, because the channel has ended
        except Broken as error:
            # Drop the traceback, because its frames and the session would keep each other alive.
            return error.with_traceback(None)
        except Closed:
            pass
    return None
