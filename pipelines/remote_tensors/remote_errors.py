"""Define the exceptions that operations on remote tensors raise."""

from __future__ import annotations

from flowchan import FlowchanError
from flowchan.public import public


@public
class RemoteError(FlowchanError):
    """Raised when a remote operation has failed. ``__cause__`` is the exception that the node raised.

    The message contains the node's traceback and the line of the program that issued the operation.

    Attributes:
        operation: Name of the operator, such as ``aten::mm``.
        node: Number of the node in its ``RemoteNodes``.

    Example:
        >>> import torch
        >>> from flowchan.pipelines import RemoteError, RemoteNodes
        >>> with RemoteNodes(1) as nodes:
        ...     x = torch.ones(3, dtype=torch.int64, device=nodes[0])
        ...     total = (x // 0).sum()
        ...     try:
        ...         total.item()
        ...     except RemoteError as error:
        ...         print(error.operation, type(error.__cause__).__name__)
        aten::floor_divide RuntimeError
    """

    def __init__(self, message: str, *, operation: str = "", node: int = 0) -> None:
        super().__init__(message)
        self.operation, self.node = operation, node


@public
class NodeDied(RemoteError):
    """A node died: it was killed, it crashed, or its host was lost.

    Attributes:
        operation: Name of the first operator that may not have finished.
        node: Number of the node in its ``RemoteNodes``.
        host: Name of the node's host; empty on the program's machine.
        pid: Process ID on that host; 0 if unknown.
        signal: Number of the signal that killed the node; ``None`` without a signal or if it is unknown.
        exitcode: Exit code of the node; ``None`` if a signal killed it or the code is unknown.

    Example:
        >>> import os, signal, torch
        >>> from flowchan.pipelines import NodeDied, RemoteNodes
        >>> with RemoteNodes(2) as nodes:
        ...     x, y = torch.ones(3, device=nodes[0]), torch.ones(3, device=nodes[1])
        ...     os.kill(nodes.stats()[0].pid, signal.SIGKILL)
        ...     try:
        ...         x.tolist()
        ...     except NodeDied as error:
        ...         print(error.node, error.signal, y.tolist())
        0 9 [1.0, 1.0, 1.0]
    """

    def __init__(
        self,
        message: str,
        *,
        operation: str = "",
        node: int = 0,
        host: str = "",
        pid: int = 0,
        signal: int | None = None,
        exitcode: int | None = None,
    ) -> None:
        super().__init__(message, operation=operation, node=node)
        self.host, self.pid = host, pid
        self.signal, self.exitcode = signal, exitcode
