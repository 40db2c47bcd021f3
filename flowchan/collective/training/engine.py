"""Run a training loop with hooks, for one module or for replicas of a module."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from numbers import Number
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowchan.collective.group import Group
from flowchan.collective.training.gradients import AllReduceSGD, synchronize
from flowchan.declare.stream import Stream
from flowchan.items.arguments import flag
from flowchan.items.text import shown

__all__ = ["HOOKS", "Engine", "Mean", "State"]

HOOKS = (
    "on_start",
    "on_start_epoch",
    "on_sample",
    "on_output",
    "on_forward",
    "on_backward",
    "on_update",
    "on_end_epoch",
    "on_end",
)
"""Names of the hooks, in the order in which the engine calls them.

``on_start`` runs before the first epoch, and ``on_start_epoch`` before each epoch. ``on_sample`` runs when
the state contains a new sample, ``on_output`` when it contains a new output, and ``on_forward`` when it
contains a new loss. ``on_sample`` and ``on_output`` may replace the sample and the output. ``on_backward``
runs after the backward pass, when the gradients have been averaged over all replicas. ``on_update`` runs
after the optimizer's step, ``on_end_epoch`` after each epoch, and ``on_end`` after training.
"""

Batches = Iterable[Any] | Stream[Any] | Callable[[int], Iterable[Any] | Stream[Any]]


@dataclass(slots=True)
class State:
    """State of the training loop that hooks receive.

    ``sample``, ``output`` and ``loss`` are None while other replicas have a sample but this replica does not.

    Attributes:
        training: False during :meth:`Engine.test`.
        epoch: Number of completed epochs.
        step: Number of completed steps.
        sample: Current sample, a pair of an input and a target.
        output: Output of the module.
        loss: Loss of the output.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from flowchan.collective.training.engine import Engine
        >>> class Log:
        ...     def on_end_epoch(self, state):
        ...         print(f"epoch {state.epoch}, step {state.step}")
        >>> net = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> engine = Engine(net, nn.functional.mse_loss, optimizer, hooks=[Log()])
        >>> engine.train([(torch.ones(4, 2), torch.zeros(4, 1))], epochs=2)
        epoch 1, step 1
        epoch 2, step 2
    """

    training: bool = True
    epoch: int = 0
    step: int = 0
    sample: Any = None
    output: Any = None
    loss: Tensor | None = None


class Engine:
    """Trains a module, alone or as one of several replicas.

    With ``group``, each member trains one replica with :class:`AllReduceSGD`. Replicas therefore stay equal,
    even if members have different numbers of samples.

    Args:
        module: Module to train.
        loss: Function that takes the output and the target, and returns the loss.
        optimizer: Optimizer of the module's parameters.
        group: Group of the replicas; None trains the module alone.
        hooks: Objects with any of the methods in :data:`HOOKS`, each of which takes the :class:`State`.
        overlap: Average the gradients of later layers while ``backward`` is still computing earlier ones
            (default True). Pass False if a hook calls ``backward`` itself.

    Raises:
        ValueError: A hook has an ``on_…`` method that is not in :data:`HOOKS`.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from flowchan.collective.training.engine import Engine
        >>> net = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> engine = Engine(net, nn.functional.mse_loss, optimizer)
        >>> batches = [(torch.ones(4, 2), torch.zeros(4, 1))]
        >>> before = engine.test(batches)
        >>> engine.train(batches, epochs=3)
        >>> engine.test(batches) < before
        True
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[[Any, Any], Tensor],
        optimizer: torch.optim.Optimizer,
        group: Group | None = None,
        hooks: Sequence[Any] = (),
        *,
        overlap: bool = True,
    ) -> None:
        self.module, self.loss, self.optimizer, self.group = module, loss, optimizer, group
        self.state = State()
        self._hooks = [_known(hook) for hook in hooks]
        self._overlap = flag("Engine", "overlap", overlap)

    def train(self, batches: Batches, epochs: int) -> None:
        """Train until ``epochs`` epochs are complete, counting those that :meth:`load` restored.

        Args:
            batches: Samples of each epoch (pairs of an input and a target), or a function that takes an
                epoch's number and returns its samples. ``batches`` may also be a stream from a graph's
                ``collect()``; the graph then prepares samples during training.
            epochs: Total number of epochs.

        Raises:
            ValueError: Several epochs remain, but ``batches`` is an iterator, which ends after the first
                epoch.
        """
        remaining = epochs - self.state.epoch
        if isinstance(batches, Iterator) and remaining > 1:
            raise ValueError(
                f"train: batches must be iterable {remaining} times, got the iterator "
                f"{shown(batches)}; "
                "pass a list, or a function of the epoch number"
            )
        self.module.train()
        self.state.training = True
        if not self.group:
            self._train(batches, epochs, None)
            return
        synchronize(self.module, self.group)
        step = _Step(self._update)
        with closing(AllReduceSGD(self.module, step, self.group, overlap=self._overlap)) as together:
            self._train(batches, epochs, together)

    def _train(self, batches: Batches, epochs: int, together: AllReduceSGD | None) -> None:
        self._call("on_start")
        while self.state.epoch < epochs:
            self._call("on_start_epoch")
            for sample in _samples(batches, self.state.epoch):
                self._forward(sample)
                self.optimizer.zero_grad()
                assert self.state.loss is not None
                self.state.loss.backward()  # type: ignore[no-untyped-call]
                if together:
                    together.step()
                else:
                    self._update()
            self.state.sample = self.state.output = self.state.loss = None
            if together:
                together.join()
            self.state.epoch += 1
            self._call("on_end_epoch")
        self._call("on_end")

    @torch.no_grad()
    def test(self, batches: Batches) -> float:
        """Return the mean loss over the batches of all members, without training.

        Hooks may call this method during training without affecting the training. The method calls the hooks
        ``on_sample``, ``on_output`` and ``on_forward``.

        Args:
            batches: Samples, as in :meth:`train`.

        Returns:
            Mean loss, or NaN if ``batches`` is empty.
        """
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
            for module, mode in modes.items():  # some modules may have been in eval mode before
                module.training = mode
        return mean.over(self.group)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the module, the optimizer and the progress, for :meth:`load`.

        In a group, only rank 0 writes the file. An existing file is replaced atomically.

        Args:
            path: Path of the file.

        Raises:
            OSError: The file cannot be written.

        Example:
            >>> import tempfile
            >>> import torch
            >>> from torch import nn
            >>> from flowchan.collective.training.engine import Engine
            >>> net = nn.Linear(2, 1)
            >>> engine = Engine(net, nn.functional.mse_loss, torch.optim.SGD(net.parameters(), lr=0.1))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     engine.save(f"{folder}/state.pt")
            ...     engine.load(f"{folder}/state.pt")
        """
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
        """Load the state that :meth:`save` saved.

        In a group, rank 0 reads the file for all members.

        Args:
            path: Path of the file.

        Raises:
            OSError: The file cannot be read.
        """
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
        self._call("on_output")
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
    """Mean of values, such as losses or accuracies, over all members of a group.

    Example:
        >>> from flowchan.collective import group
        >>> from flowchan.collective.training.engine import Mean
        >>> mean = Mean()
        >>> mean.add(0.5, count=3)
        >>> mean.add(1.5)
        >>> with group() as g:
        ...     mean.over(g)
        0.75
    """

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, value: float | Tensor, count: int = 1) -> None:
        """Add ``count`` values, whose mean is given.

        Args:
            value: Mean of the values: a number, or a tensor with one element.
            count: Number of values (default 1).
        """
        # Store a number, because a tensor would keep its whole computation graph alive.
        self.total += (value.item() if isinstance(value, Tensor) else value) * count
        self.count += count

    def over(self, group: Group | None = None) -> float:
        """Return the mean over all members. All members must make this call.

        Args:
            group: Group to average over; None uses only this process's values.

        Returns:
            Mean, or NaN if no value was added.
        """
        pairs = group.allgather((self.total, self.count)) if group else [(self.total, self.count)]
        count = sum(one for _, one in pairs)
        return float(sum(total for total, _ in pairs) / count) if count else float("nan")


class _Step:
    """Wraps a function as the ``step`` of an optimizer, for :class:`AllReduceSGD`."""

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
    """Replace NumPy scalars, which torch refuses to load, with Python numbers.

    For example, a learning rate may be a NumPy scalar.
    """
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map(_plain, state))
    return state.item() if isinstance(state, Number) and hasattr(state, "item") else state


def _known(hook: Any) -> Any:
    unknown = [name for name in dir(hook) if name.startswith("on_") and name not in HOOKS]
    if unknown:
        raise ValueError(
            f"hooks must not define on_ methods other than {', '.join(HOOKS)}, got {hook!r} with "
            f"{', '.join(unknown)}"
        )
    return hook
