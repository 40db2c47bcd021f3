"""A loop that trains a module, alone or as one of several replicas that stay equal, with hooks for what
differs from one training to another."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Number
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowchan.collective.group import Group
from flowchan.collective.training.gradients import AllReduceSGD, synchronize
from flowchan.declare.stream import Stream
from flowchan.items.text import shown

__all__ = ["HOOKS", "Engine", "Mean", "State"]

HOOKS = ("on_start", "on_sample", "on_forward", "on_backward", "on_update", "on_end_epoch")
"""In the order in which they are called: before the first epoch; with the sample, which may be replaced; with
output and loss; with the gradients, which are the mean over all replicas; after the step; after the last one
of an epoch."""

Batches = Iterable[Any] | Stream[Any] | Callable[[int], Iterable[Any] | Stream[Any]]


@dataclass(slots=True)
class State:
    """What hooks see. ``epoch`` and ``step`` are how many are done. In a step that is made because another
    replica has a sample more, ``sample``, ``output`` and ``loss`` are None."""

    training: bool = True
    epoch: int = 0
    step: int = 0
    sample: Any = None
    output: Any = None
    loss: Tensor | None = None


class Engine:
    """Trains ``module``: samples are pairs of an input and a target, and ``loss`` takes the output and the
    target. With a ``group`` each member has a replica, and the steps are those of :class:`AllReduceSGD`:
    replicas stay equal, and may have unequal numbers of samples.

        engine = Engine(net, nn.functional.cross_entropy, optimizer, group, hooks=[Log()])
        engine.train(batches, epochs=3)

    ``hooks``: objects with any of the methods in :data:`HOOKS`, each of which takes the :class:`State`.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[[Any, Any], Tensor],
        optimizer: torch.optim.Optimizer,
        group: Group | None = None,
        hooks: Sequence[Any] = (),
    ) -> None:
        self.module, self.loss, self.optimizer, self.group = module, loss, optimizer, group
        self.state = State()
        self._hooks = [_known(hook) for hook in hooks]
        self._together = AllReduceSGD(module, _Step(self._update), group) if group else None

    def train(self, batches: Batches, epochs: int) -> None:
        """Until so many epochs are done, those before :meth:`load` included. ``batches``: those of each
        epoch, or a function that gives them for its number. A stream of a graph that ends with ``collect()``
        is made ahead while the module works. Raises :class:`ValueError` for an iterator where there are
        several epochs: it would be at its end after the first."""
        left = epochs - self.state.epoch
        if isinstance(batches, Iterator) and left > 1:
            raise ValueError(
                f"train: {shown(batches)} ends with its first epoch, and {left} are to be done: "
                "give a function that makes the batches of an epoch, or what can be iterated again"
            )
        self.module.train()
        self.state.training = True
        if self.group:
            synchronize(self.module, self.group)
        self._call("on_start")
        while self.state.epoch < epochs:
            for sample in _samples(batches, self.state.epoch):
                self._forward(sample)
                self.optimizer.zero_grad()
                assert self.state.loss is not None
                self.state.loss.backward()  # type: ignore[no-untyped-call]
                if self._together:
                    self._together.step()
                else:
                    self._update()
            self.state.sample = self.state.output = self.state.loss = None
            if self._together:
                self._together.join()
            self.state.epoch += 1
            self._call("on_end_epoch")

    @torch.no_grad()
    def test(self, batches: Batches) -> float:
        """The mean loss over the batches of all members, without training; hooks may call it, for what trains
        goes on as before. Calls ``on_sample`` and ``on_forward``."""
        modes = {module: module.training for module in self.module.modules()}
        training = self.state.training
        self.module.eval()
        self.state.training = False
        try:
            mean = Mean()
            for sample in _samples(batches, self.state.epoch):
                self._forward(sample)
                assert self.state.loss is not None
                mean.add(self.state.loss.item())
        finally:
            self.state.training = training
            for module, mode in modes.items():  # some may be kept from training
                module.training = mode
        return mean.over(self.group)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes module, optimizer, and how far the training is, to be read by :meth:`load`. Of several
        members rank 0 does it. A file that is there is replaced in one step."""
        if self.group and self.group.rank:
            return
        kept = {
            "module": self.module.state_dict(),
            "optimizer": _plain(self.optimizer.state_dict()),
            "done": (self.state.epoch, self.state.step),
        }
        new = Path(f"{os.fspath(path)}.new")
        try:
            torch.save(kept, new)
            new.replace(path)
        except BaseException:
            with suppress(OSError):
                new.unlink()
            raise

    def load(self, path: str | os.PathLike[str]) -> None:
        """Goes on from what :meth:`save` has written. Of several members rank 0 reads it, and gives it to the
        others."""
        kept: Any = torch.load(path, weights_only=True) if not (self.group and self.group.rank) else None
        if self.group:
            kept = self.group.broadcast(kept)
        self.module.load_state_dict(kept["module"])
        self.optimizer.load_state_dict(kept["optimizer"])
        self.state.epoch, self.state.step = kept["done"]

    def _forward(self, sample: Any) -> None:
        self.state.sample = sample
        self._call("on_sample")
        given, target = self.state.sample
        self.state.output = self.module(given)
        self.state.loss = self.loss(self.state.output, target)
        self._call("on_forward")

    def _update(self) -> None:
        self._call("on_backward")
        self.optimizer.step()
        self.state.step += 1
        self._call("on_update")

    def _call(self, name: str) -> None:
        for hook in self._hooks:
            if call := getattr(hook, name, None):
                call(self.state)


class Mean:
    """The mean of what was added, as a loss or an accuracy."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, value: float | Tensor, count: int = 1) -> None:
        """``value`` is the mean of ``count``: a number, or a tensor with one element."""
        # Of a tensor its number alone: it would keep all that it was computed from.
        self.total += (value.item() if isinstance(value, Tensor) else value) * count
        self.count += count

    def over(self, group: Group | None = None) -> float:
        """Of what all members have added, who all call it. NaN if that is nothing."""
        pairs = group.allgather((self.total, self.count)) if group else [(self.total, self.count)]
        count = sum(one for _, one in pairs)
        return float(sum(total for total, _ in pairs) / count) if count else float("nan")


class _Step:
    """In the place of an optimizer: what is to be done when the gradients are there."""

    def __init__(self, step: Callable[[], None]) -> None:
        self.step = step


def _samples(batches: Batches, epoch: int) -> Iterator[Any]:
    found = batches(epoch) if callable(batches) else batches
    if not isinstance(found, Stream):
        yield from found
        return
    graph: Any = found.graph
    with graph.start() as run:
        yield from run.iter(found)


def _plain(state: Any) -> Any:
    """Without NumPy's numbers, as a learning rate may be one: torch reads no such thing from a file."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map(_plain, state))
    return state.item() if isinstance(state, Number) and hasattr(state, "item") else state


def _known(hook: Any) -> Any:
    strange = [name for name in dir(hook) if name.startswith("on_") and name not in HOOKS]
    if strange:
        raise ValueError(f"a hook can have the methods {', '.join(HOOKS)}; {hook!r} has {', '.join(strange)}")
    return hook
