"""Implement the worker of one shard, which applies pushes in order.

Every push that is not dropped creates a new version, even if the push fails. All shards therefore have the
same versions. A shard keeps the versions v and v - 1. The worker overwrites version v - 1 only when all other
shards have version v. A client can therefore read the same version from all shards.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from flowchan import Broken, In, Out, WorkerDied, unpack, worker
from flowchan.items.codec import dumps_in_one
from flowchan.pipelines.parameter_server.block_updates import BlockUpdates, Changes
from flowchan.pipelines.parameter_server.push_rules import apply_to_object
from flowchan.pipelines.parameter_server.shard_memory import (
    APPLIED,
    DROPPED,
    FAILED,
    OpenShard,
    Record,
    ShardMemory,
)
from flowchan.pipelines.parameter_server.tensor_kinds import copy
from flowchan.pipelines.parameter_server.tensor_layout import pushed_size
from flowchan.pipelines.user_calls import call, reason

MAX_DEATHS = 8
"""Number of workers that may die while applying one push before the push fails."""


class Push(NamedTuple):
    """One push, sent as a channel item.

    Attributes:
        slot: Slot of the client.
        number: Sequence number of the push within its slot.
        at: Version on which the values are based, or None if unknown.
        max_staleness: Largest allowed number of versions between ``at`` and the current version, or None.
        rule: Name of the rule, or a packed function.
        scale: Factor that multiplies the values.
        values: Tensors by name, or the packed object.
        rows: IDs of the pushed rows, by table; None for whole tensors.
        size: Size of the values in bytes.
    """

    slot: int
    number: int
    at: int | None
    max_staleness: int | None
    rule: Any
    scale: float
    values: Any
    rows: Any
    size: int


def part_of(push: Push, names: Collection[str]) -> Push:
    """Return the part of a push that concerns the tensors of one shard."""
    values = {name: value for name, value in push.values.items() if name in names}
    return push._replace(values=values, size=pushed_size(values, push.rows))


class Shard:
    """State of one shard in its worker.

    Args:
        memories: Memory of all shards.
        number: Number of this shard, from 0.
        updates: Rules and optimizers of this shard.
        is_over: Function that returns whether the run has failed. Other shards then stop creating versions.
    """

    def __init__(
        self,
        memories: Sequence[ShardMemory],
        number: int,
        updates: BlockUpdates,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._updates, self._is_over = updates, is_over
        self._own = memories[number].opened()
        self._others = [memory.opened() for memory in memories if memory is not memories[number]]
        # None means that the stale parts are unknown. This is the case at the start, because a killed
        # predecessor may have left a half-written shadow block.
        self._stale: Changes | None = None

    def serve(self, pushes: Iterable[Push]) -> None:
        """Apply each push. A push stays on lease until the worker takes the next push."""
        for push in pushes:
            self._serve(push)
            del push  # drop its arrays, which refer to the channel's memory

    def _serve(self, push: Push) -> None:
        before = self._own.record()
        if (before.slot, before.push) == (push.slot + 1, push.number):
            # The previous worker applied this push before it was killed, so only report the outcome.
            self._own.report(before)
            return
        record = before._replace(slot=push.slot + 1, push=push.number)
        if push.at is not None:
            staleness = max(0, before.version - push.at)
            record = record._replace(
                staleness=record.staleness + staleness,
                stalest=max(record.stalest, staleness),
                measured=record.measured + 1,
            )
            if push.max_staleness is not None and staleness > push.max_staleness:
                self._end(record._replace(outcome=DROPPED, value=before.version, dropped=record.dropped + 1))
                return
        version = before.version + 1
        for other in self._others:
            self._await_version(other, before.version)
        shadow = self._own.open_shadow(version)
        try:
            record = self._changed(push, record, shadow)
        except Exception as error:
            self._own.store_error(record.failed, reason(error))
            self._refresh(shadow, before.version)
            if before.object_size:
                self._own.write_object(version, self._own.read_object(before))
            record = record._replace(
                version=version, outcome=FAILED, value=record.failed, failed=record.failed + 1
            )
        self._end(record)

    def _changed(self, push: Push, record: Record, shadow: dict[str, Any]) -> Record:
        """Apply a push to the shadow block, and return the record of the new version."""
        attempts = self._own.begin(push.slot, push.number)
        if attempts > MAX_DEATHS:
            raise WorkerDied(f"push: {MAX_DEATHS} server workers died while applying this push")
        version, rule = record.version + 1, push.rule
        rule = rule if isinstance(rule, str) else unpack(rule)
        new = record._replace(
            version=version,
            outcome=APPLIED,
            value=version,
            pushes=record.pushes + 1,
            bytes_in=record.bytes_in + push.size,
        )
        if not isinstance(push.values, Mapping):
            current = pickle.loads(self._own.read_object(record))
            contents = dumps_in_one(call(apply_to_object, rule, current, unpack(push.values), push.scale))
            self._own.write_object(version, contents)
            return new._replace(object_size=len(contents))
        current, self._stale, stale = self._own.blocks[record.version % 2], None, self._stale
        self._stale = call(
            self._updates.apply, rule, push.values, push.rows, push.scale, current, shadow, stale
        )
        return new

    def _refresh(self, shadow: dict[str, Any], version: int) -> None:
        """Copy a version into the shadow block."""
        for name, value in self._own.blocks[version % 2].items():
            copy(value, shadow[name])
        self._stale = {}

    def _end(self, record: Record) -> None:
        self._own.commit(record)
        self._own.report(record)

    def _await_version(self, other: OpenShard, version: int) -> None:
        while True:
            seen = other.wakeup.count
            if other.version >= version:
                return
            if self._is_over():
                raise Broken("the parameter server's run has ended")
            other.wakeup.wait(seen, 1.0)


class PushOrder:
    """Stage that sends all pushes to all shards in the same order.

    Args:
        names: Names of the tensors of each shard.
    """

    def __init__(self, names: Sequence[Sequence[str]]) -> None:
        self.names = [frozenset(share) for share in names]

    def __call__(self, pushes: In[Any], out: Out[Any]) -> None:
        """Send all pushes until the channel is closed."""
        for push in pushes:
            for shard, names in enumerate(self.names, 1):
                out.put((shard, part_of(push, names)))
            del push


class ShardStage:
    """Stage with one worker for each shard.

    Args:
        memories: Memory of each shard.
        updates: Rules and optimizers of each shard.
    """

    def __init__(self, memories: Sequence[ShardMemory], updates: Sequence[BlockUpdates]) -> None:
        self.memories, self.updates = tuple(memories), tuple(updates)

    def __call__(self, pushes: In[Any]) -> None:
        """Apply all pushes until the channel is closed."""
        number = worker().number - 1
        shard = Shard(self.memories, number, self.updates[number], lambda: bool(pushes.channel.broken))
        shard.serve(pushes)
