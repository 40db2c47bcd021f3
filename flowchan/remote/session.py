"""One process elsewhere that has channels of this one open, as their home has it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import threading
import weakref
from collections import Counter, defaultdict, deque
from typing import TYPE_CHECKING, Any, Protocol

from flowchan import _core
from flowchan.channel import awaiting
from flowchan.channel.channel import Channel, In, Out
from flowchan.errors import Broken, Closed, Full
from flowchan.items.codec import keeps_sealed
from flowchan.remote.messages import (
    CallRequest,
    Cancel,
    Finished,
    Recalled,
    Reply,
    ServerClosed,
    cause_in,
    control_ring,
    sealed_cause,
    size_of,
    to_put,
    wrong,
)
from flowchan.transport.addresses import number_in
from flowchan.transport.descriptors import lacks
from flowchan.transport.link_events import LineFinished, LinkIdle, watch
from flowchan.transport.local_peers import LocalPeer

if TYPE_CHECKING:
    from collections.abc import Callable

LAST_WORD = 1.0
"""Seconds within which a guest should hear that its home is over."""
POLL_INTERVAL_S = 0.05
"""Seconds between two looks whether a process of this machine, whose connection has ended, has ended, too."""

TOGETHER = 64 << 20
"""Bytes of items with which an answer has enough."""


class SessionOwner(Protocol):
    """Whose guest it is."""

    address: str
    peer_timeout: float
    asked: dict[str, Callable[..., Any]]

    def make(self, capacity: int) -> Channel[Any]: ...
    def find(self, number: int) -> Channel[Any]: ...
    def come(self, number: int) -> None: ...
    def sent_in(self, value: Any) -> Counter[int]: ...
    def send(self, number: int) -> bool: ...
    def forget(self, guest: ClientSession) -> None: ...


class ClientSession:
    """See above. ``number`` in what follows is that of a channel of its home. All but the watch runs in the
    thread of its home's event loop. When its process is gone, or was not heard of for too long, its ports are
    closed here as those of a process that died. ``process``: itself, where it is one of this machine."""

    def __init__(
        self,
        home: SessionOwner,
        loop: asyncio.AbstractEventLoop,
        id: str,
        pid: int,
        process: LocalPeer | None,
    ) -> None:
        self.id, self.pid, self._process = id, pid, process
        self._home, self._loop = home, loop
        self._over = self._left = False
        self._last_word: asyncio.TimerHandle | None = None  # it has left, and will close the connection
        self._open: dict[int, Channel[Any]] = {}  # what it has open is kept for it
        self._opened: Counter[int] = Counter()  # so often
        self._read: weakref.WeakSet[Channel[Any]] = weakref.WeakSet()  # it has had a port of these
        self._ports: dict[int, In[Any] | Out[Any]] = {}  # by their lines
        self._handed: Counter[int] = Counter()  # channels in what calls were answered, until they have come
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._answering: set[int] = set()  # what they are answered is on its way
        # By channels: what was taken out for it, and there was no memory to send it. Its next call has it.
        self._kept: defaultdict[int, deque[Any]] = defaultdict(deque)
        self._answers, letters = control_ring(), control_ring()
        self._letters, self._letterbox = letters.reader(), letters.writer()
        self._to_say = self._answers.reader()
        self.link = _core.Link(True)
        self.link.line(0, [self._to_say], [self._letterbox])
        self._listening = loop.create_task(self._listen())
        name = f"flowchan guest at {home.address}"
        self._watching = threading.Thread(target=self._watch, name=name, daemon=True)
        self._watching.start()

    def meet(self, sock: socket.socket) -> None:
        self.link.attach(sock.detach())

    # --- the link ---

    def _watch(self) -> None:
        """Tells what happens to the link. Without a connection it is given up after a while, or as soon as
        its process is known to have ended."""
        most = 1.5 * self._home.peer_timeout
        apart = most if self._process is None else POLL_INTERVAL_S
        for event in watch(self.link, self._home.peer_timeout / 4, apart):
            if isinstance(event, LineFinished):
                self._soon(self._finish, event.line)
            elif isinstance(event, LinkIdle):
                if event.silent > most or (not event.connected and self._has_ended()):
                    self._soon(self._give_up)
                    break
            elif self._left:
                self._soon(self._give_up)
        if self._process is not None:
            self._process.close()

    def _has_ended(self) -> bool:
        return self._process is not None and self._process.has_ended()

    def _soon(self, work: Callable[..., Any], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(work, *arguments)

    def _finish(self, line: int) -> None:
        port = self._ports.pop(line, None)
        if port is None:
            return
        self.link.drop(line)
        why = _broken_by(port.channel) if isinstance(port, Out) else None
        finished = Finished(line) if why is None else Finished(line, True, sealed_cause(why.__cause__))
        self._tasks[-line] = self._loop.create_task(self._say(finished))

    async def _say(self, said: Finished) -> None:
        with contextlib.suppress(Closed, Broken):
            await self._answers.aput(said)
        self._tasks.pop(-said.line, None)

    # --- what it asks for ---

    async def _listen(self) -> None:
        with contextlib.suppress(Closed, Broken):
            while True:
                letter = await self._letters.aget()
                if isinstance(letter, Cancel):
                    self._cancel(letter.number)
                elif isinstance(letter, CallRequest):
                    self._tasks[letter.number] = self._loop.create_task(self._answer(letter))
                del letter

    def _cancel(self, number: int) -> None:
        """Every call is answered: also one that has not begun, and whose task will never; and one that was
        not heard of, for who asked may have been interrupted before it was on its way."""
        if number in self._answering:
            return
        if (task := self._tasks.get(number)) is None:
            self._tasks[number] = self._loop.create_task(self._answer_cancelled(number))
        elif task.cancel():
            task.add_done_callback(functools.partial(self._was_cancelled, number))

    def _was_cancelled(self, number: int, task: asyncio.Task[None]) -> None:
        if self._tasks.get(number) is task and not self._over:  # it never began, or it would have left
            self._tasks[number] = self._loop.create_task(self._answer_cancelled(number))

    async def _answer_cancelled(self, number: int) -> None:
        await self._give(Reply(number, wrong=wrong(Recalled())), None)

    async def _answer(self, ask: CallRequest) -> None:
        try:
            value = await self._do(ask)
            answer = Reply(ask.number, value)
        except asyncio.CancelledError:
            answer = Reply(ask.number, wrong=wrong(Recalled()))
        except Exception as error:
            answer = Reply(ask.number, wrong=wrong(error))
        await self._give(answer, ask)
        if ask.what == "leave" and not self._over:
            self._left = True
            self._last_word = self._loop.call_later(LAST_WORD, self._give_up)

    async def _give(self, answer: Reply, ask: CallRequest | None) -> None:
        if self._over:
            return None
        self._tasks.pop(answer.number, None)  # from here on it can't be cancelled
        self._answering.add(answer.number)
        handed = self._home.sent_in(answer.value)
        self._handed += handed
        try:
            await self._give_now(answer)
        except Exception as error:
            scarce = lacks(error)
            if ask is None or not scarce or self._keep_items(ask, answer.value):
                self._handed -= handed
                answer = Reply(answer.number, wrong=wrong(error))  # who asked must not wait for ever
            while scarce:  # what is said now is short, and what was done is done
                await asyncio.sleep(POLL_INTERVAL_S)
                with contextlib.suppress(MemoryError, OSError):
                    return await self._give_now(answer)
            await self._give_now(answer)
        finally:
            self._answering.discard(answer.number)

    async def _give_now(self, answer: Reply) -> None:
        with contextlib.suppress(Closed, Broken):
            await self._answers.aput(answer)

    def _keep_items(self, ask: CallRequest, value: Any) -> bool:
        """Whether there are any among what it would have been answered."""
        if value is None or ask.what not in ("get", "get_many", "select"):
            return False
        if ask.what != "select":
            self._kept[ask.channel].extend(value if ask.what == "get_many" else [value])
        elif 0 <= value[0] < len(gets := ask.arguments[0]):
            self._kept[gets[value[0]]].append(value[1])
        else:
            return False
        return True

    async def _do(self, ask: CallRequest) -> Any:
        if ask.what == "leave":
            return None
        if ask.what in self._home.asked:
            return self._home.asked[ask.what](self, *ask.arguments)
        if ask.what == "make":
            return self._make(*ask.arguments)
        if ask.what == "select":
            return await self._select(*ask.arguments)
        if ask.what == "stand":
            return await self._stand(*ask.arguments)
        if ask.what == "open":
            return self._do_open(ask.channel)
        if ask.what == "send":
            return self._home.send(ask.channel)
        if ask.what == "drop":
            return self._drop(ask.channel)
        if ask.what == "come":
            self._handed -= Counter([ask.channel])
            return self._home.come(ask.channel)
        if ask.what in ("get", "get_many") and (kept := self._kept[ask.channel]):
            return kept.popleft() if ask.what == "get" else _first(kept, ask.arguments[0])
        done = getattr(self, f"_do_{ask.what}")(self._open[ask.channel], *ask.arguments)
        return await done if asyncio.iscoroutine(done) else done

    def _make(self, capacity: int) -> int:
        made = self._home.make(capacity)
        return self.keep(made)

    def _do_open(self, number: int) -> tuple[int, int | None, str]:
        channel = self._home.find(number)
        self._open[number] = channel
        self._opened[number] += 1
        return channel.capacity, channel.max_bytes, channel._name

    def keep(self, channel: Channel[Any]) -> int:
        """It is there for it, until it has opened and dropped it. Its number."""
        number = number_in(channel.address)
        self._open[number] = channel
        return number

    def _drop(self, number: int) -> None:
        """Once for each time that it was opened: one drop may be heard after the next opening."""
        self._opened[number] -= 1
        if self._opened[number] <= 0:
            del self._opened[number]
            self._open.pop(number, None)
            self._kept.pop(number, None)

    async def _do_put(self, channel: Channel[Any], item: Any, timeout: float | None) -> None:
        item = to_put(item)
        if timeout == 0:
            return channel.put_nowait(item)
        try:
            async with asyncio.timeout(timeout):
                await channel.aput(item)
        except TimeoutError:
            channel.put_nowait(item)

    async def _do_get(self, channel: Channel[Any], timeout: float | None) -> Any:
        keeps_sealed.set(True)  # in this task
        if timeout == 0:
            return channel.get_nowait()
        try:
            async with asyncio.timeout(timeout):
                return await channel.aget()
        except TimeoutError:
            return channel.get_nowait()

    async def _do_get_many(self, channel: Channel[Any], most: int, timeout: float | None) -> list[Any]:
        items = [await self._do_get(channel, timeout)]
        size = size_of(items[0])
        with contextlib.suppress(Exception):  # whatever it is, the next call says it
            while len(items) < most and size < TOGETHER:
                items.append(channel.get_nowait())
                size += size_of(items[-1])
        return items

    async def _select(
        self, gets: list[int], puts: list[tuple[int, Any]], looks: list[int], timeout: float | None
    ) -> tuple[int, Any, Any]:
        """One of these now, or within the time. And the counts of items before that."""
        keeps_sealed.set(True)
        reading, looking = self._all_open(gets), self._all_open(looks)
        writing = [(self._open[number], to_put(item)) for number, item in puts]
        stats = [one.stats() for one in (*reading, *(one for one, _ in writing), *looking)]
        done = self._kept_one(gets, looks, len(puts))
        if done is None:
            done = _core._select(reading, writing, 0, looking)
        if done[0] == -1 and timeout != 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    done = await awaiting.aselect(reading, writing, looking)
        return *done, [(one.items_in, one.items_out) for one in stats]

    def _kept_one(self, gets: list[int], looks: list[int], puts: int) -> tuple[int, Any] | None:
        for index, number in enumerate(gets):
            if kept := self._kept[number]:
                return index, kept.popleft()
        for index, number in enumerate(looks, len(gets) + puts):
            if self._kept[number]:
                return index, None
        return None

    async def _stand(self, reading: list[int], writing: list[int], again: bool) -> None:
        """Until something has happened to one of these channels that may let it go on."""
        if any(self._kept[number] for number in reading):
            return
        waits = [_core.Await(one, True, again) for one in self._all_open(reading)]
        waits += [_core.Await(one, False, again) for one in self._all_open(writing)]
        await awaiting.any_changed(waits)

    def _all_open(self, numbers: list[int]) -> list[Channel[Any]]:
        return [self._open[number] for number in numbers]

    def _do_close(self, channel: Channel[Any]) -> None:
        channel.close()

    def _do_abort(self, channel: Channel[Any], cause: Any) -> None:
        channel.abort(cause_in(cause))

    def _do_look(self, channel: Channel[Any]) -> tuple[Any, ...]:
        kept = len(self._kept[number_in(channel.address)])
        drained = channel.drained and not kept
        return len(channel) + kept, channel.closed, drained, channel.broken, channel.stats()

    def _do_reader(self, channel: Channel[Any], line: int) -> None:
        self._ports[line] = port = channel.reader()
        self._read.add(channel)
        self.link.line(line, [port], [], True)

    def _do_writer(self, channel: Channel[Any], line: int) -> None:
        self._ports[line] = port = channel.writer()
        self.link.line(line, [], [port])

    # --- the end ---

    def has_read(self, channel: Channel[Any]) -> bool:
        """Whether a port of it has read all that is there, but perhaps for what it has just begun with."""
        if self._over:
            return True
        lines = self.link.state()["lines"]
        ports = {line: port for line, port in list(self._ports.items()) if port.channel is channel}
        return channel in self._read and all(
            self._has_read(port, lines.get(line)) for line, port in ports.items() if isinstance(port, In)
        )

    def _has_read(self, port: In[Any], line: dict[str, int] | None) -> bool:
        return line is None or (not len(port.channel) and line["ahead"] <= line["in_hand"])

    def _ended(self) -> tuple[int, ...]:
        """Its lines for which the clean end has come."""
        lines = self.link.state()["lines"]
        return tuple(
            line
            for line, port in self._ports.items()
            if port.channel.closed
            and not port.channel.broken
            and (isinstance(port, Out) or self._has_read(port, lines.get(line)))
        )

    async def leave_alone(self, why: str) -> None:
        """The server is over."""
        with contextlib.suppress(Closed, Broken, Full):
            self._answers.put_nowait(ServerClosed(why, self._ended()))
        give_up = self._loop.time() + LAST_WORD
        while self._loop.time() < give_up:
            stats = self._answers.stats()
            if not self.link.state()["connected"] or not stats.inside + stats.leased:
                break  # who has heard it ends the connection
            await asyncio.sleep(0.005)
        self._give_up()
        self._watching.join()

    def _give_up(self) -> None:
        """Nothing of it counts any more. What it has not closed, it has left."""
        if self._over:
            return
        self._over = True
        if self._last_word is not None:
            self._last_word.cancel()  # else it would keep all this
        self.link.close()
        for task in list(self._tasks.values()):
            task.cancel()
        self._answers.close()
        self._letterbox.close()
        for port in self._ports.values():
            if isinstance(port, Out):
                port._fall(self.pid)
            else:
                port._give_up()
        self._ports.clear()
        self._open.clear()
        self._opened.clear()
        self._kept.clear()
        for number in self._handed.elements():
            self._home.come(number)
        self._home.forget(self)


def _first(kept: deque[Any], most: int) -> list[Any]:
    return [kept.popleft() for _ in range(min(most, len(kept)))]


def _broken_by(channel: Channel[Any]) -> Broken | None:
    """What puts into it raise, if somebody has aborted it."""
    if channel.broken:
        try:
            channel.put_nowait(None)  # nothing gets into what has ended
        except Broken as error:
            return error.with_traceback(None)  # else it and who asks would keep each other, and the guest
        except Closed:  # a writer has died
            pass
    return None
