"""Connect a client to a parameter server whose shards run on the hosts of a pool."""

from __future__ import annotations

import contextlib
import itertools
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from flowchan import Broken, Channel, ChannelError, Closed, Empty
from flowchan.pipelines.parameter_server.remote_calls import Call, Gateway, Session
from flowchan.pipelines.parameter_server.server_connection import (
    ClientConnection,
    LocalAccess,
    Pulled,
    PushHandle,
    ServerConnection,
    copy_of,
    late_after,
    left_until,
)
from flowchan.pipelines.parameter_server.shard import Push, part_of
from flowchan.pipelines.parameter_server.shard_keeper import ShardState, connect

T = TypeVar("T")

CHECK_INTERVAL_S = 0.5
"""Interval in seconds at which a waiting call checks for a lost shard."""


class ShardPlace(NamedTuple):
    """Location of a shard.

    Attributes:
        server: Name of the server.
        number: Number of the shard, from 0.
        host: Name of the shard's host.
        names: Names of the shard's tensors.
        gateway: Gateway of the shard's keeper.
        ended: Channel of the program that closes when the server shuts down, and breaks when a shard is lost.
    """

    server: str
    number: int
    host: str
    names: frozenset[str]
    gateway: Gateway
    ended: Channel[None]

    def lost(self, call: str, how: str = "") -> Broken:
        """Return the error for a lost shard.

        Args:
            call: Name of the call.
            how: How the shard was lost (default: unknown).

        Returns:
            The error.
        """
        details = f" (its process {how})" if how else ""
        return Broken(
            f"{call}: shard {self.number} of parameter server {self.server!r} on host {self.host!r} is lost, "
            f"with its tensors{details}; start a new server from the last save(path) with "
            "ParameterServer.load(path)"
        )

    def _end(self) -> ChannelError | None:
        """Return the error of the channel ``ended``, or None while the server runs."""
        try:
            with contextlib.suppress(Empty):
                self.ended.get_nowait()
        except ChannelError as error:
            return error
        return None

    def _unreachable(self, call: str, end: ChannelError | None) -> ChannelError:
        """Return the error for a lost connection to the keeper."""
        if end is None:
            return self.lost(call)
        if isinstance(end, Broken):
            return Broken(f"{call}: the parameter server's program has exited")
        doubt = "; it may have applied this push" if call == "push" else ""
        return Closed(f"{call}: the parameter server has shut down before it answered{doubt}")

    def check(self) -> None:
        """Raise the error of the channel ``ended`` if a shard is lost."""
        end = self._end()
        if end is not None and isinstance(end.__cause__, Broken):
            raise end

    def until_lost(self, wait: Callable[[float], T], late: float | None) -> T:
        """Call ``wait`` with short timeouts until it succeeds, a shard is lost, or the deadline has passed.

        The program learns of a keeper's death long before the client's connection to that keeper counts as
        lost.
        """
        while True:
            left = left_until(late)
            step = CHECK_INTERVAL_S if left is None else min(left, CHECK_INTERVAL_S)
            try:
                return wait(step)
            except TimeoutError:
                if step == left:
                    raise
                self.check()

    @contextlib.contextmanager
    def named_in_errors(self, name: str, call: Call | None = None) -> Iterator[None]:
        """Name the lost shard and its host in the error if the connection to the keeper is lost.

        After the loss of another shard, the program may end this keeper before its clients see the loss. The
        error then names the lost shard.
        """
        try:
            yield
        except (Broken, Closed) as error:
            end = self._end()
            if end is not None and isinstance(end.__cause__, Broken):
                raise Broken(*end.__cause__.args) from error
            if isinstance(error, Closed) or (call is not None and error is call.error):
                raise
            raise self._unreachable(name, end) from error


