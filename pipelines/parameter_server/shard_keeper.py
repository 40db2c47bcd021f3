"""Run a keeper: a process on a host that keeps one shard of a parameter server.

The keeper owns a parameter server with a single shard. The worker of this shard can therefore be killed and
replaced without any loss of tensors. Clients call the keeper through sessions. A client on the keeper's host
reads the tensors from shared memory. The session of such a client also uses shared memory. The program
decides the order of the calls that change the tensors (see ``call_order``).

If the keeper itself dies, the tensors of its shard are lost.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, NamedTuple

from flowchan import Broken, Channel, ChannelError, Closed, worker
from flowchan.hosts.pool_channels import Reach
from flowchan.pipelines.children.parent_handle import Parent
from flowchan.pipelines.parameter_server.call_order import CallId, KeeperOrder, Notice
from flowchan.pipelines.parameter_server.parameter_client import ParameterClient
from flowchan.pipelines.parameter_server.remote_calls import (
    MOST_OPEN,
    Gateway,
    Session,
    Unfinished,
    WaitingCall,
    waiting_for,
)
from flowchan.pipelines.parameter_server.server_connection import (
    LocalAccess,
    ServerConnection,
    late_after,
)
from flowchan.pipelines.parameter_server.shard import Push
from flowchan.pipelines.parameter_server.shard_memory import Record
from flowchan.transport.local_peers import machine

SESSION_BYTES = 64 << 20
"""Memory in bytes for the calls of a session on this host, in addition to three pushes of the shard."""

DISCARDED = "push: the client or the server was closed before all shards had the push, so no shard applies it"
"""Text of the error for a call that the program discards."""


class ShardState(NamedTuple):
    """Counters of one shard.

    Attributes:
        record: Record of the shard's last push.
        pulls: Number of pulls by all clients.
        bytes_out: Bytes of all pulls.
        queued: Number of calls that wait for their turn.
    """

    record: Record
    pulls: int
    bytes_out: int
    queued: int


def place() -> tuple[str, str]:
    """Return an ID of this process's host. Agents of ``local`` count as separate hosts."""
    try:
        return machine(), worker().host
    except RuntimeError:  # this process is not a worker
        return machine(), ""


def connect(gateway: Gateway, client: str) -> tuple[Session, LocalAccess | None]:
    """Open a session with a keeper, through shared memory if the keeper is on this host.

    Args:
        gateway: Gateway of the keeper.
        client: ID of the client.

    Returns:
        The session, and the parts of the shard's server, or None on another host.
    """
    session = gateway.session()
    packed = session.send(("open_here", place())).result()
    here: LocalAccess | None = None
    if packed:
        calls, answers, here = pickle.loads(packed)
        remote, session = session, Session(calls, answers)
        remote.send(("serve_here",)).result()
        remote.close()
    session.send(("hello", client)).result()
    return session, here


class ShardKeeper:
    """State of a keeper.

    Args:
        number: Number of the shard.
        server: Server with this shard.
        notices: Channel that carries notices to the program.
        reach: How hosts reach the program.
    """

    def __init__(self, number: int, server: Any, notices: Channel[Notice], reach: Reach) -> None:
        self.number, self.server, self._notices = number, server, notices
        self.gateway = Gateway(lambda: SessionClient(self), _perform, reach.channel(MOST_OPEN))
        self._staged: dict[CallId, tuple[Callable[[], Any], Future[Any]]] = {}
        self._changing = threading.Lock()
        self._failure: Exception | None = None

    def notify(self, kind: Any, call: CallId) -> None:
        """Send a notice to the program."""
        self._notices.put(Notice(self.number, kind, call))

    def stage(self, call: CallId, function: Callable[[], Any]) -> Unfinished:
        """Keep a call until the program orders this keeper to perform it."""
        future: Future[Any] = Future()
        with self._changing:
            if self._failure is not None:
                raise self._failure
            self._staged[call] = function, future
        try:
            self.notify("staged", call)
        except ChannelError as error:
            raise _reason(error) from None
        return Unfinished(future.result)

    def follow(self, orders: Iterable[KeeperOrder]) -> None:
        """Follow the program's orders until it closes or breaks their channel."""
        try:
            for perform, call in orders:
                with self._changing:
                    found = self._staged.pop(call, None)
                if found is None:
                    continue  # the program discards a call that did not reach this keeper
                function, future = found
                del found
                if perform:
                    _finish(future, function)
                    self.notify("performed", call)
                else:
                    future.set_exception(Closed(DISCARDED))
                del function, future  # the push refers to the channel's memory
            failure: Exception = Closed("the parameter server has shut down")
        except ChannelError as error:
            failure = _reason(error)
        with self._changing:
            self._failure, rest = failure, list(self._staged.values())
            self._staged.clear()
        for _, future in rest:
            future.set_exception(failure)

    def state(self) -> ShardState:
        """Return the counters of this shard."""
        (shard,) = self.server._shards
        pulls, size = shard.pulls()
        return ShardState(shard.record(), pulls, size, len(self._staged))

    def session_room(self) -> int:
        """Return the memory in bytes for the waiting calls of one session on this host."""
        (shard,) = self.server._shards
        return int(3 * shard.memory.layout.size + SESSION_BYTES)


