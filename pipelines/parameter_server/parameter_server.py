"""Parameter server: tensors that many workers push to and pull from."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flowchan import Channel, Graph, Run, Stream
from flowchan.declare.placements import PlacementOption, placement_argument
from flowchan.items.arguments import refuses_misspelt, text, whole
from flowchan.items.codec import dumps_in_one
from flowchan.items.text import shown
from flowchan.pipelines.parameter_server.block_updates import BlockUpdates, updates_of_shards
from flowchan.pipelines.parameter_server.optimizer_state import Factory
from flowchan.pipelines.parameter_server.parameter_client import ParameterClient
from flowchan.pipelines.parameter_server.remote_client import Entrance
from flowchan.pipelines.parameter_server.rows import RowOptimizer
from flowchan.pipelines.parameter_server.server_connection import ServerConnection
from flowchan.pipelines.parameter_server.shard import Push, PushOrder, ShardStage
from flowchan.pipelines.parameter_server.shard_memory import OpenShard, ShardMemory
from flowchan.pipelines.parameter_server.stored import StoredState, check_slots, load_state, save_state
from flowchan.pipelines.parameter_server.tensor_layout import (
    form_of,
    layout_of,
    named,
    plain,
    shared_out,
)

CAPACITY = 16
"""Maximum number of pushes that wait for the server."""
LEAST_ROOM = 64 << 20
"""Bytes of pushes that may wait for the server, in addition to three pushes of the whole state."""
RESTARTS = 1000
"""Maximum number of replacements of dead workers within 60 seconds."""


@dataclass(frozen=True, slots=True)
class ParameterServerStats:
    """Statistics of a parameter server, from ``ParameterServer.stats()``.

    Attributes:
        version: Current version: the number of pushes that were not dropped.
        pushes: Pushes that were applied.
        pulls: Pulls of all clients.
        dropped: Pushes that were too old.
        failed: Pushes whose rule raised an error.
        mean_staleness: Mean number of versions between the computation of a push and its application.
        max_staleness: Largest such number.
        bytes_in: Bytes that were pushed and applied.
        bytes_out: Bytes that were pulled.
        queued: Pushes that wait for the server.

    Example:
        >>> import numpy as np
        >>> from flowchan.pipelines import ParameterServer
        >>> with ParameterServer(np.zeros(2), on="thread") as server:
        ...     version = server.client().push(np.ones(2)).wait()
        ...     stats = server.stats()
        >>> stats.version, stats.pushes, stats.bytes_in
        (1, 1, 16)
    """

    version: int
    pushes: int
    pulls: int
    dropped: int
    failed: int
    mean_staleness: float
    max_staleness: int
    bytes_in: int
    bytes_out: int
    queued: int


class ParameterServer:
    """Tensors that many workers push to and pull from, from any process or host.

    Each push is applied exactly once, even if workers of the server are killed. A pull returns one version of
    all tensors. A client on the server's machine reads the tensors without asking the server; a client on
    another host asks the program that has the server.

    Args:
        tensors: Mapping from names to tensors or arrays (such as ``model.state_dict()``), one tensor or
            array, or any picklable object. The server copies it.
        shards: Number of workers among which whole tensors are distributed (default: 1). An object cannot be
            distributed.
        on: ``"process"`` (default) or ``"thread"``.
        optimizer: Function that creates a ``torch.optim.Optimizer`` for a list of parameters. The server
            uses it for pushes with the rule ``"gradient"`` (default: none).
        rows: A :class:`RowOptimizer` for each tensor whose rows get gradients by ``push_rows``, by name.
        graph: Graph in which the server is a stage; it ends when all other stages have ended. The graph can
            run once. Default: the server has its own run, which ``close()`` ends.
        name: Name of the stage (default: ``"parameters"``).

    Raises:
        TypeError: The object cannot be pickled, or an argument has the wrong type.
        ValueError: ``shards`` is out of range.

    Example:
        >>> import numpy as np
        >>> from flowchan.pipelines import ParameterServer, map
        >>> def work(client, worker):
        ...     return client.push({"w": np.full(2, worker)}).wait()
        >>> with ParameterServer({"w": np.zeros(2, int)}) as server:
        ...     versions = map(3, work, server.client(), on="process").join()
        ...     sorted(versions), server.client().pull()
        ([1, 2, 3], {'w': array([6, 6])})
    """

    @refuses_misspelt("ParameterServer")
    def __init__(
        self,
        tensors: Any,
        *,
        shards: int = 1,
        on: PlacementOption = "process",
        optimizer: Factory | None = None,
        rows: Mapping[str, RowOptimizer] | None = None,
        graph: Graph | None = None,
        name: str = "parameters",
    ) -> None:
        whole("ParameterServer", "shards", shards, 1)
        text("ParameterServer", "name", name)
        placement = placement_argument("ParameterServer", on)
        if placement.hosts or placement.nowhere:
            raise ValueError(
                f"ParameterServer: on must be 'process' or 'thread', got {shown(on)}; clients may be on any "
                "host, but the server is on the machine of its program"
            )
        stored = tensors if isinstance(tensors, StoredState) else None
        tensors = tensors if stored is None else stored.given
        self.name, self._form = name, form_of(tensors)
        values = {key: plain(value) for key, value in named(tensors, self._form).items()}
        if shards > max(1, len(values)):
            raise ValueError(
                f"ParameterServer: shards must be at most the number of tensors ({max(1, len(values))}), got "
                f"{shards}"
            )
        contents = dumps_in_one(tensors) if self._form == "object" else b""
        shares = shared_out(values, shards)
        updates = updates_of_shards(values, shares, optimizer, rows or {})
        self._memories = [
            ShardMemory(layout_of({key: values[key] for key in share}, one.slots))
            for share, one in zip(shares, updates, strict=True)
        ]
        self._shards = _filled(self._memories, values, contents, updates, stored)
        # A push of a large state uses memory that the server has read, because new memory takes longer.
        size = sum(memory.layout.size for memory in self._memories)
        room = None if self._form == "object" else 3 * size + LEAST_ROOM
        self._inbox: Channel[Push] = Channel(CAPACITY, across="processes", max_bytes=room)
        self._ended: Channel[None] = Channel(1, across="processes")
        self._run: Run | None = None
        if graph is None:
            self._declare(own := Graph(name), shares, updates, on)
            self._run = own.start()
            self._finalizer = weakref.finalize(self, self._inbox.close)
        else:  # the graph ends the server, also if the program keeps only its clients
            self._declare(graph, shares, updates, on)
        self._new_client = functools.partial(
            ParameterClient, self._form, self._memories, self._inbox, self._ended
        )
        self._entrance = Entrance(self._new_client)

    def _declare(
        self, graph: Graph, shares: list[list[str]], updates: list[BlockUpdates], on: PlacementOption
    ) -> None:
        ends = self._inbox, self._ended
        pushes: Stream[Any] = graph.input(f"{self.name} pushes", capacity=CAPACITY)
        graph._serve(*ends)
        if len(shares) > 1:
            pushes = graph.stage(PushOrder(shares), pushes, name=f"{self.name} order", capacity=CAPACITY)
            graph._serve(*ends)
        graph.stage(
            ShardStage(self._memories, updates), pushes, name=self.name, on=on, workers=len(shares),
            per_worker="pushes" if len(shares) > 1 else (), restartable=True, restarts=RESTARTS,
        )  # fmt: skip
        graph._serve(*ends)
        hidden = (f"{self.name} pushes", f"{self.name} order")
        graph._drawn |= {self.name: "tensors of all clients", **dict.fromkeys(hidden)}

    def client(self) -> ParameterClient:
        """Return a new client, which can be passed to any process or host.

        Returns:
            The client.

        Example:
            >>> from flowchan.pipelines import ParameterServer
            >>> with ParameterServer({"step": 0, "notes": []}, on="thread") as server:
            ...     client = server.client()
            ...     version = client.push(
            ...         "begun", rule=lambda state, note: {**state, "notes": [*state["notes"], note]}
            ...     ).wait()
            ...     client.pull()
            {'step': 0, 'notes': ['begun']}
        """
        client = self._new_client()
        client._entrance = self._entrance
        return client

    def stats(self) -> ParameterServerStats:
        """Return the statistics of the server.

        Returns:
            The statistics.

        Example:
            >>> import numpy as np
            >>> from flowchan.pipelines import ParameterServer
            >>> with ParameterServer(np.zeros(2), on="thread") as server:
            ...     server.stats().version
            0
        """
        records = [shard.record() for shard in self._shards]
        first = min(records, key=lambda record: record.version)
        pulls, bytes_out = self._shards[0].pulls()
        return ParameterServerStats(
            version=first.version,
            pushes=first.pushes,
            pulls=pulls,
            dropped=first.dropped,
            failed=max(record.failed for record in records),
            mean_staleness=first.staleness / first.measured if first.measured else 0.0,
            max_staleness=first.stalest,
            bytes_in=sum(record.bytes_in for record in records),
            bytes_out=bytes_out,
            queued=len(self._inbox),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one version of the tensors, and the state of the optimizers, to a file.

        The format is that of safetensors. The file is replaced at once, so a program that is killed leaves
        the old file.

        Args:
            path: Path of the file.

        Raises:
            ImportError: The package safetensors is not installed.
            TypeError: The server holds an object instead of tensors.

        Example:
            >>> import os, tempfile
            >>> import numpy as np
            >>> from flowchan.pipelines import ParameterServer
            >>> path = os.path.join(tempfile.mkdtemp(), "server.safetensors")
            >>> with ParameterServer({"w": np.ones(2)}, on="thread") as server:
            ...     server.save(path)
            >>> with ParameterServer.load(path, on="thread") as server:
            ...     server.client().pull()
            {'w': array([1., 1.])}
        """
        if self._form == "object":
            raise TypeError(
                f"{self!r}: save requires tensors, but the server holds an object; pull and pickle it"
            )
        entries = {entry.name: entry for memory in self._memories for entry in memory.layout.entries}
        connection = ServerConnection(self._memories, self._inbox, self._ended)
        try:
            version, found, _ = connection.pull(list(entries), None, consistent=True)
        finally:
            connection.close()
        slots = {name: found.pop(name) for name, entry in entries.items() if entry.slot}
        save_state(path, StoredState(version, found, slots, self._form == "tensor"))

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        shards: int = 1,
        on: PlacementOption = "process",
        optimizer: Factory | None = None,
        rows: Mapping[str, RowOptimizer] | None = None,
        graph: Graph | None = None,
        name: str = "parameters",
    ) -> ParameterServer:
        """Start a server with the version, the tensors and the state of optimizers from a file.

        A file of another program gives the first tensors of a new server.

        Args:
            path: Path of the file.
            shards: As for ``ParameterServer``. The number may differ from that of the saved server.
            on: As for ``ParameterServer``.
            optimizer: The optimizer of the saved server (default: none).
            rows: The row optimizers of the saved server (default: none).
            graph: As for ``ParameterServer``.
            name: As for ``ParameterServer``.

        Returns:
            The server.

        Raises:
            ImportError: The package safetensors is not installed.
            OSError: The file cannot be read.
            ValueError: ``optimizer`` or ``rows`` differ from those of the saved server.

        Example:
            >>> import os, tempfile
            >>> import numpy as np
            >>> from flowchan.pipelines import ParameterServer
            >>> path = os.path.join(tempfile.mkdtemp(), "server.safetensors")
            >>> with ParameterServer({"w": np.zeros(2)}, on="thread") as server:
            ...     version = server.client().push({"w": np.ones(2)}).wait()
            ...     server.save(path)
            >>> with ParameterServer.load(path, on="thread") as server:
            ...     client = server.client()
            ...     client.pull(), client.version
            ({'w': array([1., 1.])}, 1)
        """
        return cls(
            load_state(path), shards=shards, on=on, optimizer=optimizer, rows=rows, graph=graph, name=name
        )

    def close(self, timeout: float | None = None) -> None:
        """Apply all pushes that were sent, and end the server. Further calls have no effect.

        A server in a user's graph ends with the other stages, so do not close it.

        Args:
            timeout: Maximum seconds to wait (default: no limit).

        Raises:
            RunError: The server has failed.
            RuntimeError: The server is a stage of a user's graph.
            TimeoutError: ``timeout`` expired. The server still applies the pushes.

        Example:
            >>> import numpy as np
            >>> from flowchan.pipelines import ParameterServer
            >>> server = ParameterServer(np.zeros(2))
            >>> server.close()
        """
        if self._run is None:
            raise RuntimeError(
                f"{self!r}: close must not be called for a stage of a graph; it ends with the graph"
            )
        self._entrance.close()
        self._inbox.close()
        self._run.wait(timeout)

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._run is not None:
            self.close()

    def __repr__(self) -> str:
        return f"<ParameterServer {self.name!r}, version {self._shards[0].version}>"


def _filled(
    memories: Iterable[ShardMemory],
    values: Mapping[str, Any],
    contents: bytes,
    updates: Iterable[BlockUpdates],
    stored: StoredState | None,
) -> list[OpenShard]:
    """Open each shard's memory and store its first version, or the state that was loaded from a file."""
    slots = {name: value for one in updates for name, value in one.slots.items()}
    if stored is not None:
        check_slots(stored.slots, slots)
        slots = stored.slots
    shards = [memory.opened() for memory in memories]
    for shard in shards:
        given = {name: (slots if name in slots else values)[name] for name in shard.memory.layout.names}
        shard.fill(given, contents, 0 if stored is None else stored.version)
    return shards
