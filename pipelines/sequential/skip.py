"""Provide skip connections: one layer stashes a tensor, and a later layer in any part pops it.

The two layers use the same skip store. In a pipeline, each micro-batch has its own store, which travels with
it from part to part. In the plain module, each thread has one store. The store is never reset, because
nothing marks the end of a batch. A tensor that is not popped, for example because a layer raised, therefore
stays until the next ``Stash`` with the same name. ``Sequential`` checks that each ``Stash`` has a ``Pop``.

Kim et al. 2020, "torchgpipe: On-the-fly Pipeline Parallelism for Training Giant Models", section 3.3,
describe sending a skip directly to the part that pops it. This module sends a skip through the parts in
between. The detour is simpler, but between processes it costs one copy for each part in between.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flowchan.public import public

Skips = dict[str, Tensor | None]
"""Stashed values by name."""


class _ThreadStore(threading.local):
    def __init__(self) -> None:
        self.store: Skips = {}
        self.in_pipe = False  # true for a pipe's store, which never contains values from earlier batches


_thread_store = _ThreadStore()


@public
class Stash(nn.Module):
    """Pass the input on, and also keep it for a later :class:`Pop` with the same name.

    The next layer must not change the tensor in place: depending on the cut of the module, ``Pop`` might see
    the change.

    Args:
        name: Name shared with exactly one ``Pop``.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from flowchan.pipelines import Pop, Sequential, Stash
        >>> model = nn.Sequential(Stash("x"), nn.Linear(8, 8), nn.ReLU(), Pop("x"))
        >>> with Sequential(model, parts=2) as pipe:
        ...     pipe(torch.ones(16, 8)).shape
        torch.Size([16, 8])
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor | None) -> Tensor | None:
        """Return ``x``, and keep it for the ``Pop``.

        Args:
            x: A tensor or ``None``.

        Returns:
            ``x`` itself.

        Raises:
            TypeError: ``x`` is neither a tensor nor ``None``.
            RuntimeError: In a pipe, a value with this name is already stashed.
        """
        if x is not None and not isinstance(x, Tensor):
            raise TypeError(
                f"Stash({self.name!r}): x must be a tensor or None, got an object of type {type(x).__name__}"
            )
        if _thread_store.in_pipe and self.name in _thread_store.store:
            raise RuntimeError(
                f"Stash({self.name!r}): a value with this name is already stashed; put a "
                f"Pop({self.name!r}) before the second Stash"
            )
        _thread_store.store[self.name] = x
        return x

    def extra_repr(self) -> str:
        """Return the layer's name, for the module's ``repr``."""
        return repr(self.name)


@public
class Pop(nn.Module):
    """Combine the input with the tensor that the :class:`Stash` of the same name kept, and drop this tensor.

    Args:
        name: Name shared with exactly one ``Stash``.
        combine: Function of the input and the stashed tensor (default: their sum). The function must be
            picklable if the pipe has ``on="process"``.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from flowchan.pipelines import Pop, Stash
        >>> model = nn.Sequential(Stash("x"), nn.Identity(), Pop("x", combine=torch.maximum))
        >>> model(torch.ones(2))
        tensor([1., 1.])
    """

    def __init__(self, name: str, combine: Callable[[Any, Any], Any] = torch.add) -> None:
        super().__init__()
        self.name = name
        self.combine = combine

    def forward(self, x: Any) -> Any:
        """Return ``combine(x, stashed)``.

        Args:
            x: Output of the previous layer.

        Returns:
            The result of ``combine``.

        Raises:
            RuntimeError: No value with this name is stashed.
        """
        try:
            stashed = _thread_store.store.pop(self.name)
        except KeyError:
            raise RuntimeError(
                f"Pop({self.name!r}): no value is stashed; put a Stash({self.name!r}) before it"
            ) from None
        return self.combine(x, stashed)

    def extra_repr(self) -> str:
        """Return the layer's name, for the module's ``repr``."""
        return repr(self.name)


@contextlib.contextmanager
def skip_store(skips: Skips) -> Iterator[Skips]:
    """Make ``skips`` available to ``Pop``, and yield the dictionary of skips for later parts.

    The dictionary is complete when the block exits.
    """
    before = _thread_store.store, _thread_store.in_pipe
    _thread_store.store, _thread_store.in_pipe = dict(skips), True
    try:
        yield _thread_store.store
    finally:
        _thread_store.store, _thread_store.in_pipe = before
