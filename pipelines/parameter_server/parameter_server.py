"""Implement the parameter server, which stores tensors that many workers push to and pull from."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flowchan import Channel, Graph, Run, Stream
from flowchan.declare.placements import Placement, PlacementOption, placement_argument
from flowchan.hosts import Pool
from flowchan.items.arguments import refuses_misspelt, text, whole
from flowchan.items.codec import dumps_in_one
from flowchan.items.text import shown
from flowchan.pipelines.parameter_server.block_updates import BlockUpdates, updates_of_shards
from flowchan.pipelines.parameter_server.optimizer_state import Factory
from flowchan.pipelines.parameter_server.parameter_client import ParameterClient
from flowchan.pipelines.parameter_server.remote_client import Entrance
from flowchan.pipelines.parameter_server.rows import RowOptimizer
from flowchan.pipelines.parameter_server.server_connection import LocalAccess, late_after, left_until
from flowchan.pipelines.parameter_server.shard import Push, PushOrder, ShardStage
from flowchan.pipelines.parameter_server.shard_memory import OpenShard, ShardMemory
from flowchan.pipelines.parameter_server.shards_on_pool import ShardsOnPool
from flowchan.pipelines.parameter_server.stored import StoredState, check_slots, load_state, save_state
from flowchan.pipelines.parameter_server.tensor_layout import (
    ONLY,
    Form,
    Layout,
    form_of,
    layout_of,
    named,
    plain,
    shared_out,
)
from flowchan.public import public

CAPACITY = 16
"""Maximum number of pushes that wait in the server's channel."""
LEAST_ROOM = 64 << 20
"""Memory in bytes for waiting pushes, in addition to three pushes of the whole state."""
RESTARTS = 1000
"""Maximum number of dead workers that the server replaces within 60 seconds."""


