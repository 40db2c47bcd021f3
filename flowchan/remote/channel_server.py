"""Where the channels across hosts of this process are reached from elsewhere.

Such a channel is an ordinary ring in the process that made it, its home. The server listens at one
address for all
of them, and lets in who proves the secret: a :class:`ClientSession`, for each process elsewhere that has
some of them
open, with one link to it. What a guest asks for over the control line is done here in the channel itself; a
port that it opens is an ordinary port here, lent to the link.

One thread does all of that, in an event loop of its own, and one per guest watches over its link. They end
when the last channel is gone.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import hmac
import os
import re
import secrets
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from flowchan import _core
from flowchan.channel import awaiting
from flowchan.channel.channel import Channel
from flowchan.channel.transports import HOSTS
from flowchan.errors import Broken, ChannelError, FlowchanError
from flowchan.remote.connection import Connection, using
from flowchan.remote.messages import packed_in
from flowchan.remote.orphans import OrphanMemory, Orphans
from flowchan.remote.session import ClientSession
from flowchan.run.crew.at_exit import before_exit
from flowchan.transport.addresses import mark_of
from flowchan.transport.link_events import PEER_TIMEOUT_S
from flowchan.transport.listener import AuthenticatedListener
from flowchan.transport.local_peers import local_peer
from flowchan.transport.tcp import listen
from flowchan.transport.versions import differs, versions

ANYWHERE = "127.0.0.1:0"
KNOWN = 32  # guests that were given up and would be told so
NEAR = 1.0  # seconds within which a home that lives answers its children


class ChannelServer:
    """Channels under one address, by their numbers there. It ends with the last of them, unless it is
    ``kept``. ``peer_timeout``: for how many seconds a process elsewhere goes on without hearing of it. Raises
    ``ValueError`` or ``OSError`` when it can't listen at ``address``."""

    def __init__(
        self,
        address: str = ANYWHERE,
        secret: bytes | None = None,
        tls: bool = False,
        peer_timeout: float = PEER_TIMEOUT_S,
        kept: bool = False,
    ) -> None:
        self.id, self.pid = secrets.token_hex(16), os.getpid()
        self.tls, self.peer_timeout = tls, peer_timeout
        self.secret = secrets.token_bytes(32) if secret is None else secret
        self.asked: dict[str, Callable[..., Any]] = {}  # what else guests may ask for
        self.left: Callable[[ClientSession], None] = lambda _: None  # hears of each guest that is gone
        self._stays, self._kept, self._over = kept, True, False
        self._channels: weakref.WeakValueDictionary[int, Channel[Any]] = weakref.WeakValueDictionary()
        self._sent: dict[int, Channel[Any]] = {}
        self._under_way: Counter[int] = Counter()  # in so many items
        self._dropped: deque[Orphans] = deque()  # which may be nobody's now
        self._mark = re.compile(re.escape(mark_of(self.id, "").encode()) + rb"(\d+)")
        self._counting = threading.RLock()  # the collector may finish an item in whoever has it
        self._numbers = 0
        self._guests: dict[str, ClientSession] = {}
        self._given_up: list[str] = []
        self._hello = {
            **versions(),
            "home": self.id,
            "peer_timeout": peer_timeout,
            "given_up": self._given_up,
        }
        self._door = AuthenticatedListener(listen(address), self.secret, self._hello, tls=tls)
        self.address = self._door.address
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        name = f"flowchan home {self.address}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        _homes[self.id] = self
        before_exit(_close_all, 0)

    def __repr__(self) -> str:
        return f"<home of {len(self._channels)} channels at {self.address}>"

    # --- channels ---

    def add(self, channel: Channel[Any]) -> int | None:
        """Its number; none if this home is over already."""
        with _ending:
            if self._over:
                return None
            self._numbers += 1
            self._channels[self._numbers] = channel
            number = self._numbers
        self._kept = self._stays
        self._hear_of_the_end_of(channel, number)
        return number

    def make(self, capacity: int) -> Channel[Any]:
        """A new channel that is reached here."""
        before = chosen.set(self)
        try:
            return Channel(capacity, across=HOSTS.name)
        finally:
            chosen.reset(before)

    def send(self, number: int) -> bool:
        """The channel is put into an item: it lasts, whoever drops it, until that is finished, and whoever
        finishes it says that it has :meth:`come`. False: nobody has it any more."""
        if os.getpid() != self.pid:
            with contextlib.suppress(Broken):
                connection = self._from_child()
                return connection is not None and connection.send(number)
            return False
        channel = self._channels.get(number)
        with self._counting:
            if channel is None and number not in self._sent:
                return False
            if channel is not None and number not in self._sent:
                self._sent[number] = _twin(channel)  # before it counts: there may be no descriptors for it
            self._under_way[number] += 1
        return True

    def come(self, number: int) -> None:
        """An item that it was put into is finished: nobody else gets that."""
        if os.getpid() != self.pid:
            if (connection := self._from_child()) is not None:
                connection.tell("come", number)
            return
        with self._counting:
            self._under_way[number] -= 1
            if self._under_way[number] > 0:
                return
            del self._under_way[number]
            last = self._sent.pop(number, None)
        if last is not None:
            self.drop(number, OrphanMemory(last))
        del last  # not under the lock: it may be the end of the channel

    def sent_in(self, value: Any) -> Counter[int]:
        """How often which channels of this home are in what a call is answered."""
        found: Counter[int] = Counter()
        if self._sent:
            for packed in packed_in(value):
                found.update(int(match) for match in self._mark.findall(packed))
        return found

    def keep(self, channel: Channel[Any], number: int) -> None:
        """The channel has come in an item. A forked child opens it, as who is elsewhere does: the parent, who
        may have no more of it than that item, keeps it for as long as the child has it."""
        if os.getpid() == self.pid:
            return
        with contextlib.suppress(FlowchanError):  # the parent is gone
            if (connection := self._from_child()) is not None:
                connection.open(number, NEAR)
                weakref.finalize(channel, connection.tell, "drop", number).atexit = False

    def _from_child(self) -> Connection | None:
        """How a forked child tells its parent what is sent and has come, as others elsewhere do: over a
        connection that is kept. None when the parent is gone."""
        try:
            os.kill(self.pid, 0)
            with using(self.address, self.secret, self.tls, NEAR) as connection:
                connection.is_kept = True
                return connection
        except (FlowchanError, OSError):
            return None

    def is_here(self, number: int) -> bool:
        """Whether this process has it: a forked child those that were made before."""
        return self.pid == os.getpid() or number in self._channels or number in self._sent

    def find(self, number: int) -> Channel[Any]:
        """Raises :class:`ChannelError` when it is gone, or never was."""
        with self._counting:  # several threads may look for it
            found = self._channels.get(number)
            if found is None and (sent := self._sent.get(number)) is not None:
                # What is under way keeps no home alive, so it is none of those that somebody has.
                twin = _twin(sent)
                found = self._channels.setdefault(number, twin)  # the collector may have run meanwhile
                if found is twin:
                    self._hear_of_the_end_of(found, number)
        if found is not None:
            return found
        raise ChannelError(
            f"there is no channel {number} at {self.address}: nobody there has it any more. A channel "
            "across hosts lasts as long as its home, or somebody who has opened it, holds it"
        )

    def _hear_of_the_end_of(self, channel: Channel[Any], number: int) -> None:
        weakref.finalize(channel, _dropped, weakref.ref(self), number, OrphanMemory(channel)).atexit = False

    def drop(self, number: int, memory: OrphanMemory) -> None:
        """An object for the channel is about to end. May be called from anywhere, also by the collector."""
        if os.getpid() != self.pid:
            return
        if self._sent and (dropped := memory.dropped(number)) is not None:  # else none can be in its items
            self._dropped.append(dropped)
        if self._over:  # perhaps just now
            self._dropped.clear()
        self.look_again()

    def _look_at_dropped(self) -> None:
        """What was put into the items of a channel that nobody has any more has come nowhere."""
        for _ in range(len(self._dropped)):
            try:
                dropped = self._dropped.popleft()
            except IndexError:  # this home has ended meanwhile
                return
            lives = dropped.number in self._channels or dropped.number in self._sent
            if not lives and not dropped.is_nobodys():
                self._dropped.append(dropped)  # a forked child has it: looked at again
            elif not lives:
                for number in self.sent_in(dropped.items()).elements():
                    self.come(number)

    def is_over(self) -> bool:
        # By those that live: who hears of an end may hear of it before the dictionary does.
        return self._over or (not self._kept and not any(True for _ in self._channels.values()))

    def look_again(self) -> None:
        """Something has changed that may be the end. May be called from anywhere, also by the collector."""
        with contextlib.suppress(RuntimeError):  # it has ended already
            self._loop.call_soon_threadsafe(self._changed.set)

    def guests(self) -> list[ClientSession]:
        return list(self._guests.values())

    def close(self) -> None:
        """Ends it now, for all who are connected."""
        self._over = True
        self.look_again()
        if threading.current_thread() is not self._thread and os.getpid() == self.pid:
            self._thread.join()

    # --- its thread ---

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self._loop.add_reader(self._door.fileno(), self._open_door)
        while True:
            with contextlib.suppress(asyncio.TimeoutError):  # now and then it sends away who says nothing
                await asyncio.wait_for(self._changed.wait(), 1.0)
            self._changed.clear()
            self._look_at_dropped()
            self._open_door()
            with _ending:
                if self.is_over():
                    self._over = True
                    _homes.pop(self.id, None)
                    break
        self._loop.remove_reader(self._door.fileno())
        self._door.close()
        why = f"the program at {self.address} has ended it"
        await asyncio.gather(*(guest.leave_alone(why) for guest in self.guests()))
        self._sent.clear()
        self._dropped.clear()
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        awaiting.end_waits()

    def _open_door(self) -> None:
        with contextlib.suppress(TimeoutError):
            while True:
                sock, hello = self._door.accept(0)
                guest = self._guest(hello)
                if guest is None:
                    sock.close()
                else:
                    guest.meet(sock)

    def _guest(self, hello: dict[str, Any]) -> ClientSession | None:
        """Who has come; nobody, if it is not wanted any more, or is of another version."""
        id, pid = hello.get("guest"), hello.get("pid")
        if not isinstance(id, str) or not isinstance(pid, int) or id in self._given_up:
            return None
        if differs(hello):
            return None  # both know what the other has: it says so over there
        if id not in self._guests:
            if hello.get("again"):
                return None
            self._guests[id] = ClientSession(self, self._loop, id, pid, local_peer(hello))
        return self._guests[id]

    def forget(self, guest: ClientSession) -> None:
        """It has left, or was given up."""
        if self._guests.pop(guest.id, None) is not None:
            self._given_up.append(guest.id)
            del self._given_up[:-KNOWN]
            self.left(guest)
        self.look_again()