class PoolPushHandle(PushHandle):
    """Handle of a push to shards on a pool.

    Args:
        places: Place of each shard.
        calls: The call to each shard's keeper.
    """

    def __init__(self, places: Sequence[ShardPlace], calls: Sequence[Call]) -> None:
        self._places, self._calls = places, calls

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the server has applied or dropped the push, and return the version."""
        return max(version for version, _ in self._answers(late_after(timeout)))

    def _answers(self, late: float | None) -> list[tuple[int, bool]]:
        return [
            _answer("push", place, call, late) for place, call in zip(self._places, self._calls, strict=True)
        ]

    @property
    def done(self) -> bool:
        """Return whether the server has applied or dropped the push."""
        return all(call.done() for call in self._calls)

    @property
    def version(self) -> int | None:
        """Return the version that :meth:`wait` returns, or None if the push is not done."""
        return self.wait(0) if self.done else None

    @property
    def dropped(self) -> bool:
        """Return whether the server has dropped the push because its values were too old."""
        return self.done and any(dropped for _, dropped in self._answers(None))


class PoolConnection(ClientConnection):
    """Sessions of one client in one process with the keepers of all shards.

    Args:
        places: Place of each shard.

    Raises:
        Broken: A shard is lost.
        Closed: The server was closed.
    """

    def __init__(self, places: Sequence[ShardPlace]) -> None:
        super().__init__()
        self._places = tuple(places)
        self._id, self._numbers = uuid.uuid4().hex, itertools.count()
        self._sending = threading.RLock()  # all keepers must get the calls of this client in the same order
        self._sessions: list[Session] = []
        self._here: dict[int, LocalAccess] = {}
        self._local: ServerConnection | None = None  # reads the memory of all shards on this host
        try:
            for place in self._places:
                with place.named_in_errors("connect"):
                    place.check()
                    session, here = connect(place.gateway, self._id)
                self._sessions.append(session)
                if here is not None:
                    self._here[place.number] = here
        except BaseException:
            self.close()
            raise
        if self._here:
            memories = tuple(memory for one in self._here.values() for memory in one.memories)
            self._local = next(iter(self._here.values()))._replace(memories=memories)()

    def send(self, push: Callable[[int, int], Push], timeout: float | None) -> PoolPushHandle:
        """Send a push to the keepers of all shards."""
        whole = push(-1, -1)
        is_object = not isinstance(whole.values, Mapping)
        parts = [whole if is_object else part_of(whole, place.names) for place in self._places]
        return PoolPushHandle(self._places, self._send("push", parts, timeout))

    def _send(self, kind: str, arguments: Iterable[Any], timeout: float | None) -> list[Call]:
        """Send a call to all keepers. The program decides the order of such calls."""
        calls: list[Call] = []
        with self._sending:
            id = self._id, next(self._numbers)
            try:
                for place, session, argument in zip(self._places, self._sessions, arguments, strict=True):
                    # Once the first keeper has the call, all others must get it, so wait without a limit.
                    late = None if calls else late_after(timeout)
                    calls.append(_sent(place, session, (kind, id, argument), late))
            except BaseException:
                if calls:  # the keepers discard the call when the sessions end
                    self.close()
                raise
        return calls

    def ask(self, shard: int, *call: Any, timeout: float | None = None) -> Any:
        """Send a call to one keeper, and return the keeper's answer."""
        place, late = self._places[shard], late_after(timeout)
        return _answer(call[0], place, _sent(place, self._sessions[shard], call, late), late)

    def pull(
        self,
        names: Collection[str] | None,
        into: Mapping[str, Any] | None,
        at_least: int | None,
        consistent: bool,
        timeout: float | None,
    ) -> Pulled:
        """Copy tensors of one version, and count the pull."""
        if names is None:
            return self._counted(self.ask(0, "pull", None, at_least, True, timeout, timeout=timeout))
        return self._counted(self.copy(names, into, at_least, consistent, late_after(timeout)))

    def pull_rows(self, table: str, ids: Any, at_least: int | None, timeout: float | None) -> Pulled:
        """Copy rows of one version, and count the pull."""
        (shard,) = (place.number for place in self._places if table in place.names)
        return self._counted(self.ask(shard, "pull_rows", table, ids, at_least, timeout, timeout=timeout))

    def _counted(self, copied: tuple[int, Any, int]) -> Pulled:
        version, found, size = copied
        self.ask(0, "pulled", version, size)
        return version, found

    def wait_for_slower(self, most: int, timeout: float | None) -> None:
        """Wait until the last pulls of the other clients are recent enough."""
        self.ask(0, "wait_for_slower", most, timeout, timeout=timeout)

    def states(self) -> list[ShardState]:
        """Return the counters of each shard."""
        return [self.ask(place.number, "look") for place in self._places]

    def copy(
        self, names: Collection[str], into: Mapping[str, Any] | None, at_least: int | None, consistent: bool,
        late: float | None,
    ) -> tuple[int, dict[str, Any], int]:  # fmt: skip
        """Copy tensors of one version, and return the version, the copies and their size in bytes.

        The first attempt does not wait for pushes. If a push was applied between the reads of two shards, the
        keepers read again, in the order of the pushes.
        """
        shares = [[name for name in names if name in place.names] for place in self._places]
        found = self._read(shares, into, at_least, consistent, late)
        if consistent and len({version for version, *_ in found}) > 1:
            handles = self._send("read", shares, left_until(late))
            found = [_answer("pull", *one, late) for one in zip(self._places, handles, strict=True)]
        copies = {name: tensor for _, part, _ in found for name, tensor in part.items()}
        if into is not None:
            copies = {name: copy_of(tensor, into, name) for name, tensor in copies.items()}
        return min(version for version, *_ in found), copies, sum(size for *_, size in found)

    def _read(
        self, shares: Sequence[list[str]], into: Mapping[str, Any] | None, at_least: int | None,
        consistent: bool, late: float | None,
    ) -> list[tuple[int, dict[str, Any], int]]:  # fmt: skip
        """Copy each shard's tensors without waiting for pushes. Shards may return different versions."""
        needed = [place for place in self._places if shares[place.number]] or [self._places[0]]
        remote = [place for place in needed if place.number not in self._here]
        calls = []
        for place in remote:
            call = "pull", shares[place.number], at_least, consistent, left_until(late)
            calls.append(_sent(place, self._sessions[place.number], call, late))
        found = []
        if here := [place for place in needed if place.number in self._here]:
            local = self._local
            assert local is not None
            wanted = [name for place in here for name in shares[place.number]]
            with here[0].named_in_errors("pull"):
                here[0].until_lost(lambda left: local.await_version(at_least, late_after(left)), late)
                found.append(local.copy(wanted, into, None, consistent, late))
        return found + [_answer("pull", *one, late) for one in zip(remote, calls, strict=True)]

    def flush(self, late: float | None) -> None:
        """Wait until the keepers have received all calls, or a shard is lost.

        Args:
            late: Deadline on the monotonic clock (None: no limit).

        Raises:
            Full: A keeper had no room for all calls before the deadline.
        """
        for place, session in zip(self._places, self._sessions, strict=False):  # some may not be connected
            with contextlib.suppress(Broken, Closed):  # the keeper has ended
                place.until_lost(session.flush, late)

    def close(self) -> None:
        """End all sessions after the keepers have received all calls, or a shard is lost.

        Further calls have no effect.
        """
        try:
            self.closed = True
            self.flush(None)
        finally:
            for session in self._sessions:
                with contextlib.suppress(Broken):
                    session.leave()
            if self._local is not None:
                self._local.close()


def _sent(place: ShardPlace, session: Session, call: tuple[Any, ...], late: float | None) -> Call:
    """Send a call, and return its handle. Wait while too many calls are unanswered."""
    with place.named_in_errors(call[0]):
        return place.until_lost(lambda left: session.send(call, left), late)


def _answer(name: str, place: ShardPlace, call: Call, late: float | None) -> Any:
    with place.named_in_errors(name, call):
        place.until_lost(call.wait, late)
        return call.result()
