"""Messages from one member to another on another host: a connection for each pair and direction in use.

Every member listens. What it sends waits in a channel for a thread that connects and passes it on, so a
sender waits for nobody; who receives lets in whoever has something for it. As on one host, a receiver that is
there is waited for at the end.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowchan.channel.channel import Channel
from flowchan.collective.values import dumps, loads
from flowchan.errors import Broken, Closed, Drained, GroupError, MemberDied, MemberLeft, Refused
from flowchan.transport.authentication import Hello, meet
from flowchan.transport.descriptors import lacks
from flowchan.transport.door import Door
from flowchan.transport.interrupts import append_result, is_interrupt, unless_interrupted
from flowchan.transport.tcp import dial, joined, listen

SIZE = struct.Struct("<q")
LEFT = -1  # in place of a message's size: its sender has left
LOOK = 0.2
"""Seconds until a receiver looks first whether a member that has sent nothing is there; then ever later."""
LONG = 1e6
PAUSE = 0.01
SLICE = 5.0  # seconds after which one who dials looks whether anybody still wants it
QUICK, STRANGE = 1.0, 30.0
"""Who sends us away within so many seconds each time, for so many seconds, is no member. A member does so
while too many dial at once; one that does something else lets us wait."""
BRIEF = 0.05  # seconds, besides some round trips, in which such a one has sent away who only looks
PIECE = 1 << 20  # bytes for one call of the system
Take = Callable[[socket.socket, Hello], object]
_chance = random.Random()  # the program's own numbers stay as they are


@dataclass(frozen=True)
class Way:
    """How the members of a group reach those on other hosts: who knows the secret dials where they listen,
    each at ``listen_at`` and a port of its own."""

    secret: bytes = field(repr=False)
    listen_at: str
    tls: bool = False

    def door(self, hello: Hello) -> Door:
        """Where one of them listens."""
        return Door(listen(joined((self.listen_at, 0))), self.secret, hello, tls=self.tls)


class _Wire:
    """What a thread dials or sends by, for another one to end it."""

    def __init__(self) -> None:
        self.is_cut = False
        self._sock: socket.socket | None = None
        self._lock = threading.Lock()

    def hold(self, sock: socket.socket | None) -> None:
        with self._lock:
            self._sock = sock
            if self.is_cut:
                _shut_down(sock)

    def cut(self) -> None:
        with self._lock:
            self.is_cut = True
            _shut_down(self._sock)


def _shut_down(sock: socket.socket | None) -> None:
    """So whoever waits for it or sends by it fails. That of an encrypted one would let others go on in plain
    text."""
    if sock is not None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _dialled(address: str, give_up: float, wire: _Wire) -> socket.socket:
    while True:
        try:
            return dial(address, max(0.001, min(SLICE, give_up - time.monotonic())))
        except TimeoutError as error:
            if is_interrupt(error) or wire.is_cut or time.monotonic() > give_up:
                raise


def _let_in(address: str, way: Way, hello: Hello, give_up: float, wire: _Wire | None = None) -> socket.socket:
    """A connection, made when the other one lets us in. Raises ``ConnectionRefusedError`` when it is gone, or
    another program has its port now, another ``OSError`` when time is up or the ``wire`` is cut."""
    wire, refused_since = wire or _Wire(), math.inf
    while True:
        begun = time.monotonic()
        sock = _dialled(address, give_up, wire)
        left = max(0.001, give_up - time.monotonic())
        try:
            with sock.dup() as copy:  # to meet takes the socket itself
                wire.hold(copy)
                try:
                    return meet(sock, way.secret, dialled=True, hello=hello, timeout=left, tls=way.tls)[0]
                finally:
                    wire.hold(None)
        except OSError as error:  # it is gone, or sent us away, or another program has its port
            if is_interrupt(error) or wire.is_cut:
                raise
            now = time.monotonic()
            is_quick = isinstance(error, Refused) and now - begun < QUICK
            refused_since = min(refused_since, begun) if is_quick else math.inf
            if now - refused_since > STRANGE:
                raise ConnectionRefusedError(
                    errno.ECONNREFUSED, f"another program has {address} now: {error}"
                ) from error
            if now > give_up:
                raise
        time.sleep(PAUSE)


class FarLanes:
    """Those of one member, ``rank``, which listens at ``door``; ``addresses``: where the others do."""

    def __init__(self, rank: int, door: Door, addresses: Sequence[str], way: Way) -> None:
        self.door, self.addresses = door, addresses
        self._rank, self._way = rank, way
        self._lock = threading.Lock()
        self._first = threading.Lock()  # one connection for all that goes to a member
        self._closed = False
        self._out: dict[int, _Outgoing] = {}
        self._in: dict[int, _Incoming] = {}
        self._over: dict[int, MemberDied] = {}  # what comes when all is received that somebody has sent
        self._pause, self._next_look = LOOK, time.monotonic() + LOOK
        self._looks: dict[int, tuple[float, float]] = {}  # for whom let_in waits: the next one, and the pause
        self._strange_since: dict[int, float] = {}

    def send(self, x: Any, to: int, timeout: float | None) -> None:
        outgoing = self._outgoing(to)
        try:
            outgoing.messages.put(dumps(x), timeout)
        except (Broken, Closed) as error:
            if self._closed:
                raise _left("send") from error
            raise _gone(to, "send") from error

    def _outgoing(self, to: int) -> _Outgoing:
        with self._first:
            if self._closed:
                raise _left("send")
            if to not in self._out:
                self._out[to] = _Outgoing(self._rank, self.addresses[to], self._way)
            return self._out[to]

    def receive(self, source: int, timeout: float | None) -> Any:
        give_up = time.monotonic() + (LONG if timeout is None else timeout)
        try:
            return self._from(source, give_up).receive(source, give_up)
        except unless_interrupted(TimeoutError):
            raise TimeoutError(f"rank {source} has sent nothing to rank {self._rank} in time") from None

    def _from(self, source: int, give_up: float) -> _Incoming:
        while source not in self._in:
            if self._closed:
                raise _left("receive")
            held: list[bool] = []
            try:
                append_result(held, self._lock.acquire, True, min(LOOK, max(0.0, give_up - time.monotonic())))
                if held != [True]:  # another thread is at it
                    if time.monotonic() > give_up:
                        raise TimeoutError
                elif source not in self._in:
                    self.let_in([source], give_up, "receive", self.adopt)
            finally:
                if held == [True]:
                    self._lock.release()
        return self._in[source]

    def receive_any(self, others: Sequence[int], wait: float, give_up: float) -> tuple[Any, int]:
        """What one of these sends first. Raises ``TimeoutError`` after so many seconds, :class:`MemberDied`
        when one of those that have sent something died, or all have left. What comes slowly is received by
        several calls. ``give_up``: when whoever called wants to be told that time is up."""
        until = time.monotonic() + wait
        open_now = {self._in[source].fileno(): source for source in self._in.keys() - self._over.keys()}
        waiting = select.poll()
        for fd in (self.door.fileno(), *open_now):
            waiting.register(fd, select.POLLIN)
        one_waits = self.door.has_let_wait()
        ready = {fd for fd, _ in waiting.poll(0 if one_waits else wait * 1000)}
        if one_waits:
            ready.add(self.door.fileno())
        for fd in _chance.sample(sorted(ready), len(ready)):
            source = open_now.get(fd)
            try:
                if source is not None:
                    return self._in[source].receive(source, until), source
                self._let_in_now()
            except unless_interrupted(TimeoutError):
                pass
            except unless_interrupted(MemberDied) as error:
                assert source is not None
                self._over[source] = error
        self._look_for_silent(others, give_up)
        over = [self._over[member] for member in others if member in self._over]
        died = [error for error in over if not isinstance(error, MemberLeft)]
        if died or len(over) == len(others):
            raise (died or over)[0]
        raise TimeoutError

    def _let_in_now(self) -> None:
        """Who has dialled, unless another thread is at it."""
        held: list[bool] = []
        try:
            append_result(held, self._lock.acquire, True, 0.0)
            if held == [True]:
                self.door.accept(0.0, self.adopt)
        finally:
            if held == [True]:
                self._lock.release()

    def _look_for_silent(self, others: Sequence[int], give_up: float) -> None:
        """Whether those are there that have not sent anything, now and then. Where time is short only some of
        them, another time others."""
        if time.monotonic() < self._next_look:
            return
        silent = [member for member in others if member not in self._in and member not in self._over]
        for member in _chance.sample(silent, len(silent)):
            if self._is_gone(member, give_up):
                self._over[member] = _gone(member, "receive_any", left=True)
            if time.monotonic() > give_up:
                break
        self._next_look = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, 5.0)

    def let_in(
        self, awaited: Sequence[int], give_up: float, call: str, take: Take | None = None
    ) -> tuple[socket.socket, Hello]:
        """Who dials next, given to ``take`` as by :meth:`Door.accept`. Raises ``TimeoutError``, and
        :class:`MemberDied` when one of the ``awaited`` is gone."""
        wait = LOOK
        while True:
            if self._closed:
                raise _left(call)
            late = [member for member in awaited if wait > LOOK and self._may_look_for(member)]
            gone = [member for member in late if self._is_gone(member, give_up)]
            left = max(0.0, give_up - time.monotonic())
            try:
                return self.door.accept(0.0 if gone else min(wait, left), take)
            except unless_interrupted(TimeoutError):
                if gone:
                    raise _gone(gone[0], call) from None
                if not left:
                    raise
            wait = min(2 * wait, 5.0)

    def _may_look_for(self, member: int) -> bool:
        """Ever later, also for who asks again and again with little patience: it may be long until those who
        have dialled are let in there."""
        now = time.monotonic()
        due, pause = self._looks.get(member, (now, LOOK))
        if now >= due:
            self._looks[member] = now + pause, min(2 * pause, 5.0)
        return now >= due

    def dial(self, member: int, hello: Hello, give_up: float) -> socket.socket:
        """A connection to where it listens. Raises :class:`MemberDied` when it is gone."""
        try:
            return _let_in(self.addresses[member], self._way, hello, give_up)
        except ConnectionRefusedError:
            raise _gone(member, "connecting") from None

    def adopt(self, sock: socket.socket, hello: Hello) -> None:
        """One who has something for us is let in, once; or one who only looks whether it is us who listen."""
        if "looks" in hello:
            sock.close()
            return
        if (known := self._in.get(hello["rank"])) is not None and known.is_over(sock):
            return
        self._in[hello["rank"]] = _Incoming(sock)
        self._over.pop(hello["rank"], None)  # it had dialled before it went
        if self._closed:
            self._in[hello["rank"]].close()

    def _is_gone(self, member: int, give_up: float) -> bool:
        """Whether nobody listens there any more, or another program does."""
        begun = time.monotonic()
        try:
            sock = dial(self.addresses[member], min(1.0, give_up - begun))
        except ConnectionRefusedError:
            return True
        except unless_interrupted(OSError):
            return False  # perhaps the way there is cut
        now = time.monotonic()
        if not self._sends_us_away(sock, min(BRIEF + 6 * (now - begun), give_up - now)):
            self._strange_since.pop(member, None)
            return False
        return now - self._strange_since.setdefault(member, now) >= STRANGE

    def _sends_us_away(self, sock: socket.socket, wait: float) -> bool:
        """Whether who listens there does so within this time: a member that has other work lets us wait, and
        one that is here lets us in. TLS takes longer, and a process, so then nobody is asked."""
        if self._way.tls or wait <= 0:
            sock.close()
            return False
        begun = time.monotonic()
        try:
            meet(sock, self._way.secret, dialled=True, hello={"looks": self._rank}, timeout=wait)[0].close()
        except unless_interrupted(OSError):
            return time.monotonic() - begun < wait
        return False

    def close(self, wait: bool = True) -> None:
        """Returns when all that was sent has been taken, or nobody will take it; or does not ``wait``."""
        with self._first:
            if self._closed:
                return
            self._closed = True
        for outgoing in self._out.values():
            outgoing.messages.close() if wait else outgoing.abandon()
        while wait and any(outgoing.is_open() for outgoing in self._out.values()):
            with contextlib.suppress(TimeoutError):
                self.door.accept(0.02)[0].close()  # it may be closing, too, and wait for us
        self.door.close()  # from now on who sends to us learns that we are gone
        for incoming in list(self._in.values()):
            incoming.close()


class _Outgoing:
    """What goes to one member, and the thread that sends it, which ends when this is dropped."""

    def __init__(self, rank: int, address: str, way: Way) -> None:
        self.messages: Channel[bytes] = Channel()
        self._open = self.messages.writer()
        self._wire = _Wire()
        goes = self.messages, self._wire, address, way, {"rank": rank}
        self._thread = threading.Thread(
            target=_pass_on, args=goes, name="flowchan-collective-send", daemon=True
        )
        self._thread.start()

    def is_open(self) -> bool:
        """Whether something is left to be sent."""
        return self._thread.is_alive()

    def abandon(self) -> None:
        """Nothing more is sent."""
        self.messages.abort()
        self._wire.cut()


def _pass_on(messages: Channel[bytes], wire: _Wire, address: str, way: Way, hello: Hello) -> None:
    """Dials when there is a message: where Ctrl-C has cut off the first send, the next one has a connection
    of its own, and there must be no other."""
    try:
        first = messages.get()
        with _let_in(address, way, hello, time.monotonic() + LONG, wire) as sock:
            wire.hold(sock)
            for message in itertools.chain([first], messages):
                sock.sendall(SIZE.pack(len(message)))
                sock.sendall(message)
            sock.sendall(SIZE.pack(LEFT))
    except OSError as error:
        messages.abort(error)
    except (Drained, Broken):
        pass  # nothing has been sent, or nobody is to wait for it
    finally:
        wire.hold(None)


class _Message:
    """One that comes: its size, then what it is; and how many bytes of both have come."""

    def __init__(self) -> None:
        self.size = bytearray(SIZE.size)
        self.body: bytearray | None = None
        self.came: list[int] = []


class _Incoming:
    """What comes from one member. With a message that came in part when a call was interrupted or late the
    next call goes on; likewise with one that could not be unpickled then."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._now = _Message()
        self._lock = threading.Lock()
        self._closed = False

    def receive(self, source: int, give_up: float) -> Any:
        held: list[bool] = []
        try:
            append_result(held, self._lock.acquire, True, max(0.0, give_up - time.monotonic()))
            if held != [True]:
                raise TimeoutError  # another thread is at it
            now = self._now
            self._fill(now.size, 0, source, give_up)
            (size,) = SIZE.unpack(now.size)
            if size == LEFT:
                raise _gone(source, "receive", left=True)
            if now.body is None:
                now.body = bytearray(size)
            self._fill(now.body, SIZE.size, source, give_up)
            rest = _Message()
            try:
                x = loads(now.body)
            except BaseException as error:
                if not _may_be_received_later(error):
                    self._now = rest
                raise
            self._now = rest
            return x
        finally:
            if held == [True]:
                self._lock.release()
            if self._closed:
                self._sock.close()

    def _fill(self, room: bytearray, start: int, source: int, give_up: float) -> None:
        """``start``: bytes of the message before ``room``."""
        came = self._now.came
        while (at := sum(came) - start) < len(room):
            came[:] = [start + at]
            piece = memoryview(room)[at : at + PIECE]
            self._sock.settimeout(max(0.001, give_up - time.monotonic()))
            try:
                append_result(came, self._sock.recv_into, piece)
            except TimeoutError:
                raise
            except OSError as error:
                raise (_left("receive") if self._closed else _gone(source, "receive")) from error
            if not came[-1]:
                raise _left("receive") if self._closed else _gone(source, "receive")

    def is_over(self, sock: socket.socket) -> bool:
        return self._sock is sock

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        """Ends a :meth:`receive` in another thread, too."""
        self._closed = True
        _shut_down(self._sock)
        if self._lock.acquire(blocking=False):  # who has it closes it
            self._sock.close()
            self._lock.release()


def _may_be_received_later(error: BaseException) -> bool:
    """Whether it says nothing of the message: the call was interrupted, or this process lacks something."""
    short = lacks(error)
    return short or is_interrupt(error)


def _left(call: str) -> GroupError:
    return GroupError(f"{call} was not done: this member has left")


def _gone(member: int, call: str, left: bool = False) -> MemberDied:
    """``left``: it has said so itself."""
    kind, word = (MemberLeft, "has left") if left else (MemberDied, "died, has left, or is out of reach")
    return kind(f"{call} can't be done: rank {member}, on another host, {word}", (member,), call)
