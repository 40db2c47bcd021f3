"""Define the connection of a client to a parameter server, and connect a client on the same machine."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from flowchan import Broken, Channel, Closed, Full
from flowchan.pipelines.parameter_server.rows import read_rows
from flowchan.pipelines.parameter_server.shard import Push
from flowchan.pipelines.parameter_server.shard_memory import (
    DROPPED,
    FAILED,
    OPTIMISTIC_READS,
    PENDING,
    OpenShard,
    Outcome,
    ShardMemory,
)
from flowchan.pipelines.parameter_server.tensor_kinds import as_kind, copy
from flowchan.pipelines.parameter_server.tensor_layout import copied, size_of
from flowchan.public import public
from flowchan.transport.descriptors import is_for_another_host


@public
class PushHandle:
    """Handle of one push, returned by ``ParameterClient.push``.

    Args:
        connection: Connection of the client that sent the push.
        number: Number of the push.

    Example:
        >>> import numpy as np
        >>> from flowchan.pipelines import ParameterServer
        >>> with ParameterServer(np.zeros(2), on="thread") as server:
        ...     handle = server.client().push(np.ones(2))
        ...     handle.wait(timeout=60), handle.done, handle.dropped
        (1, True, False)
    """

    def __init__(self, connection: ServerConnection, number: int) -> None:
        self._connection, self._number = connection, number
        self._outcomes: dict[int, Outcome] = {}  # keyed by shard number

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the server has applied or dropped the push.

        Args:
            timeout: Maximum seconds to wait (default: no limit).

        Returns:
            The version that contains the push. For a dropped push, the version at the time of the drop.

        Raises:
            TimeoutError: ``timeout`` expired. The server still applies the push later.
            Closed: The server shut down before the client received an answer. Only a server on a pool may
                have applied the push.
            Exception: The error that the rule raised on the server.
        """
        self._connection.await_outcome(self, timeout)
        return self._result()

    def _result(self) -> int:
        for shard, (outcome, value) in self._outcomes.items():
            if outcome == FAILED:
                error = self._connection.shards[shard].error(value)
                error.add_note("raised on the parameter server; the push did not change this shard")
                raise error
        return max(outcome.value for outcome in self._outcomes.values())

    @property
    def done(self) -> bool:
        """Return whether the server has applied or dropped the push."""
        return self._connection.look(self)

    @property
    def version(self) -> int | None:
        """Return the version that :meth:`wait` returns, or None if the push is not done."""
        return self._result() if self.done else None

    @property
    def dropped(self) -> bool:
        """Return whether the server has dropped the push because its values were too old."""
        return self.done and any(outcome.outcome == DROPPED for outcome in self._outcomes.values())


Pulled = tuple[int, Any]
"""Version of a pull, and its tensors by name, its rows or its object."""


class ClientConnection(ABC):
    """Connection of one client in one process to a parameter server.

    Attributes:
        closed: Whether the connection was closed.
    """

    def __init__(self) -> None:
        self._pid, self.closed = os.getpid(), False

    @property
    def is_open(self) -> bool:
        """Return whether this process has opened the connection and has not closed it."""
        return not self.closed and self._pid == os.getpid()

    @abstractmethod
    def send(self, push: Callable[[int, int], Push], timeout: float | None) -> PushHandle:
        """Send the push that a function creates from a slot and a number."""

    @abstractmethod
    def pull(
        self,
        names: Collection[str] | None,
        into: Mapping[str, Any] | None,
        at_least: int | None,
        consistent: bool,
        timeout: float | None,
    ) -> Pulled:
        """Copy tensors of one version, and count the pull.

        Args:
            names: Names of the tensors; None if the server holds an object.
            into: Tensors to fill, or None to create tensors.
            at_least: Version to wait for, or None.
            consistent: Whether all tensors must have the same version.
            timeout: Maximum seconds to wait, or None.

        Returns:
            The version, and the tensors by name or the object.
        """

    @abstractmethod
    def pull_rows(self, table: str, ids: Any, at_least: int | None, timeout: float | None) -> Pulled:
        """Copy rows of one version, and count the pull."""

    @abstractmethod
    def wait_for_slower(self, most: int, timeout: float | None) -> None:
        """Wait until a push would be at most ``most`` versions ahead of the last pulls by other clients."""

    def prefetch(self, names: Collection[str] | None) -> Callable[[float | None], Pulled]:
        """Start a pull, and return a function that waits a given number of seconds for the result."""
        return BackgroundPull(lambda: self.pull(names, None, None, True, None)).result

    @abstractmethod
    def close(self) -> None:
        """Close the connection. Further calls have no effect."""