@public
@dataclass(frozen=True, slots=True)
class ParameterServerStats:
    """Statistics of a parameter server, from ``ParameterServer.stats()``.

    Attributes:
        version: Current version, which grows by one with each push that is not dropped.
        pushes: Number of applied pushes.
        pulls: Number of pulls by all clients.
        dropped: Number of pushes that the server dropped because they were too old.
        failed: Number of pushes whose rule raised an error.
        mean_staleness: Mean staleness of the pushes, in versions (see ``max_staleness`` of ``push``).
        max_staleness: Largest staleness of a push, in versions.
        bytes_in: Bytes of all applied pushes.
        bytes_out: Bytes of all pulls.
        queued: Number of pushes that wait for the server.

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


@public
class ParameterServer:
    """Tensors that many workers push to and pull from, from any process or host.

    The server applies each push exactly once, even if server workers are killed. A pull returns all tensors
    at the same version. A client reads tensors on its own machine from shared memory. A client requests
    tensors on other hosts from the program that created the server. If the server runs on a pool, clients
    request tensors from the hosts of the shards instead.

    Args:
        tensors: Mapping from names to tensors or arrays (such as ``model.state_dict()``), one tensor or
            array, or any picklable object. The server makes a copy.
        shards: Number of server workers, called shards (default: 1). Each tensor belongs to one shard. An
            object requires a single shard.
        on: Where the server's workers run: ``"process"`` (default), ``"thread"``, or a pool from
            ``flowchan.hosts``. The shards are assigned to the pool's hosts in turn.
        optimizer: Function that creates a ``torch.optim.Optimizer`` for a list of parameters. Each push with
            the rule ``"gradient"`` takes a step of this optimizer (default: none).
        rows: Mapping from table names to a :class:`RowOptimizer`, for tables that get gradients from
            ``push_rows`` (default: none).
        graph: Graph that gets the server as a stage. The server ends when all other stages have ended, and
            the graph can run only once. Without a graph, ``close()`` ends the server. A server on a pool
            starts immediately, even with a graph.
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
        placement = _checked_placement(on)
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
        self._layouts = layouts = [
            layout_of({key: values[key] for key in share}, one.slots)
            for share, one in zip(shares, updates, strict=True)
        ]
        self._run: Run | None = None
        self._is_in_graph = graph is not None
        self._pool_shards: ShardsOnPool | None = None
        if isinstance(placement, Pool):
            given = stored or (tensors if self._form == "object" else values)
            self._pool_shards = pooled = self._started_on(placement, given, updates, optimizer, rows or {})
            if graph is None:
                weakref.finalize(self, pooled.end)
            else:
                pooled.join_graph(graph)
            return
        self._memories = [ShardMemory(layout) for layout in layouts]
        self._shards = _filled(self._memories, values, contents, updates, stored)
        # Limit the waiting pushes, so that a large push can reuse memory that the server has already read.
        # This is faster than using new memory.
        size = sum(memory.layout.size for memory in self._memories)
        room = None if self._form == "object" else 3 * size + LEAST_ROOM
        self._inbox: Channel[Push] = Channel(CAPACITY, across="processes", max_bytes=room)
        self._ended: Channel[None] = Channel(1, across="processes")
        self._access = LocalAccess(tuple(self._memories), self._inbox, self._ended)
        entries = tuple(entry for layout in layouts for entry in layout.entries)
        client = functools.partial(ParameterClient, self._form, entries)
        self._entrance = Entrance(self._access, functools.partial(client, self._access))
        self._new_client = functools.partial(client, self._entrance)
        if graph is None:
            self._declare(own := Graph(name), shares, updates, on)
            self._run = own.start()
            self._finalizer = weakref.finalize(self, self._inbox.close)
        else:  # the graph ends the server, even if the program keeps only clients
            self._declare(graph, shares, updates, on)

    def _started_on(
        self,
        pool: Pool,
        given: Any,
        updates: Iterable[BlockUpdates],
        optimizer: Factory | None,
        rows: Mapping[str, RowOptimizer],
    ) -> ShardsOnPool:
        """Start a shard on a host for each part of the tensors, and return the shards."""
        if isinstance(given, StoredState):
            check_slots(given.slots, {key: value for one in updates for key, value in one.slots.items()})
        names = [frozenset(layout.names) for layout in self._layouts]
        parts = [_part(given, self._form, layout) for layout in self._layouts]
        makers = [
            functools.partial(
                ParameterServer, part, optimizer=optimizer, name=self.name,
                rows={table: rows[table] for table in rows if table in known},
            )
            for part, known in zip(parts, names, strict=True)
        ]  # fmt: skip
        entries = tuple(entry for layout in self._layouts for entry in layout.entries)
        return ShardsOnPool(self.name, pool, makers, names, self._form, entries)

    def _declare(
        self, graph: Graph, shares: list[list[str]], updates: list[BlockUpdates], on: PlacementOption
    ) -> None:
        ends = self._inbox, self._ended, self._entrance.start_close
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
        """Create a client, which can be sent to any process or host.

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
        if self._pool_shards is not None:
            return self._pool_shards.client()
        return self._new_client()

    def stats(self) -> ParameterServerStats:
        """Return the server's statistics.

        Returns:
            The statistics.

        Example:
            >>> import numpy as np
            >>> from flowchan.pipelines import ParameterServer
            >>> with ParameterServer(np.zeros(2), on="thread") as server:
            ...     server.stats().version
            0
        """
        if self._pool_shards is None:
            records, queued = [shard.record() for shard in self._shards], len(self._inbox)
            pulls, bytes_out = self._shards[0].pulls()
        else:
            states = self._pool_shards.states()
            records, queued = [state.record for state in states], states[0].queued
            pulls, bytes_out = states[0].pulls, states[0].bytes_out
        first = min(records, key=lambda record: record.version)
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
            queued=queued,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tensors and the state of the optimizers, all at one version, to a file.

        The file has the safetensors format. ``save`` replaces an existing file atomically. If the program is
        killed during the call, the existing file stays intact.

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
                f"{self!r}: save requires tensors, but the server holds an object; pull the object and "
                "pickle it"
            )
        entries = {entry.name: entry for layout in self._layouts for entry in layout.entries}
        if self._pool_shards is not None:
            version, found = self._pool_shards.pull(list(entries))
        else:
            connection = self._access()
            try:
                version, found, _ = connection.copy(list(entries), None, None, True, None)
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
        """Start a server with the version, the tensors and the optimizer state from a file.

        ``load`` also reads safetensors files written by other programs. The server then starts with
        version 0.

        Args:
            path: Path of the file.
            shards: As for ``ParameterServer``. The number of shards may differ from the saved server's.
            on: As for ``ParameterServer``.
            optimizer: Same optimizer as for the saved server (default: none).
            rows: Same row optimizers as for the saved server (default: none).
            graph: As for ``ParameterServer``.
            name: As for ``ParameterServer``.

        Returns:
            The server.

        Raises:
            ImportError: The package safetensors is not installed.
            OSError: The file cannot be read.
            ValueError: ``optimizer`` or ``rows`` differs from the saved server's.

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
        """Apply all pushes that were sent so far, and then end the server. Further calls have no effect.

        Do not close a server that was created with ``graph=``, because the graph ends the server.

        Args:
            timeout: Maximum seconds to wait (default: no limit).

        Raises:
            Broken: A host that kept a shard was lost.
            RunError: The server failed.
            RuntimeError: The server is a stage of a user's graph.
            TimeoutError: ``timeout`` expired. The server continues to apply the pushes.

        Example:
            >>> import numpy as np
            >>> from flowchan.pipelines import ParameterServer
            >>> server = ParameterServer(np.zeros(2))
            >>> server.close()
        """
        if self._is_in_graph:
            raise RuntimeError(
                f"{self!r}: close must not be called on a stage of a graph; the graph ends the server"
            )
        if self._pool_shards is not None:
            self._pool_shards.close(timeout)
            return
        assert self._run is not None
        late = late_after(timeout)
        try:
            self._entrance.close(timeout)
        except TimeoutError:
            raise TimeoutError(
                f"close: the server did not apply all pushes within {timeout:g} s; call close again"
            ) from None
        self._run.wait(left_until(late))
        self._entrance.join()

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_in_graph:
            self.close()

    def __repr__(self) -> str:
        if self._pool_shards is not None:
            return f"<ParameterServer {self.name!r}, on {len(self._layouts)} hosts>"
        return f"<ParameterServer {self.name!r}, version {self._shards[0].version}>"