class SessionClient:
    """Client of one session, in the keeper.

    Args:
        keeper: The keeper.
    """

    def __init__(self, keeper: ShardKeeper) -> None:
        self._keeper, self._name = keeper, ""
        self._client: ParameterClient = keeper.server.client()
        self._here: tuple[Channel[Any], Channel[Any]] | None = None

    def close(self) -> None:
        """Release the client after the session has ended."""
        self._client.close()
        if self._name:
            with contextlib.suppress(ChannelError):  # the program has exited
                self._keeper.notify("lost", (self._name, 0))

    # --- sessions ---

    def open_here(self, of: tuple[str, str]) -> bytes:
        """Return pickled channels and parts of the server if the caller is on this host."""
        if not of[0] or of != place():
            return b""
        room = None if self._client._form == "object" else self._keeper.session_room()
        calls: Channel[Any] = Channel(2 * MOST_OPEN, across="processes", max_bytes=room)
        answers: Channel[Any] = Channel(2 * MOST_OPEN, across="processes")
        self._here = calls, answers
        return pickle.dumps((calls, answers, self._keeper.server._access))

    def serve_here(self) -> None:
        """Serve the channels from :meth:`open_here`, after the client has opened its ports."""
        assert self._here is not None
        self._keeper.gateway.sessions.begin(*self._here)
        self._here = None

    def hello(self, name: str) -> None:
        """Store the client's ID."""
        self._name = name

    # --- calls that the program orders ---

    def push(self, call: CallId, push: Push) -> Unfinished:
        """Stage a push. Its result is the version, and whether the server dropped the push."""

        def perform() -> tuple[int, bool]:
            handle = self._connected().send(
                lambda slot, number: push._replace(slot=slot, number=number), None
            )
            return handle.wait(), handle.dropped

        return self._keeper.stage(call, perform)

    def read(self, call: CallId, names: list[str]) -> Unfinished:
        """Stage a pull, which runs between two pushes."""
        return self._keeper.stage(call, lambda: self._connected().copy(names, None, None, True, None))

    # --- other calls ---

    def pull(self, names: list[str] | None, at_least: int | None, consistent: bool, timeout: Any) -> Any:
        """Copy tensors, or the object if ``names`` is None, without waiting for other shards."""
        copy = self._connected().copy
        return waiting_for(at_least, copy, names, None, at_least, consistent, late_after(timeout))

    def pull_rows(self, table: str, ids: Any, at_least: int | None, timeout: float | None) -> Any:
        """Copy rows of a table."""
        copy = self._connected().copy_rows
        return waiting_for(at_least, copy, table, ids, at_least, late_after(timeout))

    def pulled(self, version: int, size: int) -> None:
        """Count a pull by the client."""
        self._connected().count_pull(version, size)

    def wait_for_slower(self, most: int, timeout: float | None) -> WaitingCall:
        """Return a call that waits for slower clients."""
        return WaitingCall(lambda: self._connected().wait_for_slower(most, timeout))

    def look(self) -> ShardState:
        """Return the counters of the shard."""
        return self._keeper.state()

    def _connected(self) -> ServerConnection:
        found = self._client._connected()
        assert isinstance(found, ServerConnection)
        return found


def _reason(error: ChannelError) -> Exception:
    """Return the error of a lost shard if that is why the program broke its channels, or else ``error``."""
    return error.__cause__ if isinstance(error.__cause__, Broken) else error


def _perform(client: SessionClient, call: tuple[Any, ...]) -> Any:
    return getattr(client, call[0])(*call[1:])


def _finish(future: Future[Any], function: Callable[[], Any]) -> None:
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)


def keep_shard(
    parent: Parent,
    number: int,
    make_server: Callable[[], Any],
    orders: Channel[KeeperOrder],
    notices: Channel[Notice],
    reach: Reach,
) -> ShardState:
    """Keep a shard until the program closes the server. Child processes run this function.

    Args:
        parent: Handle of the program.
        number: Number of the shard.
        make_server: Function that creates the server with this shard.
        orders: Channel with the program's orders.
        notices: Channel for the notices to the program.
        reach: How hosts reach the program.

    Returns:
        The counters of the shard after its last push.
    """
    with make_server() as server:
        keeper = ShardKeeper(number, server, notices, reach)
        following = threading.Thread(target=keeper.follow, args=(orders,), name="flowchan shard", daemon=True)
        following.start()
        parent.send(keeper.gateway)
        parent.receive()  # the command to close; clients send no calls after it
        keeper.gateway.close()
        state = keeper.state()
    keeper.gateway.sessions.join()
    return state
