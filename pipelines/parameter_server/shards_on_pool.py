"""Manage the shards of a parameter server on the hosts of a pool, in the program that created the server.

A child process on a host keeps each shard (see ``shard_keeper``). The program sends only the order of the
calls. The tensors go directly between the clients and the keepers.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from flowchan import Broken, Channel, ChannelError, ChildDied, Closed, Drained, Empty, Graph, In, StageError
from flowchan.hosts import Pool
from flowchan.hosts.pool_channels import channel_maker, reach_of
from flowchan.pipelines.children import Children
from flowchan.pipelines.children import start as start_children
from flowchan.pipelines.parameter_server.call_order import CallOrder, KeeperOrder, Notice
from flowchan.pipelines.parameter_server.parameter_client import ParameterClient
from flowchan.pipelines.parameter_server.pool_client import PoolConnection, ShardPlace
from flowchan.pipelines.parameter_server.server_connection import late_after, left_until
from flowchan.pipelines.parameter_server.shard_keeper import ShardState, keep_shard
from flowchan.pipelines.parameter_server.tensor_layout import Entry, Form

WAITING = 1024
"""Capacity of the channels of notices and orders, which carry only small messages."""

POLL_INTERVAL_S = 0.5
"""Seconds between two checks by a stage of a graph whether a shard is lost."""


class ShardsOnPool:
    """The keepers of all shards, and the thread that orders the clients' calls.

    Args:
        name: Name of the server.
        pool: Pool whose hosts keep the shards.
        makers: Function for each shard that creates a server with only this shard.
        names: Names of the tensors and slots of each shard.
        form: Kind of the server's state.
        entries: Tensors and slots of all shards.

    Raises:
        Broken: A host was lost while the shards started.
        HostError: A host of the pool cannot be used.
    """

    def __init__(
        self,
        name: str,
        pool: Pool,
        makers: Sequence[Callable[[], Any]],
        names: Sequence[frozenset[str]],
        form: Form,
        entries: tuple[Entry, ...],
    ) -> None:
        self._name, make = name, channel_maker(pool)
        self._notices: Channel[Notice] = make(WAITING)
        self._orders: list[Channel[KeeperOrder]] = [make(WAITING) for _ in makers]
        self._ended: Channel[None] = make(1)
        self._kids = start_children(len(makers), on=pool)
        self._lost: list[str] = []  # a stored error would keep its traceback alive
        self._over = False
        try:
            for number, (kid, make_server) in enumerate(zip(self._kids, makers, strict=True)):
                kid.run(keep_shard, number, make_server, self._orders[number], self._notices, reach_of(pool))
            self.places: tuple[ShardPlace, ...] = tuple(
                ShardPlace(name, number, kid.host, shard, kid.receive(), self._ended)
                for number, (kid, shard) in enumerate(zip(self._kids, names, strict=True))
            )
        except BaseException:
            self._kids.close()
            raise
        self._ordering = threading.Thread(target=_order, args=(self._notices, self._orders), daemon=True)
        channels = [self._ended, self._notices, *self._orders]
        self._watching = threading.Thread(
            target=_watch, args=(self._kids, self.places, channels, self._lost), daemon=True
        )
        for thread in (self._ordering, self._watching):
            thread.name = "flowchan parameters"
            thread.start()
        self._form: Form = form
        self._entries = entries
        self._clients: weakref.WeakSet[ParameterClient] = weakref.WeakSet()
        self._client = self.client()
        self._last: list[ShardState] | None = None

    def join_graph(self, graph: Graph) -> None:
        """Add a stage to a graph that closes the server after all other stages have ended."""
        inbox: Channel[Any] = Channel(1, across="processes")
        ended: Channel[None] = Channel(1, across="processes")
        pushes = graph.input(f"{self._name} pushes", capacity=1)
        graph._serve(inbox, ended, inbox.close)
        graph.stage(CloseAtEnd(self), pushes, name=self._name)
        graph._serve(inbox, ended, inbox.close)
        hosts = ", ".join(dict.fromkeys(place.host for place in self.places))
        graph._drawn |= {self._name: f"tensors of all clients\non {hosts}", f"{self._name} pushes": None}
        weakref.finalize(graph, self.end)  # ends the server of a graph that never runs

    def client(self) -> ParameterClient:
        """Create a client.

        Returns:
            The client.

        Raises:
            Closed: The server was closed.
        """
        if self._over:
            raise Closed("client: the parameter server has shut down")
        connect = functools.partial(PoolConnection, self.places)
        client = ParameterClient(self._form, self._entries, connect)
        self._clients.add(client)
        return client

    @property
    def is_lost(self) -> bool:
        """Return whether a shard is lost."""
        return bool(self._lost)

    def states(self) -> list[ShardState]:
        """Return the counters of each shard. After ``close``, these are the last ones."""
        if self._over and self._last is None:
            raise Broken(self._lost[0]) if self._lost else Closed("stats: the parameter server has shut down")
        return self._connected().states() if self._last is None else self._last

    def pull(self, names: Sequence[str]) -> tuple[int, dict[str, Any]]:
        """Return the version, and copies of the named tensors and slots."""
        if self._over:
            raise Closed("save: the parameter server has shut down")
        version, found, _ = self._connected().copy(names, None, None, True, None)
        return version, found

    def _connected(self) -> PoolConnection:
        found = self._client._connected()
        assert isinstance(found, PoolConnection)
        return found

    def close(self, timeout: float | None = None) -> None:
        """Perform all calls that the keepers have received, and end the keepers.

        Args:
            timeout: Maximum seconds to wait (default: no limit).

        Raises:
            Broken: A shard is lost.
            TimeoutError: ``timeout`` expired.
        """
        if self._over:
            return
        late = late_after(timeout)
        try:
            for client in list(self._clients):
                connection = client._connection
                if isinstance(connection, PoolConnection) and connection.is_open:
                    connection.flush(late)
            self._client.close()
            with contextlib.suppress(ChildDied, StageError, Closed):  # some may have ended
                self._kids.send("close", left_until(late))
            self._last = list(self._kids.wait(left_until(late)).values())
        except (ChildDied, StageError):
            # Let the watching thread break the channels with the reason before ``end`` closes them.
            self._watching.join()
        except TimeoutError:
            raise TimeoutError(
                f"close: the shards did not apply all pushes within {timeout:g} s; call close again"
            ) from None
        self.end()
        if self._lost:
            raise Broken(self._lost[0])

    def end(self) -> None:
        """End the keepers and the threads, and release the channels. Further calls have no effect."""
        if self._over:
            return
        self._over = True
        self._client.close()
        self._ended.close()
        self._kids.close()
        channels: list[Channel[Any]] = [self._notices, *self._orders]
        for channel in channels:
            channel.close()
        self._ordering.join()
        self._watching.join()
        del self._client, self._kids, self._notices, self._orders, self._ended
        self.places = ()


class CloseAtEnd:
    """Stage that closes a server on a pool at the end of a graph.

    Args:
        shards: Shards of the server.
    """

    def __init__(self, shards: ShardsOnPool) -> None:
        self._shards = shards

    def __call__(self, pushes: In[Any]) -> None:
        """Wait until a shard is lost or the run closes the channel, which never carries a push.

        Args:
            pushes: Channel of the run.

        Raises:
            Broken: A shard is lost.
        """
        try:
            while not self._shards.is_lost:
                try:
                    pushes.get(POLL_INTERVAL_S)
                except Empty:
                    continue
                except Drained:
                    break
            self._shards.close()
        finally:
            self._shards.end()


def _order(notices: Channel[Notice], orders: Sequence[Channel[KeeperOrder]]) -> None:
    """Send the keepers the order of the calls until a channel is closed or broken."""
    sequence = CallOrder(len(orders))
    with contextlib.suppress(ChannelError):
        for notice in notices:
            for order in sequence.after(notice):
                for channel in orders:
                    channel.put(order)


def _watch(
    kids: Children, places: Sequence[ShardPlace], channels: Sequence[Channel[Any]], lost: list[str]
) -> None:
    """Wait until the keepers end. If a keeper dies, break the channels, so that all pending calls fail."""
    try:
        kids.wait()
    except (ChildDied, StageError) as error:
        child = error.number if isinstance(error, ChildDied) else int(error.worker.rpartition(" ")[2])
        _, _, how = str(error).removeprefix(f"wait: child {child} ").rpartition("') ")
        reason = str(places[child - 1].lost("ParameterServer", how))
        for channel in channels:
            channel.abort(Broken(reason))
        lost.append(reason)  # only now, because the other keepers may then end
    except Exception:  # the program has closed the keepers
        pass
