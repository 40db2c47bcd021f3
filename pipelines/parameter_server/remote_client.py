"""Connect a client to a parameter server on another machine."""

from __future__ import annotations

import contextvars
import functools
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

from flowchan.pipelines.parameter_server.parameter_client import ParameterClient
from flowchan.pipelines.parameter_server.remote_calls import Call, Gateway, Unfinished
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
        return RemotePushHandle(self._session.send(("send", push(-1, -1)), timeout))

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
    if what == "send":
        (push,) = arguments
        handle = connection.send(lambda slot, number: push._replace(slot=slot, number=number), None)
        return Unfinished(lambda: (handle.wait(), handle.dropped))
    return getattr(connection, what)(*arguments)


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

    def close(self) -> None:
        """End the sessions of all clients on other hosts. Further calls have no effect."""
        if self._gateway is not None:
            self._gateway.close()
