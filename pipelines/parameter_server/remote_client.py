"""Connect a client to a parameter server on another machine."""

from __future__ import annotations

import contextvars
import functools
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

from flowchan.pipelines.parameter_server.parameter_client import ParameterClient
from flowchan.pipelines.parameter_server.remote_calls import (
    Call,
    Gateway,
    Unfinished,
    WaitingCall,
    waiting_for,
)
from flowchan.pipelines.parameter_server.server_connection import (
    ClientConnection,
    LocalAccess,
    Pulled,
    PushHandle,
    ServerConnection,
    copy_of,
)
from flowchan.pipelines.parameter_server.shard import Push
from flowchan.transport.descriptors import is_for_another_host


class RemotePushHandle(PushHandle):
    """Handle of a push that was sent to the server's program.

    Args:
        call: Call that returns the version, and whether the server dropped the push.
    """

    def __init__(self, call: Call) -> None:
        self._call = call

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the server has applied or dropped the push, and return the version."""
        version: int = self._call.result(timeout)[0]
        return version

    @property
    def done(self) -> bool:
        """Return whether the server has applied or dropped the push."""
        return self._call.done()

    @property
    def version(self) -> int | None:
        """Return the version that :meth:`wait` returns, or None if the push is not done."""
        return self.wait(0) if self.done else None

    @property
    def dropped(self) -> bool:
        """Return whether the server has dropped the push because its values were too old."""
        return self.done and bool(self._call.result(0)[1])


class RemoteConnection(ClientConnection):
    """Connection of a client on another machine, which forwards each call to the server's program.

    Args:
        gateway: Gateway of the server.
    """

    def __init__(self, gateway: Gateway) -> None:
        super().__init__()
        self._session = gateway.session()

    def send(self, push: Callable[[int, int], Push], timeout: float | None) -> RemotePushHandle:
        """Send a push to the server's program, which assigns the slot and the number."""
        return RemotePushHandle(self._session.send(("push", push(-1, -1)), timeout))

    def pull(
        self,
        names: Collection[str] | None,
        into: Mapping[str, Any] | None,
        at_least: int | None,
        consistent: bool,
        timeout: float | None,
    ) -> Pulled:
        """Copy tensors of one version, and count the pull."""
        version, found = self._ask("pull", names, None, at_least, consistent, timeout, timeout=timeout)
        if into is not None:
            found = {name: copy_of(tensor, into, name) for name, tensor in found.items()}
        return version, found

    def prefetch(self, names: Collection[str] | None) -> Callable[[float | None], Pulled]:
        """Start a pull, and return a function that waits for its result."""
        return self._session.send(("pull", names, None, None, True, None)).result

    def pull_rows(self, table: str, ids: Any, at_least: int | None, timeout: float | None) -> Pulled:
        """Copy rows of one version, and count the pull."""
        pulled: Pulled = self._ask("pull_rows", table, ids, at_least, timeout, timeout=timeout)
        return pulled

    def wait_for_slower(self, most: int, timeout: float | None) -> None:
        """Wait until the last pulls of the other clients are recent enough."""
        self._ask("wait_for_slower", most, timeout, timeout=timeout)

    def _ask(self, *call: Any, timeout: float | None) -> Any:
        return self._session.send(call, timeout).result(timeout)

    def close(self) -> None:
        """End the session. Further calls have no effect."""
        self.closed = True
        self._session.close()


def perform(client: ParameterClient, call: tuple[Any, ...]) -> Any:
    """Perform a remote client's call through a local client."""
    what, *arguments = call
    connection = client._connected()
    if what == "push":
        (push,) = arguments
        handle = connection.send(lambda slot, number: push._replace(slot=slot, number=number), None)
        return Unfinished(lambda: (handle.wait(), handle.dropped))
    method = getattr(connection, what)
    if what == "wait_for_slower":
        return WaitingCall(functools.partial(method, *arguments))
    return waiting_for(arguments[2], method, *arguments)  # "pull" or "pull_rows"


class Entrance:
    """Function that connects a client in the server's program.

    If a client is sent to another host, its connections go through a gateway, which is created at the first
    such client.

    Args:
        access: Parts of the server that clients on this machine use.
        new_client: Function that creates a client for a session of the gateway.
    """

    def __init__(self, access: LocalAccess, new_client: Callable[[], ParameterClient]) -> None:
        self._access, self._new_client, self._lock = access, new_client, threading.Lock()
        # The gateway must use the address that `serve` has set by now, and not the context of the run that
        # later sends a client.
        self._context = contextvars.copy_context()
        self._gateway: Gateway | None = None

    def __call__(self) -> ServerConnection:
        return self._access()

    def __reduce__(self) -> tuple[Any, ...]:
        if not is_for_another_host():
            return self._access.__reduce__()
        with self._lock:
            if self._gateway is None:
                self._gateway = self._context.run(Gateway, self._new_client, perform)
                weakref.finalize(self, self._gateway.channels[0].close)
        return functools.partial, (RemoteConnection, self._gateway)

    def close(self, timeout: float | None = None) -> None:
        """Close the inbox after the server's program has performed all calls from other hosts.

        Args:
            timeout: Maximum seconds to wait (default: no limit).

        Raises:
            TimeoutError: ``timeout`` expired, and the inbox is still open.
        """
        with self._lock:  # a later client of another host has no time to send calls
            gateway = self._gateway
        if gateway is not None:
            gateway.close(timeout)
        self._access.inbox.close()

    def start_close(self) -> None:
        """Close the inbox like :meth:`close`, but return at once, because a run must not wait."""
        if self._gateway is None:
            self.close()
        else:
            threading.Thread(target=self.close, name="flowchan parameters", daemon=True).start()

    def join(self) -> None:
        """Wait, for a limited time, until all clients on other hosts have their last answers."""
        if self._gateway is not None:
            self._gateway.sessions.join()