_homes: dict[str, ChannelServer] = {}
"""Those of this process and, in a forked child, those of its parents, by their ids."""
_ending = threading.Lock()
"""Held where a home makes up its mind whether it is over."""
chosen: ContextVar[ChannelServer | None] = ContextVar("chosen", default=None)
"""That of a channel which is being made; else it is the one that this process has."""


def _twin(channel: Channel[Any]) -> Channel[Any]:
    """The same channel as another object, which lasts by itself."""
    twin: Channel[Any] = Channel.__new__(Channel)
    socket = os.dup(channel._socket) if channel._socket >= 0 else -1
    _core.Channel.__init__(twin, fd=os.dup(channel._fd), socket=socket, name=channel._name)
    twin._hosts, twin._reached = True, channel._reached
    return twin


def _dropped(home: weakref.ref[ChannelServer], number: int, memory: OrphanMemory) -> None:
    if (one := home()) is not None:
        one.drop(number, memory)


def home_of(id: str) -> ChannelServer | None:
    return _homes.get(id)


def home_at(address: str, secret: bytes) -> ChannelServer | None:
    """That of this process, if it is ours."""
    found = [home for home in _homes.values() if home.address == address]
    return found[0] if found and hmac.compare_digest(found[0].secret, secret) else None


def _close_all() -> None:
    for home in list(_homes.values()):
        if home.pid == os.getpid():
            home.close()


def _begin_anew() -> None:
    """A forked child reaches the channels of its parents' homes directly, and serves nobody there."""
    global _ending
    _ending = threading.Lock()
    for home in _homes.values():
        home._door.drop()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_begin_anew)
