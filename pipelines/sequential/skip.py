"""Skip connections: a tensor that one layer stashes and a later layer pops, in the same part or in another
one.

The layers find each other through a skip store. In a pipeline it belongs to one micro-batch: each part finds
in it what travels along, and what it leaves there travels on. In the plain module it belongs to the thread,
for nothing tells where a batch ends: what is not popped, because a layer between has raised or there is no
``Pop``, stays until the next ``Stash`` of its name. ``Sequential`` checks that each ``Stash`` has its
``Pop``.

Kim et al. 2020, "torchgpipe: On-the-fly Pipeline Parallelism for Training Giant Models", section 3.3, sends a
skip straight from part to part; here it goes through the parts between, which is simpler and costs a copy for
each of them on processes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

Skips = dict[str, Tensor | None]
"""What is stashed, by name."""


class _ThreadStore(threading.local):
    def __init__(self) -> None:
        self.store: Skips = {}
        self.in_pipe = False  # then the store holds nothing of an earlier batch


_here = _ThreadStore()


class Stash(nn.Module):
    """Gives its input, a tensor or ``None``, on as it is, and keeps it under ``name`` for a later
    :class:`Pop` of the same name. The layer behind must not change it in place: whether ``Pop`` would see
    that depends on where the parts are cut."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor | None) -> Tensor | None:
        """``x``. Raises ``TypeError`` when it is neither a tensor nor ``None``, and in a pipe
        ``RuntimeError`` when something is stashed under its name already."""
        if x is not None and not isinstance(x, Tensor):
            raise TypeError(f"Stash({self.name!r}) takes a tensor or None, not a {type(x).__name__}")
        if _here.in_pipe and self.name in _here.store:
            raise RuntimeError(
                f"Stash({self.name!r}) would replace what another one has stashed and no "
                f"Pop({self.name!r}) has popped"
            )
        _here.store[self.name] = x
        return x

    def extra_repr(self) -> str:
        """Its name, for the picture of a module as text."""
        return repr(self.name)


class Pop(nn.Module):
    """``combine(x, stashed)``: its input with what the :class:`Stash` of the same ``name`` kept, which is
    gone then. ``combine`` adds if it is left out; for ``on="process"`` it must be one that can be pickled."""

    def __init__(self, name: str, combine: Callable[[Any, Any], Any] = torch.add) -> None:
        super().__init__()
        self.name = name
        self.combine = combine

    def forward(self, x: Any) -> Any:
        """``combine(x, stashed)``. Raises ``RuntimeError`` when nothing is stashed under its name."""
        try:
            stashed = _here.store.pop(self.name)
        except KeyError:
            raise RuntimeError(
                f"Pop({self.name!r}) finds nothing: no Stash({self.name!r}) came before it"
            ) from None
        return self.combine(x, stashed)

    def extra_repr(self) -> str:
        """Its name, for the picture of a module as text."""
        return repr(self.name)


@contextlib.contextmanager
def skip_store(skips: Skips) -> Iterator[Skips]:
    """Within it ``Pop`` finds ``skips``; gives a dictionary that holds, at the end, what travels on."""
    before = _here.store, _here.in_pipe
    _here.store, _here.in_pipe = dict(skips), True
    try:
        yield _here.store
    finally:
        _here.store, _here.in_pipe = before