class BackgroundPull:
    """Pull that runs on a thread.

    Args:
        pull: Function that performs the pull.
    """

    def __init__(self, pull: Callable[[], Pulled]) -> None:
        self._result: Pulled | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(pull,), name="flowchan pull", daemon=True)
        self._thread.start()

    def _run(self, pull: Callable[[], Pulled]) -> None:
        try:
            self._result = pull()
        except BaseException as error:
            self._error = error

    def result(self, timeout: float | None) -> Pulled:
        """Wait for the pull, and return its result or raise its error."""
        late = late_after(timeout)
        while self._thread.is_alive():  # wait in short steps, so that Ctrl-C can interrupt
            left = 0.1 if late is None else min(0.1, late - time.monotonic())
            if left <= 0:
                raise TimeoutError(f"prefetch: the pull did not finish within {timeout:g} s")
            self._thread.join(left)
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


class LocalAccess(NamedTuple):
    """Parts of a server that a client on the same machine uses. A call of this object connects a client.

    Attributes:
        memories: Shared memory of each shard.
        inbox: Channel that carries the pushes.
        ended: Channel that closes when the server shuts down.
    """

    memories: tuple[ShardMemory, ...]
    inbox: Channel[Push]
    ended: Channel[None]

    def __call__(self) -> ServerConnection:
        return ServerConnection(*self)

    def __reduce__(self) -> tuple[Any, ...]:
        if is_for_another_host():
            raise TypeError(
                "a client can be sent to another host only by the program that created the server"
            )
        return LocalAccess, tuple(self)


