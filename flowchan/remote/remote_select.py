"""``select`` where channels have their home elsewhere (C10).

Operations on channels of one home are done there, by a select of its own: one letter. Where several homes, or
channels here, take part, nothing is ever tried by two at a time: one home after the other is asked to do one
of its operations now, and what is here is tried here. When nothing could be done, each home stands at the
gates of its channels, says when something has changed, and is asked again. It stands there before it is
asked, so no change goes unnoticed.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from flowchan import _core
from flowchan.channel.channel import Channel, In, Out
from flowchan.channel.select import is_elsewhere
from flowchan.errors import Empty, Full
from flowchan.remote.connection import Connection
from flowchan.remote.messages import Recalled, Reply, opened, seal
from flowchan.remote.pending_calls import PendingCall, Unanswered, is_not_now

MOST = 128  # as native select takes
GET, PUT, LOOK = range(3)
NOT_NOW, DRAINED = -1, -2
MOST_ROUNDS = 100
"""As many a select that does not wait makes at most, each a round trip to every home."""

Done = tuple[int, Any]
"""What native select gives: the place of the operation that was done, or NOT_NOW or DRAINED, and the item."""


class _Group(Protocol):
    """Operations that can be tried together. ``places``: among all. ``moves``: the counts of items of their
    channels just before the last try. ``is_drained``: nothing can ever be got there, and that is all."""

    places: list[int]
    moves: Any
    is_drained: bool

    def try_now(self) -> Done: ...


class _Here:
    """Those on channels and ports of this process."""

    def __init__(self) -> None:
        self.places: list[int] = []
        self.moves: Any = None
        self.is_drained = False
        self._operations: tuple[list[Any], list[Any], list[Any]] = [], [], []

    def add(self, kind: int, place: int, operation: Any) -> None:
        target = operation[0] if kind == PUT else operation
        if not isinstance(target, Channel | In | Out):  # raises, with what it may be
            _core._select([], [(target, None)], 0, []) if kind == PUT else _core._select([target], [], 0, [])
        self._operations[kind].append(operation)
        self.places.append(place)

    def try_now(self) -> Done:
        gets, puts, looks = self._operations
        stats = [_ring(one).stats() for one in (*gets, *(target for target, _ in puts), *looks)]
        self.moves = [(one.items_in, one.items_out) for one in stats]
        return self._select(0)

    def wait(self, bell: Channel[None] | None, timeout: float | None) -> Done:
        """Until one is done, or the bell rings. Without a bell it depends on these alone, and may end by
        their being drained."""
        index, item = self._select(timeout, [] if bell is None else [bell])
        if bell is not None and index == len(self.places):
            with contextlib.suppress(Empty):
                bell.get_nowait()
            return NOT_NOW, None
        return index, item

    def _select(self, timeout: float | None, bells: Sequence[Channel[None]] = ()) -> Done:
        gets, puts, looks = self._operations
        if not self.places and not bells:
            return DRAINED, None
        return _core._select(gets, puts, timeout, [*looks, *bells])


class _There:
    """Those on channels of one home."""

    def __init__(self, connection: Connection) -> None:
        self.places: list[int] = []
        self.moves: Any = None
        self.is_drained = False
        self._connection = connection
        self._gets: list[Any] = []  # the channels
        self._looks: list[Any] = []
        self._got: tuple[Any, Any] | None = None  # an item that came, of which channel
        self._letter: tuple[list[Any], list[Any], list[Any]] = [], [], []  # numbers; of puts with the items
        self.take_back: dict[int, Callable[[], None]] = {}  # what to call if an item is not put
        self._standing: PendingCall | None = None
        self._again = False

    def add(self, kind: int, place: int, operation: Any) -> None:
        channel = operation[0] if kind == PUT else operation
        if kind == GET:
            self._gets.append(channel)
            self._letter[GET].append(channel._number)
        elif kind == PUT:
            item, self.take_back[place] = seal(operation[1])
            self._letter[PUT].append((channel._number, item))
        else:
            self._looks.append(channel)
            self._letter[LOOK].append(channel._number)
        self.places.append(place)

    def try_now(self) -> Done:
        return self.select(0)

    @property
    def _reads(self) -> tuple[Any, ...]:
        return *self._gets, *self._looks

    def select(self, timeout: float | None) -> Done:
        """The server does one, or says within the time that none can be done. Before that, what has come
        here for
        calls that were interrupted."""
        give_up = None if timeout is None else time.monotonic() + timeout
        done = self._came_before()
        while done is None:
            left = None if give_up is None else max(0.0, give_up - time.monotonic())
            try:
                done = self._ask(left)
            except Recalled:
                done = self._came_before()
                continue
            if done[0] < 0:
                done = self._came_before() or done
        return done

    def _ask(self, timeout: float | None) -> Done:
        to_put = self.take_back
        mine: tuple[Any, Any] | None = None  # what this call has got; a late answer may come after the next

        def take_back(done: int = NOT_NOW) -> None:
            for place, call in to_put.items():
                if place != done:
                    call()

        def take(answer: tuple[int, Any, Any]) -> Done:
            nonlocal mine
            index, item, self.moves = answer
            if 0 <= index < len(self._gets):
                self._got = mine = self._gets[index], item
            elif index >= 0:
                self.take_back.pop(self.places[index], None)
            return index, item

        def hear_late(answer: Reply) -> None:
            """Nobody waits any more: an item that has come is the next one of its channel here."""
            if answer.wrong is None:
                index, item, _ = answer.value
                if self._got is mine:
                    self._got = None
                if 0 <= index < len(self._gets):
                    self._gets[index].put_back([item])
                take_back(self.places[index] if index >= 0 else NOT_NOW)

        within = None
        if timeout is not None and not to_put:  # of what is to be put one must know whether it was
            within = self._connection.answered_within(timeout)
        try:
            return self._connection.ask(  # type: ignore[no-any-return]
                0, "select", *self._letter, timeout,
                late=hear_late, undone=take_back, take=take, reads=self._reads, within=within,
            )  # fmt: skip
        except Unanswered:
            return NOT_NOW, None
        except Exception:
            raise
        except BaseException:
            self.take_back = {}  # what has been put will be heard
            raise

    def _came_before(self) -> Done | None:
        for index, channel in enumerate(self._gets):
            if came := channel._came_before():
                self._got = channel, came[0]
                return index, came[0]
        for index, channel in enumerate(self._looks, len(self.places) - len(self._looks)):
            if channel._returned:
                return index, None
        return None

    def put_back(self) -> None:
        """An item that nobody has received."""
        if self._got is not None:
            channel, item = self._got
            self._got = None
            channel.put_back([item])

    def stand(self, bell: Channel[None]) -> None:
        """The server rings the bell when something may have become possible."""
        if self._standing is not None and self._standing.answer is None:
            return

        def ring() -> None:
            with contextlib.suppress(Full):
                bell.put_nowait(None)

        gets, puts, looks = self._letter
        numbers = [*gets, *looks], [number for number, _ in puts]
        self._standing = self._connection.post(
            0, "stand", (*numbers, self._again), reads=self._reads, done=ring
        )
        self._again = True

    def leave(self) -> None:
        standing, self._standing = self._standing, None
        if standing is not None and standing.answer is None:
            self._connection.abandon(standing)


def _ring(target: Any) -> Channel[Any]:
    """Where an item goes in or comes out in this process; of a port of a channel elsewhere, its own ring."""
    if isinstance(target, Channel):
        return target
    ring: Channel[Any] = target._line.ring if hasattr(target, "_line") else target.channel
    return ring


def select(gets: list[Any], puts: list[Any], timeout: float | None, ready: list[Any]) -> Done:
    """As native select does it, where at least one of the channels is elsewhere. ``timeout``: in seconds."""
    by_kind = (GET, gets), (PUT, puts), (LOOK, ready)
    operations = [(kind, one) for kind, these in by_kind for one in these]
    if len(operations) > MOST:
        raise ValueError(f"select takes 1 to {MOST} operations, got {len(operations)}")
    here, there, is_done = _Here(), dict[Connection, _There](), False
    try:
        for place, (kind, one) in enumerate(operations):
            target = one[0] if kind == PUT else one
            if is_elsewhere(target):
                connection = target._connection
                there.setdefault(connection, _There(connection)).add(kind, place, one)
            else:
                here.add(kind, place, one)
        index, item = _among(here, list(there.values()), timeout)
        is_done = True
        _take_back(there.values())
        return index, opened(item)
    except BaseException as error:
        _take_back(there.values())
        if not is_done or is_not_now(error):
            for group in there.values():
                group.put_back()
        raise


def _take_back(groups: Iterable[_There]) -> None:
    """What was to be put has not been, but for one that its group has crossed off."""
    for group in groups:
        for call in group.take_back.values():
            call()


def _among(here: _Here, there: list[_There], timeout: float | None) -> Done:
    if len(there) == 1 and not here.places:
        return _placed(there[0], there[0].select(timeout))
    if timeout == 0:
        return _try_at_one_moment([here, *there])
    give_up = None if timeout is None else time.monotonic() + timeout
    done = _try_each([here, *there])
    bell: Channel[None] = Channel(1)
    with contextlib.ExitStack() as ends:
        for group in there:
            ends.callback(group.leave)
        while done[0] == NOT_NOW:
            for group in there:
                group.stand(bell)
            done = _try_each([here, *there])
            if done[0] != NOT_NOW:
                break
            for group in there:
                if group.is_drained:
                    group.leave()
            there = [group for group in there if not group.is_drained]
            left = None if give_up is None else max(0.0, give_up - time.monotonic())
            done = _placed(here, here.wait(bell if there else None, left))
            if not there or (give_up is not None and time.monotonic() >= give_up):
                break
    return done


def _try_each(groups: Sequence[_Group]) -> Done:
    """Tries each group once, in a random order in which each operation has the same chance to be tried
    first."""
    by_operation = [group for group in groups for _ in group.places]
    random.shuffle(by_operation)
    results = set()
    for group in dict.fromkeys(by_operation):
        index, item = _placed(group, group.try_now())
        if index >= 0:
            return index, item
        group.is_drained = index == DRAINED
        results.add(index)
    return (DRAINED if results == {DRAINED} else NOT_NOW), None


def _try_at_one_moment(groups: Sequence[_Group]) -> Done:
    """The same, and when it does nothing there was a moment at which nothing could be done: between two
    rounds, in which nothing has moved. Where something moves in every round it gives up after some."""
    before = None
    for _ in range(MOST_ROUNDS):
        done = _try_each(groups)
        moves = [group.moves for group in groups]
        if done[0] != NOT_NOW or moves == before:
            break
        before = moves
    return done


def _placed(group: _Group, done: Done) -> Done:
    index, item = done
    return (group.places[index] if index >= 0 else index), item
