"""Implement the client of a parameter server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from flowchan import pack
from flowchan.items.arguments import refuses_misspelt, whole
from flowchan.items.codec import dumps_in_one
from flowchan.items.text import shown
from flowchan.pipelines.parameter_server.encoded import Codes
from flowchan.pipelines.parameter_server.push_rules import Rule, check_rule, check_values
from flowchan.pipelines.parameter_server.row_client import RowClient
from flowchan.pipelines.parameter_server.server_connection import (
    ClientConnection,
    Pulled,
    PushHandle,
    copy_of,
)
from flowchan.pipelines.parameter_server.shard import Push
from flowchan.pipelines.parameter_server.tensor_kinds import as_array, dtype_name, is_inexact
from flowchan.pipelines.parameter_server.tensor_layout import (
    ONLY,
    Entry,
    Form,
    chosen,
    form_of,
    named,
    plain,
    pushed_size,
)
from flowchan.public import public

Stale = Literal["drop", "wait"]
"""Policy for values that are too old: the server drops the push, or the client waits."""


@public
class PullHandle:
    """Handle of a pull that runs in the background, returned by ``ParameterClient.prefetch``.

    Args:
        result: Function that waits at most a number of seconds for the pull, and returns its result.
        take: Function that returns the result for ``wait``, or copies it into ``out``.

    Example:
        >>> import numpy as np
        >>> from flowchan.pipelines import ParameterServer
        >>> with ParameterServer({"w": np.ones(2)}, on="thread") as server:
        ...     server.client().prefetch().wait(timeout=60)
        {'w': array([1., 1.])}
    """

    def __init__(self, result: Callable[[float | None], Pulled], take: Callable[[Pulled, Any], Any]) -> None:
        self._result, self._take = result, take

    def wait(self, out: Any = None, timeout: float | None = None) -> Any:
        """Wait until the pull has finished.

        Args:
            out: Mapping of tensors, or ``nn.Module``, to fill in place (default: none).
            timeout: Maximum seconds to wait (default: no limit).

        Returns:
            The result, as for ``pull``.

        Raises:
            TimeoutError: ``timeout`` expired.
            Exception: The error that the pull raised.
        """
        return self._take(self._result(timeout), out)


@public
class ParameterClient(RowClient):
    """Client of a parameter server, from ``ParameterServer.client()``.

    A client can be sent to another process or host as an argument or an item. Each process that receives the
    client counts as a separate client. Threads may share a client, but then they also share
    ``client.version``.

    Args:
        form: Kind of state that the server holds.
        entries: Tensors and slots of all shards.
        connect: Function that connects a client in this process, and that can be sent with the client.

    Example:
        >>> import numpy as np
        >>> from flowchan.pipelines import ParameterServer
        >>> with ParameterServer({"w": np.zeros(2)}, on="thread") as server:
        ...     client = server.client()
        ...     handle = client.push({"w": np.ones(2)}, scale=0.5)
        ...     client.pull(at_least=handle.wait()), client.version
        ({'w': array([0.5, 0.5])}, 1)
    """

    def __init__(self, form: Form, entries: Iterable[Entry], connect: Callable[[], ClientConnection]) -> None:
        self._form, self._all_entries, self._connect = form, tuple(entries), connect
        super().__init__({entry.name: entry for entry in self._all_entries})
        self._connection: ClientConnection | None = None
        self._pulled: int | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ParameterClient, (self._form, self._all_entries, self._connect)

    @property
    def version(self) -> int | None:
        """Return the version of the last pull, or None before the first pull."""
        return self._pulled

    def _connected(self) -> ClientConnection:
        found = self._connection
        if found is None or not found.is_open:
            found = self._connection = self._connect()
        return found

    @refuses_misspelt("push")
    def push(
        self,
        values: Any,
        rule: Rule = "add",
        scale: float = 1.0,
        at: int | None = None,
        max_staleness: int | None = None,
        stale: Stale = "drop",
        timeout: float | None = None,
        codes: Codes | None = None,
    ) -> PushHandle:
        """Send values to the server, which applies a rule with these values exactly once.

        The call waits while the server's channel is full, and returns when the channel has the values.

        Args:
            values: Mapping from names to tensors, a single tensor, or an object, in the same form as the
                server's state. A mapping may contain only some of the server's names.
            rule: ``"add"`` (default), ``"copy"``, ``"zero"``, ``"gradient"`` for a step of the server's
                optimizer, or a function ``(current, given) -> new`` that the server calls for each tensor.
            scale: Factor that multiplies the values (default: 1).
            at: Version on which the values are based (default: the version of the last pull).
            max_staleness: Largest allowed number of versions between ``at`` and the version that the push
                changes (default: no limit).
            stale: ``"drop"`` (default): the server drops a push whose values are too old. ``"wait"``: the
                call waits for slower clients. It ends when every other client's last pull is at most
                ``max_staleness`` versions behind the version that the push creates.
            timeout: Maximum seconds to wait (default: no limit).
            codes: Code that compresses the values (see :meth:`encode`; default: none).

        Returns:
            The handle of the push.

        Raises:
            Broken: The program that runs the server was killed.
            Closed: The server has shut down.
            KeyError: ``values`` contains a name that the server does not have.
            TimeoutError: ``timeout`` expired. The values were not sent.
            TypeError: A value or the rule has the wrong type, or cannot be sent to another process.
            ValueError: A value has the wrong shape, or an argument is out of range.

        Example:
            >>> import numpy as np
            >>> from flowchan.pipelines import ParameterServer
            >>> with ParameterServer(np.array([1.0, 5.0]), on="thread") as server:
            ...     client = server.client()
            ...     version = client.push(np.array([3.0, 3.0]), rule=np.maximum).wait()
            ...     client.pull()
            array([3., 5.])
        """
        check_rule("push", rule, self._optimized)
        if stale not in ("drop", "wait"):
            raise ValueError(f"push: stale must be 'drop' or 'wait', got {stale!r}")
        if max_staleness is not None:
            whole("push", "max_staleness", max_staleness, 0)
        started = time.monotonic()
        with self._encoder.restored_on_error(codes):
            given, size = self._checked(values, rule, scale, codes)
            connection = self._connected()
            if stale == "wait" and max_staleness is not None:
                connection.wait_for_slower(max_staleness, timeout)
                max_staleness = None
            left = None if timeout is None else max(0.0, timeout - (time.monotonic() - started))
            at = self._pulled if at is None else at
            packed = rule if isinstance(rule, str) else pack(rule)
            return connection.send(
                lambda slot, number: Push(
                    slot, number, at, max_staleness, packed, float(scale), given, None, size
                ),
                left,
            )

    def _checked(self, values: Any, rule: Rule, scale: float, codes: Codes | None) -> tuple[Any, int]:
        """Check the values, and return the data to send with its size in bytes."""
        if self._form == "object":
            contents = dumps_in_one(values)
            return contents, len(contents)
        if self._form == "mapping" and not isinstance(values, Mapping):
            raise TypeError(f"push: values must be a mapping from names to tensors, got {shown(values)}")
        given = dict(values) if self._form == "mapping" else {ONLY: values}
        check_values("push", given, rule, scale, self._entries, self._tables)
        given = {name: plain(value) for name, value in given.items()}
        if rule == "zero":
            given = dict.fromkeys(given, 0)
        elif codes is not None:
            if codes == "topk" and rule == "copy":
                raise ValueError(
                    'push: rule must be "add" or "gradient" with codes="topk", got "copy", which would set '
                    "the elements that topk leaves out to zero"
                )
            given = self._encoder.encode(given, codes)
        elif rule in ("add", "copy"):
            # These rules do not write to the values. The server reads an array in the channel's memory, but
            # maps a tensor into private pages, because torch has no read-only tensors.
            given = {name: as_array(value) for name, value in given.items()}
        return given, pushed_size(given, None)

    def _send_rows(
        self, table: str, ids: Any, values: Any, rule: Rule, scale: float, timeout: float | None
    ) -> PushHandle:
        given, rows, at = {table: values}, {table: ids}, self._pulled
        packed, size = rule if isinstance(rule, str) else pack(rule), pushed_size(given, rows)
        return self._connected().send(
            lambda slot, number: Push(slot, number, at, None, packed, scale, given, rows, size), timeout
        )

    def _read_rows(self, table: str, ids: Any, at_least: int | None, timeout: float | None) -> Any:
        self._pulled, found = self._connected().pull_rows(table, ids, at_least, timeout)
        return found

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
        """Copy the server's tensors. All copies have the same version.

        Args:
            out: Mapping of tensors, a single tensor, or ``nn.Module``, to fill in place (default: none).
            at_least: Wait for this or a later version (default: do not wait).
            names: Names of the tensors (default: all).
            consistent: Whether all tensors must have the same version (default: True). AsySG-InCon pulls with
                False.
            timeout: Maximum seconds to wait (default: no limit).

        Returns:
            ``out`` if given. Otherwise, the tensors by name, the single tensor, or the object.

        Raises:
            Broken: The program that runs the server was killed.
            Closed: The server shut down before it reached version ``at_least``.
            KeyError: ``names`` contains a name that the server does not have, or ``out`` lacks a tensor.
            TimeoutError: ``timeout`` expired before the server reached version ``at_least``.
            ValueError: A tensor in ``out`` has the wrong shape.

        Example:
            >>> import numpy as np
            >>> from flowchan.pipelines import ParameterServer
            >>> with ParameterServer({"w": np.ones(2), "b": np.zeros(1)}, on="thread") as server:
            ...     server.client().pull(names=["b"])
            {'b': array([0.])}
        """
        wanted = self._wanted(names, "pull")
        into = None if out is None or wanted is None else self._targets(out, wanted)
        pulled = self._connected().pull(wanted, into, at_least, consistent, timeout)
        found = self._taken(pulled, None)
        return found if into is None else out

    def _wanted(self, names: Iterable[str] | None, call: str) -> list[str] | None:
        """Return the names of the tensors to pull, or None if the server stores an object."""
        return None if self._form == "object" else chosen(self._entries, names, call)

    def _targets(self, out: Any, names: list[str]) -> dict[str, Any]:
        """Return the caller's tensors to fill, by name."""
        if hasattr(out, "state_dict"):
            out = out.state_dict()
        targets = dict(out) if self._form == "mapping" else named(out, form_of(out))
        for name in names:
            if name not in targets:
                raise KeyError(f"pull: out must have a tensor {name!r}, got {shown(list(targets)[:5])}")
            if tuple(targets[name].shape) != self._entries[name].shape:
                raise ValueError(
                    f"pull: out[{name!r}] must have the shape {self._entries[name].shape}, got "
                    f"{tuple(targets[name].shape)}"
                )
            if is_inexact(self._entries[name].dtype) and not is_inexact(targets[name].dtype):
                raise ValueError(
                    f"pull: out[{name!r}] must have a floating-point type, like the server's tensor "
                    f"({dtype_name(self._entries[name].dtype)}), got {dtype_name(targets[name].dtype)}"
                )
        return {name: _writable(targets[name]) for name in names}

    def prefetch(self, names: Iterable[str] | None = None) -> PullHandle:
        """Start a pull on a background thread.

        Args:
            names: Names of the tensors (default: all).

        Returns:
            The handle, whose ``wait()`` returns the tensors.

        Example:
            >>> import numpy as np
            >>> from flowchan.pipelines import ParameterServer
            >>> with ParameterServer({"w": np.ones(2)}, on="thread") as server:
            ...     handle = server.client().prefetch()
            ...     handle.wait()
            {'w': array([1., 1.])}
        """
        return PullHandle(self._connected().prefetch(self._wanted(names, "prefetch")), self._taken)

    def _taken(self, pulled: Pulled, out: Any) -> Any:
        """Return the result of a pull, or copy the result into ``out``.

        The version of the result becomes the client's last pulled version.
        """
        self._pulled, found = pulled
        if out is None or self._form == "object":
            return found[ONLY] if self._form == "tensor" else found
        for name, target in self._targets(out, list(found)).items():
            copy_of(found[name], {name: target}, name)
        return out

    def close(self) -> None:
        """Release the client's slot on the server. A later call connects the client again.

        Example:
            >>> import numpy as np
            >>> from flowchan.pipelines import ParameterServer
            >>> with ParameterServer(np.zeros(2), on="thread") as server:
            ...     client = server.client()
            ...     client.close()
            ...     client.pull()
            array([0., 0.])
        """
        if self._connection is not None and self._connection.is_open:
            self._connection.close()
        self._connection = None


def _writable(target: Any) -> Any:
    return target.detach() if hasattr(target, "detach") else target
