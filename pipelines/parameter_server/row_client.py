"""Define the client's methods that push or pull rows of a tensor, or encode tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from flowchan.items.text import shown
from flowchan.pipelines.parameter_server.block_updates import optimized
from flowchan.pipelines.parameter_server.encoded import Codes, Encoded, Encoder
from flowchan.pipelines.parameter_server.push_rules import Rule, check_rule, check_scale, check_value
from flowchan.pipelines.parameter_server.rows import checked_ids, summed
from flowchan.pipelines.parameter_server.server_connection import PushHandle
from flowchan.pipelines.parameter_server.tensor_layout import Entry, plain


class RowClient(ABC):
    """Base class of clients, with the methods for rows and codes.

    Args:
        entries: The server's tensors and slots by name.
    """

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = {name: entry for name, entry in entries.items() if not entry.slot}
        self._optimized, self._tables = optimized([name for name, entry in entries.items() if entry.slot])
        self._encoder = Encoder()

    @abstractmethod
    def _send_rows(
        self, table: str, ids: Any, values: Any, rule: Rule, scale: float, timeout: float | None
    ) -> PushHandle:
        """Send a push of rows."""

    @abstractmethod
    def _read_rows(self, table: str, ids: Any, at_least: int | None, timeout: float | None) -> Any:
        """Read rows of one version."""

    def encode(self, values: Mapping[str, Any], codes: Codes) -> dict[str, Encoded]:
        """Encode tensors without sending them, for example to gather the encodings of several workers.

        ``push`` accepts encoded tensors. A client keeps one code object per tensor while ``codes`` is the
        same object, because a code may store unsent elements. If a push raises an error, the client restores
        the attributes of its code objects.

        Args:
            values: Mapping from names to tensors.
            codes: ``"fp16"``, ``"bf16"``, ``"topk"``, ``"qsgd"``, a function that creates a
                :class:`~flowchan.collective.training.gradients.Code` for each tensor, or one ``Code``.

        Returns:
            The encoded tensors by name.

        Raises:
            TypeError: ``codes`` is a function that does not return a code.
            ValueError: ``codes`` is an unknown name.

        Example:
            >>> import torch
            >>> from flowchan.pipelines import ParameterServer
            >>> with ParameterServer({"w": torch.zeros(2)}, on="thread") as server:
            ...     client = server.client()
            ...     version = client.push(client.encode({"w": torch.tensor([1.0, 0.1])}, "topk")).wait()
            ...     client.pull()
            {'w': tensor([1., 0.])}
        """
        return self._encoder.encode({name: plain(value) for name, value in values.items()}, codes)

    def push_rows(
        self,
        table: str,
        ids: Any,
        values: Any,
        rule: Rule = "add",
        scale: float = 1.0,
        timeout: float | None = None,
    ) -> PushHandle:
        """Send rows of one tensor to the server, which applies a rule with these rows exactly once.

        The client sums the values of equal IDs, and sends only the summed rows.

        Args:
            table: Name of the tensor.
            ids: List, array or tensor of row numbers, starting at 0.
            values: Tensor with one row per ID.
            rule: ``"add"`` (default), ``"copy"``, ``"zero"``, ``"gradient"`` for a step of the table's
                :class:`RowOptimizer`, or a function ``(current rows, given rows) -> new rows``.
            scale: Factor that multiplies the values (default: 1).
            timeout: Maximum seconds to wait while the server's channel is full (default: no limit).

        Returns:
            The handle of the push.

        Raises:
            Closed: The server has shut down.
            IndexError: At least one of the IDs has no row in the table.
            KeyError: The server has no tensor with this name.
            TimeoutError: ``timeout`` expired. The rows were not sent.
            TypeError: ``ids``, ``values`` or ``rule`` has the wrong type.
            ValueError: ``values`` has the wrong shape, or the table has no optimizer for ``"gradient"``.

        Example:
            >>> import numpy as np
            >>> from flowchan.pipelines import ParameterServer
            >>> with ParameterServer({"users": np.zeros((3, 2))}, on="thread") as server:
            ...     client = server.client()
            ...     version = client.push_rows("users", [2, 0, 2], np.ones((3, 2))).wait()
            ...     client.pull_rows("users", [0, 2])
            array([[1., 1.],
                   [2., 2.]])
        """
        entry = self._table("push_rows", table)
        check_rule("push_rows", rule, table in self._tables)
        ids = checked_ids("push_rows", table, ids, entry.shape[0])
        if rule == "zero":
            return self._send_rows(table, summed(ids, ids)[0], 0, rule, 1.0, timeout)
        check_value("push_rows", "values", values, (len(ids), *entry.shape[1:]), entry.dtype)
        check_scale("push_rows", table, rule, scale, entry.dtype)
        return self._send_rows(table, *summed(ids, plain(values)), rule, float(scale), timeout)

    def pull_rows(
        self, table: str, ids: Any, *, at_least: int | None = None, timeout: float | None = None
    ) -> Any:
        """Copy rows of one tensor. All rows have the same version.

        Args:
            table: Name of the tensor.
            ids: List, array or tensor of row numbers, starting at 0.
            at_least: Wait for this or a later version (default: do not wait).
            timeout: Maximum seconds to wait (default: no limit).

        Returns:
            Tensor with one row per ID, in the order of the IDs.

        Raises:
            Closed: The server shut down before version ``at_least``.
            IndexError: At least one of the IDs has no row in the table.
            KeyError: The server has no tensor with this name.
            TimeoutError: ``timeout`` expired before the server reached version ``at_least``.
            TypeError: The IDs are not integers.

        Example:
            >>> import numpy as np
            >>> from flowchan.pipelines import ParameterServer
            >>> with ParameterServer({"users": np.arange(6).reshape(3, 2)}, on="thread") as server:
            ...     server.client().pull_rows("users", [2, 0])
            array([[4, 5],
                   [0, 1]])
        """
        rows = self._table("pull_rows", table).shape[0]
        return self._read_rows(table, checked_ids("pull_rows", table, ids, rows), at_least, timeout)

    def _table(self, call: str, name: Any) -> Entry:
        entry = self._entries.get(name)
        if entry is None or not entry.shape:
            known = ", ".join(repr(key) for key, one in self._entries.items() if one.shape) or "none"
            raise KeyError(
                f"{call}: table must be the name of a tensor with rows ({known}), got {shown(name)}"
            )
        return entry
