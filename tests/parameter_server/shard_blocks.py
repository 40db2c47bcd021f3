"""Simulate the two blocks of a shard without a server, for tests of rules and optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cloudpickle
import numpy as np
import torch

from flowchan.pipelines.parameter_server.block_updates import BlockUpdates


def bits(value: Any) -> bytes:
    """Return the bytes of an array or tensor."""
    array = (
        value.detach().contiguous().view(-1).view(torch.uint8).numpy() if torch.is_tensor(value) else value
    )
    return np.ascontiguousarray(array).tobytes()


def cloned(value: Any) -> Any:
    return value.detach().clone() if torch.is_tensor(value) else value.copy()


class Blocks:
    """The current block and the shadow block, which swap roles after each push."""

    def __init__(self, tensors: Mapping[str, Any], **options: Any) -> None:
        self.updates = BlockUpdates(tensors, **options)
        start = {**tensors, **self.updates.slots}
        self.current = {name: cloned(value) for name, value in start.items()}
        self.shadow = {name: cloned(value) for name, value in start.items()}
        self.stale: Any = {}

    def replace_server(self, torn: bool = False) -> None:
        """Act as the replacement of a killed server. Only the blocks have survived.

        Args:
            torn: Whether to fill the shadow block with garbage, as if the server had been killed during a
                push.
        """
        self.updates = cloudpickle.loads(cloudpickle.dumps(self.updates))
        self.stale = None
        for value in self.shadow.values() if torn else ():
            value[...] = 1

    def push(self, rule: Any, values: Mapping[str, Any], scale: float = 1.0) -> None:
        self._flip(lambda *blocks: self.updates.apply(rule, values, None, scale, *blocks))

    def push_rows(self, rule: Any, table: str, ids: Any, values: Any, scale: float = 1.0) -> None:
        self._flip(lambda *blocks: self.updates.apply(rule, {table: values}, {table: ids}, scale, *blocks))

    def _flip(self, apply: Any) -> None:
        before = {name: bits(value) for name, value in self.current.items()}
        self.stale = apply(self.current, self.shadow, self.stale)
        assert {name: bits(value) for name, value in self.current.items()} == before
        self.current, self.shadow = self.shadow, self.current