def _checked_placement(on: PlacementOption) -> Placement:
    """Return the placement, or raise an error if a server cannot run there."""
    placement = placement_argument("ParameterServer", on)
    if placement.is_remote and not isinstance(placement, Pool):
        raise ValueError(
            f"ParameterServer: on must be 'process', 'thread' or a pool from flowchan.hosts, got {shown(on)}"
        )
    return placement


def _part(given: Any, form: Form, layout: Layout) -> Any:
    """Return one shard's part of the given values: tensors by name, an object, or the state from a file."""
    if isinstance(given, StoredState):
        tensors = {name: value for name, value in given.tensors.items() if name in layout.names}
        slots = {name: value for name, value in given.slots.items() if name in layout.names}
        return StoredState(given.version, tensors, slots, given.single)
    if form != "mapping":
        return given[ONLY] if form == "tensor" else given
    return {name: value for name, value in given.items() if name in layout.names}


def _filled(
    memories: Iterable[ShardMemory],
    values: Mapping[str, Any],
    contents: bytes,
    updates: Iterable[BlockUpdates],
    stored: StoredState | None,
) -> list[OpenShard]:
    """Open each shard's memory, and store the first version, which is new or comes from a file."""
    slots = {name: value for one in updates for name, value in one.slots.items()}
    if stored is not None:
        check_slots(stored.slots, slots)
        slots = stored.slots
    shards = [memory.opened() for memory in memories]
    for shard in shards:
        given = {name: (slots if name in slots else values)[name] for name in shard.memory.layout.names}
        shard.fill(given, contents, 0 if stored is None else stored.version)
    return shards
