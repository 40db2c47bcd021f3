"""Implement data-parallel training of a torch module with one replica on each member of a group.

:func:`synchronize` makes the replicas equal. One of the following classes keeps the replicas equal or close,
and :func:`check_equal` compares replicas.

- :class:`Gradients` requires equal numbers of batches.
- :class:`AllReduceSGD` allows different numbers of batches.
- :class:`ElasticAverage` averages the replicas only every few steps.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from flowchan.collective.group import Group
from flowchan.collective.handles import Handle
from flowchan.collective.training.codes import QSGD, Code, TopK, combine_by
from flowchan.collective.training.equal_replicas import check_equal, synchronize
from flowchan.items.arguments import flag, whole
from flowchan.items.text import shown

__all__ = [
    "QSGD",
    "AllReduceSGD",
    "Code",
    "ElasticAverage",
    "Gradients",
    "TopK",
    "check_equal",
    "synchronize",
]

_BUCKET = 1 << 20
"""Number of gradient bytes that are averaged together while backward computes the gradients of earlier
layers."""


class Gradients:
    """Averages or sums the gradients of a module over all members during ``backward``.

    All members must have the same module, and call ``backward`` and :meth:`wait` the same number of times.

    A few flat buffers contain the gradients, and each buffer is averaged as soon as it is complete. If a loss
    does not depend on a parameter, this parameter's gradient counts as zero.

    Args:
        module: This member's replica.
        group: Group of the replicas.
        op: ``"mean"`` (default) or ``"sum"``, for a loss that is a sum over samples.
        compress: ``"fp16"``, ``"bf16"``, ``"topk"``, ``"qsgd"``, or a function that creates a
            :class:`Code` for each buffer (default None: no compression).

    Raises:
        ValueError: ``op`` or ``compress`` is unknown, or a complex parameter cannot be compressed.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from flowchan.collective import group
        >>> from flowchan.collective.training.gradients import Gradients
        >>> module = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        >>> with group() as g:
        ...     gradients = Gradients(module, g)
        ...     for batch in [torch.ones(4, 2), torch.zeros(4, 2)]:
        ...         optimizer.zero_grad()
        ...         module(batch).square().mean().backward()
        ...         gradients.wait()
        ...         optimizer.step()
        ...     gradients.close()
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        *,
        op: Literal["mean", "sum"] = "mean",
        compress: str | Callable[[], Code] | None = None,
    ) -> None:
        if op not in ("mean", "sum"):
            raise ValueError(f"Gradients: op must be 'mean' or 'sum', got {shown(op)}")
        self._group = group
        self._accumulating = False
        self._buffers = [
            _Bucket(parameters, combine_by(op, compress, parameters[0].dtype))
            for parameters in _in_buckets(module)
        ]
        # Handles of the buffers that are being averaged. All members must start averaging the buffers in the
        # same order.
        self._started: list[Handle] = []
        self._buffer_of = {parameter: buffer for buffer in self._buffers for parameter in buffer.views}
        # Use a weak reference, because the garbage collector does not see the references of a parameter's
        # hooks.
        ready = weakref.WeakMethod(self._ready)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda p: (call := ready()) and call(p)
            )
            for parameter in self._buffer_of
        ]

    def wait(self) -> None:
        """Wait until all gradients have been replaced with their means or sums over all members.

        Call this after ``backward``, before you use the gradients.
        """
        for buffer in self._buffers[len(self._started) :]:
            buffer.complete()
            self._start(buffer)
        handles, self._started = self._started, []
        for buffer in self._buffers:
            buffer.missing = set(buffer.views)
        for handle in handles:
            handle.wait()

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Accumulate the gradients of several ``backward`` calls in a ``with`` block, without averaging.

        The next ``backward`` after the block averages the sum.

        Returns:
            The context manager.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from flowchan.collective import group
            >>> from flowchan.collective.training.gradients import Gradients
            >>> module = nn.Linear(2, 1)
            >>> with group() as g:
            ...     gradients = Gradients(module, g)
            ...     with gradients.accumulate():
            ...         module(torch.ones(4, 2)).mean().backward()
            ...     module(torch.zeros(4, 2)).mean().backward()
            ...     gradients.wait()
            >>> module.weight.grad
            tensor([[1., 1.]])
        """
        before, self._accumulating = self._accumulating, True  # blocks may be nested
        try:
            yield
        finally:
            self._accumulating = before

    def close(self) -> None:
        """Stop averaging: from now on, gradients stay as ``backward`` computes them."""
        for hook in self._hooks:
            hook.remove()

    def _ready(self, parameter: Tensor) -> None:
        buffer = self._buffer_of[parameter]
        buffer.take(parameter)
        if self._accumulating:
            return
        if parameter not in buffer.missing:
            raise RuntimeError(
                "backward was called twice; call Gradients.wait() after each backward(), use accumulate(), "
                "or pass overlap=False to AllReduceSGD or Engine"
            )
        buffer.missing.remove(parameter)
        while len(self._started) < len(self._buffers) and not self._buffers[len(self._started)].missing:
            self._start(self._buffers[len(self._started)])

    def _start(self, buffer: _Bucket) -> None:
        self._started.append(
            self._group._start(lambda: buffer.combine(self._group, buffer.flat), buffer.flat)
        )


class _Flat:
    """Contiguous buffer for gradients of one type, with a view for each parameter."""

    def __init__(self, parameters: list[Tensor]) -> None:
        like, sizes = parameters[0], [p.numel() for p in parameters]
        self.flat = torch.zeros(sum(sizes), dtype=like.dtype, device=like.device)
        parts = torch.split(self.flat, sizes)
        self.views = {p: part.view_as(p) for p, part in zip(parameters, parts, strict=True)}

    def take(self, parameter: Tensor) -> None:
        """Move the parameter's gradient into this buffer."""
        view = self.views[parameter]
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad is not view:
            view.copy_(parameter.grad.detach().to_dense())
        parameter.grad = view

    def complete(self) -> None:
        for parameter in self.views:
            self.take(parameter)


