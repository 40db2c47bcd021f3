"""Replicas of a torch module that are trained by the members of a group, each with a part of the data.

:func:`synchronize` makes them equal, and one of the following keeps them so, or near each other:
:class:`Gradients`, where all have equally many batches; :class:`AllReduceSGD`, where they may not;
:class:`ElasticAverage`, where they meet now and then. :func:`check_equal` says whether they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flowchan.collective.array_access import check_writable, contiguous, described, memory
from flowchan.collective.group import Group
from flowchan.collective.handles import Handle
from flowchan.collective.training.codes import Code, TopK, mean_by
from flowchan.errors import Mismatch
from flowchan.items.arguments import whole

__all__ = ["AllReduceSGD", "Code", "ElasticAverage", "Gradients", "TopK", "check_equal", "synchronize"]

_BUCKET = 1 << 20
"""Bytes of gradients that are averaged together, while backward makes those of the layers before."""


def synchronize(module: nn.Module, group: Group, root: int = 0) -> None:
    """Gives every member the parameters and buffers of ``root``. Raises :class:`Mismatch` on all members when
    their modules have others, ``ValueError`` where elements of one share memory."""
    for _, x in _state(module):
        check_writable(x)
    _raise_for_difference([(name, described(x)) for name, x in _state(module)], group)
    for _, x in _state(module):
        group.broadcast(x, root)


def check_equal(module: nn.Module, group: Group) -> None:
    """Raises :class:`Mismatch` on all members, naming the first parameter or buffer that differs, and the
    first rank that has another one than rank 0."""
    _raise_for_difference([(name, described(x), _digest(x)) for name, x in _state(module)], group)


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, x in [*module.named_parameters(), *module.named_buffers()]:
        yield name, x.detach()


def _digest(x: Tensor) -> bytes:
    return hashlib.blake2b(memory(contiguous(x.cpu()))).digest()


def _raise_for_difference(mine: list[tuple[Any, ...]], group: Group) -> None:
    """``mine``: for each tensor its name, its type and shape, and what else is to be the same."""
    first, *others = group.allgather(mine)
    found = [
        (_first_difference(first, other), rank) for rank, other in enumerate(others, 1) if other != first
    ]
    if not found:
        return
    place, rank = min(found)
    if place == min(len(first), len(others[rank - 1])):
        counts = f"{len(first)} parameters and buffers, and that of rank {rank} has {len(others[rank - 1])}"
        raise Mismatch(f"the module of rank 0 has {counts}")
    (name, kind, *_), (its_name, its_kind, *_) = first[place], others[rank - 1][place]
    what = "has other values" if (name, kind) == (its_name, its_kind) else f"is {its_name!r}, {its_kind},"
    raise Mismatch(f"{name!r}, {kind}, of rank 0 {what} at rank {rank}")


def _first_difference(one: list[Any], other: list[Any]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


class Gradients:
    """The gradients of a module, which become their mean over all members while ``backward`` runs.

    All members have the same module, and call ``backward`` and :meth:`wait` equally often. Gradients lie in a
    few flat buffers, each of which is on its way as soon as it is complete; what a loss does not depend on
    counts as zero. ``compress``: "fp16", "bf16", "topk", or what makes a :class:`Code`, once per buffer.

        gradients = Gradients(module, group)
        for batch in batches:
            optimizer.zero_grad()
            loss(module, batch).backward()
            gradients.wait()
            optimizer.step()
    """

    def __init__(
        self, module: nn.Module, group: Group, *, compress: str | Callable[[], Code] | None = None
    ) -> None:
        self._group = group
        self._accumulating = False
        self._buffers = [
            _Bucket(parameters, mean_by(compress, parameters[0].dtype)) for parameters in _in_buckets(module)
        ]
        self._started: list[Handle] = []  # of the first buffers: all members start them in this order
        self._buffer_of = {parameter: buffer for buffer in self._buffers for parameter in buffer.views}
        ready = weakref.WeakMethod(self._ready)  # no collector sees what a parameter's hooks hold
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda p: (call := ready()) and call(p)
            )
            for parameter in self._buffer_of
        ]

    def wait(self) -> None:
        """Returns when all gradients are the mean over all members. To be called after ``backward``, before
        they are used."""
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
        """In this block ``backward`` only adds to the gradients; the next one outside averages them all."""
        before, self._accumulating = self._accumulating, True  # it may stand in another such block
        try:
            yield
        finally:
            self._accumulating = before

    def close(self) -> None:
        """From now on gradients stay as ``backward`` makes them."""
        for hook in self._hooks:
            hook.remove()

    def _ready(self, parameter: Tensor) -> None:
        buffer = self._buffer_of[parameter]
        buffer.take(parameter)
        if self._accumulating:
            return
        if parameter not in buffer.missing:
            raise RuntimeError("backward has been called twice without Gradients.wait(), or accumulate()")
        buffer.missing.remove(parameter)
        while len(self._started) < len(self._buffers) and not self._buffers[len(self._started)].missing:
            self._start(self._buffers[len(self._started)])

    def _start(self, buffer: _Bucket) -> None:
        self._started.append(self._group._start(lambda: buffer.mean(self._group, buffer.flat), buffer.flat))


class _Flat:
    """Room for a tensor like each of some parameters of one type, in one piece."""

    def __init__(self, parameters: list[Tensor]) -> None:
        like, sizes = parameters[0], [p.numel() for p in parameters]
        self.flat = torch.zeros(sum(sizes), dtype=like.dtype, device=like.device)
        parts = torch.split(self.flat, sizes)
        self.views = {p: part.view_as(p) for p, part in zip(parameters, parts, strict=True)}

    def take(self, parameter: Tensor) -> None:
        """Lets the parameter's gradient lie here."""
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
    """Some gradients that are averaged together."""

    def __init__(self, parameters: list[Tensor], mean: Callable[[Group, Tensor], Any]) -> None:
        super().__init__(parameters)
        self.mean = mean
        self.missing = set(self.views)  # those that have no gradient yet


