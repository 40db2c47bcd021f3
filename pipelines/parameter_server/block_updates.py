"""Apply pushes to the shadow block of a shard.

A shard has two blocks, the current one and the shadow. Each block contains the shard's tensors and the slots
of its optimizers. The two blocks differ only in the *changes* of the last push. For each push, the worker
first copies these changes into the shadow block, and then applies the push's rule there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, MutableMapping
from typing import Any

from flowchan.items.text import shown
from flowchan.pipelines.parameter_server.encoded import Encoded
from flowchan.pipelines.parameter_server.optimizer_state import Factory, OptimizerState
from flowchan.pipelines.parameter_server.push_rules import Rule, apply
from flowchan.pipelines.parameter_server.rows import (
    RowOptimizer,
    apply_to_rows,
    check_row_optimizer,
    sparse_gradient,
)
from flowchan.pipelines.parameter_server.tensor_kinds import as_tensor, copy

OPTIMIZER, ROWS = "optimizer", "rows"
"""Prefixes of slot names."""

Changes = Mapping[str, Any]
"""Mapping from changed arrays to the ids of their changed rows, or to ``None`` for whole arrays."""


class BlockUpdates:
    """Rules and optimizers of one shard.

    Args:
        tensors: The shard's tensors by name.
        optimizer: Function that creates the optimizer for the rule ``"gradient"`` from a list of parameters.
        rows: Row optimizers by table name.

    Raises:
        TypeError: An optimizer cannot run on a server.
        ValueError: ``rows`` names a tensor without rows.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any],
        optimizer: Factory | None = None,
        rows: Mapping[str, RowOptimizer] = {},
    ) -> None:
        self._tables = {}
        for name in rows.keys() & tensors.keys():
            check_row_optimizer(tensors[name], name, rows[name])
            self._tables[name] = OptimizerState(rows[name], {name: tensors[name]}, ROWS, sparse=True)
        others = {name: value for name, value in tensors.items() if name not in self._tables}
        self._dense = None if optimizer is None else OptimizerState(optimizer, others, OPTIMIZER)
        self.slots: dict[str, Any] = {}
        for state in self._states():
            self.slots |= state.slots

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "slots": {}}  # leave the slots out, because the block contains them

    def _states(self) -> list[OptimizerState]:
        return [*self._tables.values(), *([] if self._dense is None else [self._dense])]

    def apply(
        self,
        rule: Rule,
        values: Mapping[str, Any],
        rows: Mapping[str, Any] | None,
        scale: float,
        current: Mapping[str, Any],
        shadow: MutableMapping[str, Any],
        stale: Changes | None,
    ) -> Changes:
        """Apply a push to the shadow block.

        Args:
            rule: The rule.
            values: The pushed values by name.
            rows: IDs of the pushed rows of each tensor, unique and ascending; None for whole tensors.
            scale: Factor that multiplies the values.
            current: Arrays of the current block by name, including slots. The call does not change these
                arrays.
            shadow: Arrays of the shadow block.
            stale: Changes of the last push, or ``None`` if unknown.

        Returns:
            The changes of this push.
        """
        if rows is None and rule != "gradient":
            _catch_up(current, shadow, stale, values)
            for name, given in values.items():
                apply(rule, current[name], given, scale, shadow[name])
            return dict.fromkeys(values)
        _catch_up(current, shadow, stale)
        if rows is None:
            return self._step(values, scale, shadow)
        changes: dict[str, Any] = {}
        for table, given in values.items():
            ids = rows[table].copy()  # a copy, so that the changes do not keep the push's memory alive
            if rule == "gradient":
                changes |= self._step_of_rows(table, ids, given, scale, shadow)
            else:
                apply_to_rows(rule, ids, given, scale, shadow[table])
                changes[table] = ids
        return changes

    def _step(self, values: Mapping[str, Any], scale: float, shadow: MutableMapping[str, Any]) -> Changes:
        if not values:  # the push changes only tensors of other shards
            return {}
        assert self._dense is not None
        self._dense.step(shadow, {name: _gradient(given, scale) for name, given in values.items()})
        slots = [slot for name in values for slot in self._dense.slots_of(name)]
        return dict.fromkeys([*values, *slots])

    def _step_of_rows(
        self, table: str, ids: Any, given: Any, scale: float, shadow: MutableMapping[str, Any]
    ) -> Changes:
        state = self._tables[table]
        state.step(shadow, {table: sparse_gradient(ids, given, scale, shadow[table])})
        height = tuple(shadow[table].shape[:1])
        *tensors, rest = state.slots_of(table)
        changes = {slot: ids if shadow[slot].shape[:1] == height else None for slot in tensors}
        return {table: ids, rest: None, **changes}


def _catch_up(
    current: Mapping[str, Any], shadow: MutableMapping[str, Any], stale: Changes | None, written: Any = ()
) -> None:
    """Copy the changes of the last push into the shadow block, except arrays that the new push overwrites."""
    for name, ids in (dict.fromkeys(current) if stale is None else stale).items():
        if name in written:
            continue
        if ids is None:
            copy(current[name], shadow[name])
        else:
            index = as_tensor(ids) if hasattr(shadow[name], "copy_") else ids
            shadow[name][index] = current[name][index]


def _gradient(given: Any, scale: float) -> Any:
    gradient = given.decoded() if isinstance(given, Encoded) else as_tensor(given)
    return gradient if scale == 1 else gradient * scale


def updates_of_shards(
    tensors: Mapping[str, Any],
    shares: Iterable[Iterable[str]],
    optimizer: Factory | None,
    rows: Mapping[str, RowOptimizer],
) -> list[BlockUpdates]:
    """Create the rules and optimizers of all shards.

    Args:
        tensors: The tensors by name; empty if the server holds an object.
        shares: Names of the tensors of each shard.
        optimizer: Function that creates the optimizer for the rule ``"gradient"``.
        rows: Row optimizers by table name.
    """
    if optimizer is not None and not (callable(optimizer) and tensors):
        raise TypeError(
            "ParameterServer: optimizer must be a function params -> torch.optim.Optimizer, and the server "
            f"must hold tensors, got {shown(optimizer)}"
        )
    for name in rows:
        if name not in tensors:
            raise KeyError(f"ParameterServer: keys of rows must be names of tensors, got {name!r}")
    updates = [BlockUpdates({name: tensors[name] for name in share}, optimizer, rows) for share in shares]
    for taken in tensors.keys() & {slot for one in updates for slot in one.slots}:
        raise ValueError(
            f"ParameterServer: tensors must not have names reserved for optimizer state, got {taken!r}"
        )
    return updates


def optimized(slots: Collection[str]) -> tuple[bool, frozenset[str]]:
    """Return whether the tensors have an optimizer, and the names of the tables that have a row optimizer."""
    dense = any(slot.startswith(f"{OPTIMIZER}/") for slot in slots)
    start, end = f"{ROWS}/", ".json"
    tables = (slot[len(start) : -len(end)] for slot in slots if slot.startswith(start) and slot.endswith(end))
    return dense, frozenset(tables)
