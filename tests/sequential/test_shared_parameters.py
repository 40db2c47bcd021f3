"""Test that parameters in shared memory keep their memory's descriptor."""

from __future__ import annotations

import os
import weakref
from typing import Any

from support.optional_packages import optional

torch = optional("torch")


def test_freed_memory_does_not_close_newer_memory_at_its_address() -> None:
    """A thread may run after freed memory is unmapped and before its descriptor is closed."""
    from flowchan.pipelines.sequential import shared_memory

    size = 64 << 20  # the kernel then maps the next block of this size at the same address
    newer: list[Any] = []

    def share(_: object) -> None:
        newer.append(shared_memory._new_block(size))

    def tensor_in(memory: Any) -> Any:
        return torch.frombuffer(memory, dtype=torch.uint8)

    memory = shared_memory._new_block(size)
    address = tensor_in(memory).data_ptr()
    thread = weakref.ref(memory, share)
    del memory
    assert thread() is None
    tensor = tensor_in(newer[0])
    assert tensor.data_ptr() == address
    assert shared_memory.is_shared(tensor)
    _, descriptor, _ = shared_memory._blocks[address]
    assert os.fstat(descriptor).st_size == size