def _in_buckets(module: nn.Module) -> list[list[Tensor]]:
    """Its parameters, the last ones first as backward comes to them, and each list of one type and
    on one device."""
    buckets: list[list[Tensor]] = []
    room = 0
    for parameter in reversed([p for p in module.parameters() if p.requires_grad]):
        if room <= 0 or _type(buckets[-1][0]) != _type(parameter):
            buckets.append([])
            room = _BUCKET
        buckets[-1].append(parameter)
        room -= parameter.nbytes
    return buckets


def _type(x: Tensor) -> tuple[torch.dtype, torch.device]:
    return x.dtype, x.device


def _by_type(parameters: Iterable[Tensor]) -> list[_Flat]:
    """One for all parameters of each type."""
    found: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        found.setdefault(_type(parameter), []).append(parameter)
    return [_Flat(alike) for alike in found.values()]


def _add_up(group: Group, buffers: list[_Flat], contributes: bool) -> int:
    """Returns how many members contribute. If any does, the buffers become the sums of theirs."""
    contributors: int = group.allreduce(int(contributes))
    if contributors:
        for buffer in buffers:
            if not contributes:
                buffer.flat.zero_()
            group.allreduce(buffer.flat)
    return contributors


class Steps(Protocol):
    """An optimizer, or what does more in each step."""

    def step(self) -> Any: ...


class AllReduceSGD:
    """Steps of an optimizer by the mean gradient of those members that have one, where some may have more
    batches than others.

        training = AllReduceSGD(module, optimizer, group)
        for batch in batches:
            optimizer.zero_grad()
            loss(module, batch).backward()
            training.step()
        training.join()

    All members do the same steps, so parameters that were equal stay so, bit for bit.
    """

    def __init__(self, module: nn.Module, optimizer: Steps, group: Group) -> None:
        self._gradients = _by_type(p for p in module.parameters() if p.requires_grad)
        self._optimizer = optimizer
        self._group = group

    def step(self) -> int:
        """A step by the mean of this member's gradients and the others'. Returns how many contributed."""
        for buffer in self._gradients:
            buffer.complete()
        return self._do(contributes=True)

    def join(self) -> None:
        """This member has no batch left: takes part in the steps of the others until nobody has one."""
        while self._do(contributes=False):
            pass

    def _do(self, contributes: bool) -> int:
        n = _add_up(self._group, self._gradients, contributes)
        if n:
            for buffer in self._gradients:
                buffer.flat.div_(n)
                for parameter, mean in buffer.views.items():
                    parameter.grad = mean
            self._optimizer.step()
        return n


class ElasticAverage:
    """Members that train for themselves and meet every so many steps: the centre is drawn towards the mean of
    them by ``strength``, and each of them towards the centre by ``strength / group.size`` (elastic averaging
    SGD by Zhang, Choromanska and LeCun, whose beta and alpha these are: so it is stable for any size).

        average = ElasticAverage(module, group, every=10)
        for batch in batches:
            ...
            optimizer.step()
            average.step()
        average.join()
        average.to_centre()

    It begins with the parameters of rank 0, and the centre is the same on all members, bit for bit.
    """

    def __init__(self, module: nn.Module, group: Group, *, every: int, strength: float = 0.9) -> None:
        self._every = whole("ElasticAverage", "every", every, 1)
        if not 0 < strength < 1:
            raise ValueError(f"ElasticAverage: strength must be between 0 and 1, not {strength!r}")
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
        """To be called after each step of the optimizer."""
        self._steps += 1
        if self._steps % self._every:
            return
        for pulls, centre in zip(self._pulls, self._centre, strict=True):
            for parameter, pull in pulls.views.items():
                torch.sub(parameter, centre.views[parameter], out=pull).mul_(self._strength)
        mine = [(parameter, pull.clone()) for pulls in self._pulls for parameter, pull in pulls.views.items()]
        self._move(contributes=True)
        for parameter, pull in mine:  # now that the centre has moved: a member may have died
            parameter.sub_(pull)

    def join(self) -> None:
        """This member has no batch left: its centre follows that of the others until nobody has one."""
        while self._move(contributes=False):
            pass

    @torch.no_grad()
    def to_centre(self) -> None:
        """Lets the parameters be those of the centre."""
        for centre in self._centre:
            for parameter, view in centre.views.items():
                parameter.copy_(view)

    def _move(self, contributes: bool) -> int:
        n = _add_up(self._group, self._pulls, contributes)
        if n:
            for pulls, centre in zip(self._pulls, self._centre, strict=True):
                centre.flat += pulls.flat
        return n