class _Bucket(_Flat):
    """Buffer of gradients that are combined together."""

    def __init__(self, parameters: list[Tensor], combine: Callable[[Group, Tensor], Any]) -> None:
        super().__init__(parameters)
        self.combine = combine
        self.missing = set(self.views)  # parameters whose gradients are not computed yet


def _in_buckets(module: nn.Module) -> list[list[Tensor]]:
    """Divide the parameters into lists, each with parameters of one type on one device.

    The order is reversed, because backward reaches the last parameters first.
    """
    buckets: list[list[Tensor]] = []
    free_bytes = 0
    for parameter in reversed([p for p in module.parameters() if p.requires_grad]):
        if free_bytes <= 0 or _type(buckets[-1][0]) != _type(parameter):
            buckets.append([])
            free_bytes = _BUCKET
        buckets[-1].append(parameter)
        free_bytes -= parameter.nbytes
    return buckets


def _type(x: Tensor) -> tuple[torch.dtype, torch.device]:
    return x.dtype, x.device


def _by_type(parameters: Iterable[Tensor]) -> list[_Flat]:
    """Create one buffer for all parameters of each type and device."""
    found: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        found.setdefault(_type(parameter), []).append(parameter)
    return [_Flat(alike) for alike in found.values()]


def _add_up(group: Group, buffers: list[_Flat], contributes: bool) -> int:
    """Replace the buffers with their sums over all contributing members, and return how many contribute."""
    contributors: int = group.allreduce(int(contributes))
    if contributors:
        for buffer in buffers:
            if not contributes:
                buffer.flat.zero_()
            group.allreduce(buffer.flat)
    return contributors


class Steps(Protocol):
    """Optimizer, or another object with a ``step`` method."""

    def step(self) -> Any: ...


