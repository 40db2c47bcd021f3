"""Make the replicas of a torch module equal on all members of a group, and compare them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from flowchan.collective.array_access import check_writable, contiguous, described, memory
from flowchan.collective.group import Group
from flowchan.errors import Mismatch


def synchronize(module: nn.Module, group: Group, root: int = 0) -> None:
    """Copy the parameters and buffers of ``root`` to all members.

    Args:
        module: This member's replica.
        group: Group of the replicas.
        root: Rank of the member to copy from (default 0).

    Raises:
        Mismatch: The modules have different parameters or buffers. All members raise this error.
        ValueError: Some elements of a tensor share memory.

    Example:
        >>> from torch import nn
        >>> from flowchan.collective import group
        >>> from flowchan.collective.training.gradients import check_equal, synchronize
        >>> module = nn.Linear(2, 1)
        >>> with group() as g:
        ...     synchronize(module, g)
        ...     check_equal(module, g)
    """
    for name, x in _state(module):
        check_writable("synchronize", name, x)
    _raise_for_difference([(name, described(x)) for name, x in _state(module)], group)
    for _, x in _state(module):
        group.broadcast(x, root)


def check_equal(module: nn.Module, group: Group) -> None:
    """Raise an error unless all members have bit-identical parameters and buffers.

    Args:
        module: This member's replica.
        group: Group of the replicas.

    Raises:
        Mismatch: A member's parameter or buffer differs from rank 0's. All members raise this error, which
            names the first such tensor and rank.

    Example:
        >>> from torch import nn
        >>> from flowchan.collective import group
        >>> from flowchan.collective.training.gradients import check_equal
        >>> with group() as g:
        ...     check_equal(nn.Linear(2, 1), g)
    """
    _raise_for_difference([(name, described(x), _digest(x)) for name, x in _state(module)], group)


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, x in [*module.named_parameters(), *module.named_buffers()]:
        yield name, x.detach()


def _digest(x: Tensor) -> bytes:
    return hashlib.blake2b(memory(contiguous(x.cpu()))).digest()


def _raise_for_difference(own: list[tuple[Any, ...]], group: Group) -> None:
    """Raise ``Mismatch`` unless all members have equal entries.

    The entry of a tensor contains its name, type and shape, and optionally a digest of its elements.
    """
    first, *others = group.allgather(own)
    found = [
        (_first_difference(first, other), rank) for rank, other in enumerate(others, 1) if other != first
    ]
    if not found:
        return
    place, rank = min(found)
    if place == min(len(first), len(others[rank - 1])):
        counts = (
            f"{len(first)} parameters and buffers, but the module on rank {rank} has {len(others[rank - 1])}"
        )
        raise Mismatch(f"the module on rank 0 has {counts}; build the same module on all members")
    (name, kind, *_), (its_name, its_kind, *_) = first[place], others[rank - 1][place]
    if (name, kind) == (its_name, its_kind):
        what, remedy = "has different values on rank 0 and", "call synchronize(module, group) first"
    else:
        what = f"on rank 0 corresponds to {its_name!r} ({its_kind}) on"
        remedy = "build the same module on all members"
    raise Mismatch(f"{name!r} ({kind}) {what} rank {rank}; {remedy}")


def _first_difference(one: list[Any], other: list[Any]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