class ServerConnection(ClientConnection):
    """Connection to a server on the same machine, with its mapped memory and its slot.

    Args:
        memories: Shared memory of each shard.
        inbox: Channel that carries the pushes.
        ended: Channel that closes when the server shuts down.
    """

    def __init__(self, memories: Sequence[ShardMemory], inbox: Channel[Push], ended: Channel[None]) -> None:
        super().__init__()
        self.shards: list[OpenShard] = [memory.opened() for memory in memories]
        self._memory, self._inbox, self._ended = memories[0], inbox, ended
        self.slot = self.shards[0].claim_slot()
        self.lock = threading.RLock()
        self._pending: dict[int, PushHandle] = {}
        _connections.add(self)

    def send(self, push: Callable[[int, int], Push], timeout: float | None) -> PushHandle:
        """Put a push into the server's channel."""
        late = late_after(timeout)
        with self.lock:
            for handle in list(self._pending.values()):
                if not self.look(handle):
                    break
            if len(self._pending) >= PENDING - 1:
                self.await_outcome(next(iter(self._pending.values())), timeout)
            number = self.shards[0].next_push(self.slot)
            self._put(push(self.slot, number), late)
            handle = self._pending[number] = PushHandle(self, number)
            return handle

    def _put(self, push: Push, late: float | None) -> None:
        while True:  # wait in short steps, because the channel does not show that the program was killed
            self.check_program("push")
            left = 1.0 if late is None else max(0.0, late - time.monotonic())
            try:
                self._inbox.put(push, timeout=min(1.0, left))
            except Full:
                if left <= 1.0 and late is not None:
                    raise
            else:
                return

    def check_program(self, call: str) -> None:
        """Raise ``Broken`` if the program that runs the server was killed."""
        if self._memory.gone:
            raise Broken(f"{call}: the parameter server's program has exited")

    def look(self, handle: PushHandle) -> bool:
        """Read the outcomes of a push, and return whether all shards have reported an outcome."""
        for number, shard in enumerate(self.shards):
            if number not in handle._outcomes:
                outcome = shard.outcome(self.slot, handle._number)
                if outcome is None:
                    return False
                handle._outcomes[number] = outcome
        self._pending.pop(handle._number, None)
        return True

    def await_outcome(self, handle: PushHandle, timeout: float | None) -> None:
        """Wait until all shards have reported the outcome of a push."""
        late = late_after(timeout)
        for number, shard in enumerate(self.shards):
            self.await_(
                shard,
                lambda number=number: self.look(handle) or number in handle._outcomes,  # type: ignore[misc]
                late,
                "push",
            )

    def await_(self, shard: OpenShard, done: Callable[[], bool], late: float | None, call: str) -> None:
        """Wait until ``done()`` is true. Call ``done`` again after each wake-up by the shard."""
        while True:
            seen = shard.wakeup.count
            if done():
                return
            self._check_server(done, call)
            left = 1.0 if late is None else late - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{call}: the parameter server did not answer in time")
            shard.wakeup.wait(seen, left)

    def _check_server(self, done: Callable[[], bool], call: str) -> None:
        """Raise an error if the server or its program has shut down and ``done()`` is still false."""
        if self._memory.gone and not done():
            self.check_program(call)
        if self._ended.closed and not done():
            raise Closed(f"{call}: the parameter server has shut down")

    def wait_for_slower(self, most: int, timeout: float | None) -> None:
        """Wait until the last pulls of the other clients are recent enough."""
        shard = self.shards[0]

        def others_are_near() -> bool:
            slowest = shard.slowest(self.slot)
            return slowest is None or shard.version + 1 - slowest <= most

        self.await_(shard, others_are_near, late_after(timeout), "push")

    def pull(
        self,
        names: Collection[str] | None,
        into: Mapping[str, Any] | None,
        at_least: int | None,
        consistent: bool,
        timeout: float | None,
    ) -> Pulled:
        """Copy tensors of one version, and count the pull."""
        version, found, size = self.copy(names, into, at_least, consistent, late_after(timeout))
        self.count_pull(version, size)
        return version, found

    def pull_rows(self, table: str, ids: Any, at_least: int | None, timeout: float | None) -> Pulled:
        """Copy rows of one version, and count the pull."""
        version, found, size = self.copy_rows(table, ids, at_least, late_after(timeout))
        self.count_pull(version, size)
        return version, found

    def count_pull(self, version: int, size: int) -> None:
        """Count a pull of a version."""
        self.shards[0].count_pull(self.slot, version, size)

    def await_version(self, at_least: int | None, late: float | None) -> None:
        """Wait until all shards have this version."""
        self.check_program("pull")
        if at_least is not None:
            for shard in self.shards:
                self.await_(
                    shard, lambda shard=shard: shard.version >= at_least, late, "pull"  # type: ignore[misc]
                )  # fmt: skip

    def copy(
        self,
        names: Collection[str] | None,
        into: Mapping[str, Any] | None,
        at_least: int | None,
        consistent: bool,
        late: float | None,
    ) -> tuple[int, Any, int]:
        """Copy tensors or the object, and return the version, the copies and their size in bytes."""
        self.await_version(at_least, late)
        if names is None:
            return self._copy_object(late)
        for attempt in _attempts(late):
            version = min(shard.version for shard in self.shards)
            lock = attempt >= OPTIMISTIC_READS
            copies, size = {}, 0
            with contextlib.ExitStack() as locks:
                for shard in self.shards:
                    locks.enter_context(shard.reading(version, lock))
                for shard in self.shards:
                    for name in names:
                        source = shard.blocks[version % 2].get(name)
                        if source is not None and (shard.is_version(version) or not consistent):
                            copies[name] = copy_of(source, into, name)
                            size += size_of(source)
                whole = all(shard.is_version(version) for shard in self.shards)
            if not consistent or (whole and len(copies) == len(names)):
                return version, copies, size
        raise AssertionError

    def copy_rows(
        self, table: str, ids: Any, at_least: int | None, late: float | None
    ) -> tuple[int, Any, int]:
        """Copy rows of one version, and return the version, the copies and their size in bytes."""
        self.await_version(at_least, late)
        shard = next(shard for shard in self.shards if table in shard.blocks[0])
        for attempt in _attempts(late):
            version = shard.version
            with shard.reading(version, attempt >= OPTIMISTIC_READS):
                if shard.is_version(version):
                    found = read_rows(shard.blocks[version % 2][table], ids)
                    if shard.is_version(version):
                        return version, found, size_of(found)
        raise AssertionError

    def _copy_object(self, late: float | None) -> tuple[int, Any, int]:
        (shard,) = self.shards
        for attempt in _attempts(late):
            record = shard.record()
            with shard.reading(record.version, attempt >= OPTIMISTIC_READS):
                contents = shard.read_object(record)
                if shard.is_version(record.version):
                    return record.version, pickle.loads(contents), len(contents)
        raise AssertionError

    def close(self) -> None:
        """Release the slot. Further calls have no effect."""
        self.closed = True
        for shard in self.shards:
            shard.close()


def late_after(timeout: float | None) -> float | None:
    """Return the time at which a timeout in seconds expires, or None without a timeout."""
    return None if timeout is None else time.monotonic() + timeout


def left_until(late: float | None) -> float | None:
    """Return the seconds until the time ``late``, or None without a limit."""
    return None if late is None else max(0.0, late - time.monotonic())


def _attempts(late: float | None) -> Iterator[int]:
    """Count the attempts to read one version. Raise ``TimeoutError`` after the deadline ``late``."""
    yield 0
    for attempt in itertools.count(1):
        if late is not None and time.monotonic() > late:
            raise TimeoutError(f"pull: pushes overwrote each of the {attempt} copies before it was complete")
        yield attempt


_connections: weakref.WeakSet[ServerConnection] = weakref.WeakSet()


def _close_inherited() -> None:
    """In a forked child, close the descriptors of the parent's clients, because they would keep the locks."""
    for one in list(_connections):
        one.close()


os.register_at_fork(after_in_child=_close_inherited)


def copy_of(source: Any, into: Mapping[str, Any] | None, name: str) -> Any:
    """Copy a tensor into ``into[name]``, or into a new tensor if ``into`` is None."""
    if into is None:
        return copied(source)
    copy(as_kind(source, into[name]), into[name])
    return into[name]