class AllReduceSGD:
    """Runs an optimizer with the mean gradient of the members that have a batch.

    Members may have different numbers of batches. All members make the same steps, so parameters that are
    equal at first stay bit-identical.

    Args:
        module: This member's replica.
        optimizer: Optimizer of its parameters.
        group: Group of the replicas.
        overlap: Average the gradients of later layers while ``backward`` is still computing earlier ones
            (default False). Each step then allows only one ``backward``.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from flowchan.collective import group
        >>> from flowchan.collective.training.gradients import AllReduceSGD
        >>> module = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        >>> with group() as g:
        ...     training = AllReduceSGD(module, optimizer, g)
        ...     for batch in [torch.ones(4, 2), torch.zeros(4, 2)]:
        ...         optimizer.zero_grad()
        ...         module(batch).square().mean().backward()
        ...         contributors = training.step()
        ...     training.join()
        ...     training.close()
        >>> contributors
        1
    """

    def __init__(self, module: nn.Module, optimizer: Steps, group: Group, *, overlap: bool = False) -> None:
        overlapped = flag("AllReduceSGD", "overlap", overlap)
        self._overlap = Gradients(module, group, op="sum") if overlapped else None
        self._gradients: list[_Flat] = (
            [*self._overlap._buffers]
            if self._overlap
            else _by_type(p for p in module.parameters() if p.requires_grad)
        )
        self._optimizer = optimizer
        self._group = group

    def step(self) -> int:
        """Average the gradients over the members that have a batch, and make an optimizer step.

        Returns:
            Number of members that contributed.
        """
        if not self._overlap:
            for buffer in self._gradients:
                buffer.complete()
        return self._do(contributes=True)

    def join(self) -> None:
        """Take part in the other members' steps without a batch, until no member has batches left."""
        while self._do(contributes=False):
            pass

    def close(self) -> None:
        """Stop averaging during ``backward``. Without ``overlap``, this method does nothing."""
        if self._overlap:
            self._overlap.close()

    def _do(self, contributes: bool) -> int:
        n = self._sum(contributes)
        if n:
            for buffer in self._gradients:
                buffer.flat.div_(n)
                for parameter, mean in buffer.views.items():
                    parameter.grad = mean
            self._optimizer.step()
        return n

    def _sum(self, contributes: bool) -> int:
        if not self._overlap:
            return _add_up(self._group, self._gradients, contributes)
        if not contributes:
            for buffer in self._gradients:
                for parameter in buffer.views:
                    parameter.grad = None  # a missing gradient counts as zero
        self._overlap.wait()
        # Last, count the members that contributed. From this number, members without a batch learn whether
        # this was a step.
        return int(self._group.allreduce(int(contributes)))


class ElasticAverage:
    """Trains replicas of a module independently, and averages them elastically every few steps.

    At each average, the centre moves towards the mean of the replicas by the fraction ``strength``. Each
    replica moves towards the centre by the fraction ``strength / group.size``. All replicas start with the
    parameters of rank 0. The centre is bit-identical on all members.

    The algorithm is elastic averaging SGD by Zhang, Choromanska and LeCun. The two fractions are the
    algorithm's beta and alpha. This choice makes the algorithm stable for any group size.

    Args:
        module: This member's replica.
        group: Group of the replicas.
        every: Number of optimizer steps between two averages, at least 1.
        strength: Number between 0 and 1 (default 0.9).

    Raises:
        ValueError: ``every`` or ``strength`` is out of range.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from flowchan.collective import group
        >>> from flowchan.collective.training.gradients import ElasticAverage
        >>> module = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        >>> with group() as g:
        ...     average = ElasticAverage(module, g, every=2)
        ...     for batch in [torch.ones(4, 2), torch.zeros(4, 2)]:
        ...         optimizer.zero_grad()
        ...         module(batch).square().mean().backward()
        ...         optimizer.step()
        ...         average.step()
        ...     average.join()
        ...     average.to_centre()
    """

    def __init__(self, module: nn.Module, group: Group, *, every: int, strength: float = 0.9) -> None:
        self._every = whole("ElasticAverage", "every", every, 1)
        if not 0 < strength < 1:
            raise ValueError(f"ElasticAverage: strength must be between 0 and 1, got {strength!r}")
        self._strength = strength / group.size
        self._group = group
        self._steps = 0
        synchronize(module, group)
        self._pulls, self._centre = _by_type(module.parameters()), _by_type(module.parameters())
        for centre in self._centre:
            for parameter, view in centre.views.items():
                view.copy_(parameter.detach())

    @torch.no_grad()
    def step(self) -> None:
        """Count an optimizer step, and average the replicas if an average is due. Call it after each step."""
        self._steps += 1
        if self._steps % self._every:
            return
        for pulls, centre in zip(self._pulls, self._centre, strict=True):
            for parameter, pull in pulls.views.items():
                torch.sub(parameter, centre.views[parameter], out=pull).mul_(self._strength)
        own = [(parameter, pull.clone()) for pulls in self._pulls for parameter, pull in pulls.views.items()]
        self._move(contributes=True)
        for parameter, pull in own:  # only after _move(), which raises if a member has died
            parameter.sub_(pull)

    def join(self) -> None:
        """Take part in the other members' averages until no member has batches left."""
        while self._move(contributes=False):
            pass

    @torch.no_grad()
    def to_centre(self) -> None:
        """Copy the centre into the module's parameters."""
        for centre in self._centre:
            for parameter, view in centre.views.items():
                parameter.copy_(view)

    def _move(self, contributes: bool) -> int:
        n = _add_up(self._group, self._pulls, contributes)
        if n:
            for pulls, centre in zip(self._pulls, self._centre, strict=True):
                centre.flat += pulls.flat
        return n
