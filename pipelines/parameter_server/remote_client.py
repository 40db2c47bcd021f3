"""Implement the client of a parameter server on another machine."""

from __future__ import annotations

import contextvars
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from flowchan.items.arguments import refuses_misspelt
from flowchan.pipelines.parameter_server.parameter_client import ParameterClient, PullHandle
from flowchan.pipelines.parameter_server.remote_calls import Call, Gateway, Session, Unfinished
from flowchan.pipelines.parameter_server.row_client import RowClient
from flowchan.pipelines.parameter_server.server_connection import PushHandle
from flowchan.pipelines.parameter_server.shard import Push
from flowchan.pipelines.parameter_server.tensor_layout import Entry, Form, chosen


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


class RemotePullHandle(PullHandle):
    """Handle of a pull that was sent to the server's program.

    Args:
        finish: Function ``(out, timeout)`` that waits for the answer.
    """

    def __init__(self, finish: Callable[[Any, float | None], Any]) -> None:
        self._finish = finish

    def wait(self, out: Any = None, timeout: float | None = None) -> Any:
        """Wait until the pull has finished, and return the tensors or ``out``."""
        return self._finish(out, timeout)


class RemoteConnection:
    """Connection of a remote client in one process.

    Args:
        session: Session of the client.
    """

    def __init__(self, session: Session) -> None:
        self.pid, self.session = os.getpid(), session

    def send(self, push: Callable[[int, int], Push], timeout: float | None) -> RemotePushHandle:
        """Send a push to the server's program, which assigns the slot and the number."""
        return RemotePushHandle(self.session.send(("push", push(-1, -1)), timeout))

    def close(self) -> None:
        """End the session. Further calls have no effect."""
        self.session.close()


class RemoteParameterClient(ParameterClient):
    """Client that forwards each call to the server's program.

    Args:
        form: Kind of the server's state.
        entries: Tensors and slots of all shards.
        gateway: Gateway of the server.
    """

    def __init__(self, form: Form, entries: tuple[Entry, ...], gateway: Gateway) -> None:
        self._form, self._gateway, self._all_entries = form, gateway, entries
        RowClient.__init__(self, {entry.name: entry for entry in entries})
        self._connection: Any = None
        self._pulled: int | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteParameterClient, (self._form, self._all_entries, self._gateway)

    def _connected(self) -> Any:
        if self._connection is None or self._connection.pid != os.getpid():
            self._connection = RemoteConnection(self._gateway.session())
        return self._connection

    def _read_rows(self, table: str, ids: Any, at_least: int | None, timeout: float | None) -> Any:
        call = self._connected().session.send(("pull_rows", table, ids, at_least, timeout), timeout)
        self._pulled, found = call.result(timeout)
        return found

    def _wait_for_slower(self, connection: Any, most: int, timeout: float | None) -> None:
        connection.session.send(("wait_for_slower", most, timeout), timeout).result(timeout)

    @refuses_misspelt("pull")
    def pull(
        self,
        out: Any = None,
        *,
        at_least: int | None = None,
        names: Iterable[str] | None = None,
        consistent: bool = True,
        timeout: float | None = None,
    ) -> Any:
        """Copy the server's tensors, like :meth:`ParameterClient.pull`."""
        return self._begin(out, names, at_least, consistent, timeout).wait(out, timeout)

    def prefetch(self, names: Iterable[str] | None = None) -> PullHandle:
        """Start a pull, like :meth:`ParameterClient.prefetch`."""
        return self._begin(None, names, None, True, None)

    def _begin(
        self,
        out: Any,
        names: Iterable[str] | None,
        at_least: int | None,
        consistent: bool,
        timeout: float | None,
    ) -> RemotePullHandle:
        wanted = None if self._form == "object" else chosen(self._entries, names, "pull")
        if out is not None and wanted is not None:
            self._targets(out, wanted)  # reject a wrong target before the call is sent
        options = {"names": wanted, "at_least": at_least, "consistent": consistent, "timeout": timeout}
        call = self._connected().session.send(("pull", options), timeout)

        def finish(out: Any, timeout: float | None) -> Any:
            self._pulled, found = call.result(timeout)
            return found if out is None or self._form == "object" else self._filled(found, out)

        return RemotePullHandle(finish)


def perform(client: ParameterClient, call: tuple[Any, ...]) -> Any:
    """Perform a remote client's call through a local client."""
    what, argument, *rest = call
    if what == "push":
        connection = client._connected()
        handle = connection.send(lambda slot, number: argument._replace(slot=slot, number=number), None)
        return Unfinished(lambda: (handle.wait(), handle.dropped))
    if what == "pull":
        found = client.pull(**argument)
        return client.version, found
    if what == "pull_rows":
        found = client._read_rows(argument, *rest)
        return client.version, found
    return client._wait_for_slower(client._connected(), argument, *rest)


class Entrance:
    """Owner of a server's gateway. The gateway is created when a client is first sent to another host.

    Args:
        new_client: Function that creates a client in the server's program.
    """

    def __init__(self, new_client: Callable[[], ParameterClient]) -> None:
        self._new_client, self._lock = new_client, threading.Lock()
        # The gateway must use the address that `serve` has set by now, and not the context of the run that
        # later sends a client.
        self._context = contextvars.copy_context()
        self._gateway: Gateway | None = None

    def reduced(self, form: Form, entries: tuple[Entry, ...]) -> tuple[Any, ...]:
        """Return the ``__reduce__`` value of a client that is sent to another host."""
        with self._lock:
            if self._gateway is None:
                self._gateway = self._context.run(Gateway, self._new_client, perform)
                weakref.finalize(self, self._gateway.channels[0].close)
        return RemoteParameterClient, (form, entries, self._gateway)

    def close(self) -> None:
        """End the sessions of all clients on other hosts. Further calls have no effect."""
        if self._gateway is not None:
            self._gateway.close()
