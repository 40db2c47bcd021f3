"""Use a graph as the data of a training loop; each epoch is one run of the graph."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch.utils.data import IterableDataset, get_worker_info

from flowchan import Graph, Stream, WorkerPool
from flowchan.items.arguments import flag, refuses_misspelt
from flowchan.public import public

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@public
class Dataset(IterableDataset[T_co]):
    """Iterable over the items of a graph, returned by :func:`dataset`. Each iteration is one epoch.

    Inside ``with data:``, the same worker processes serve all epochs. Only one iteration can then run at a
    time. ``zip(data, data)`` therefore works only outside the block.

    Args:
        stream: Stream of a graph, read only by the dataset.
        seed: Seed for the workers' random numbers; see :func:`dataset`.
        pin_memory: Copy tensors into page-locked memory.

    Raises:
        TypeError: ``stream`` is not a stream of a graph, or ``seed`` is not an int.

    Example:
        >>> from flowchan import Graph
        >>> from flowchan.pipelines import dataset
        >>> data = dataset(Graph().source(range(3)))
        >>> list(data), data.epoch
        ([0, 1, 2], 1)
    """

    def __init__(self, stream: Stream[T_co], *, seed: int | None = None, pin_memory: bool = False) -> None:
        if not isinstance(stream, Stream) or not isinstance(stream.graph, Graph):
            raise TypeError(f"dataset: stream must be a stream of a graph, got {stream!r}")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise TypeError(f"dataset: seed must be an int or None, got {seed!r}")
        self._graph = stream.graph
        if flag("dataset", "pin_memory", pin_memory) and torch.cuda.is_available():
            stream = stream.map(_pinned, name="pin memory")
        self._items = stream.collect(name="dataset")
        self._seed = seed
        self.epoch = 0
        """Number of epochs that have started. Set it to resume training at that epoch."""
        self._pool: WorkerPool | None = None  # set only inside a ``with`` block

    def __enter__(self) -> Self:
        if self._pool is not None:
            raise RuntimeError("dataset: with blocks must not be nested; leave the outer block first")
        self._pool = self._graph.pool().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.__exit__(kind, error, trace)

    def __iter__(self) -> Iterator[T_co]:
        if get_worker_info() is not None:
            raise RuntimeError(
                "dataset: each worker of a DataLoader would run the whole graph; use num_workers=0, "
                "and give the graph workers: map(function, on='process', workers=n)"
            )
        seed, self.epoch = self._seed_of(self.epoch), self.epoch + 1
        with (self._pool or self._graph).start(seed=seed) as run:
            yield from run.iter(self._items)

    def _seed_of(self, epoch: int) -> int:
        """Return the seed for an epoch. If the dataset has no seed, draw a seed from torch."""
        if self._seed is None:
            return int(torch.empty((), dtype=torch.int64).random_())
        return int.from_bytes(hashlib.blake2b(f"{self._seed} {epoch}".encode(), digest_size=6).digest())


@public
@refuses_misspelt("dataset")
def dataset(stream: Stream[T], *, seed: int | None = None, pin_memory: bool = False) -> Dataset[T]:
    """Make a stream iterable for training loops and ``DataLoader(…, batch_size=None)``.

    Each iteration is an epoch, which is one run of the whole graph. Leaving the loop early ends the run. The
    graph runs ahead of the loop until its channels are full.

    Args:
        stream: Stream of a graph, read only by the dataset.
        seed: Seed for the workers' random numbers. An epoch with the same seed draws the same random numbers
            again. Default: a number from torch's generator, which ``torch.manual_seed`` determines.
        pin_memory: True to copy the tensors of each item into page-locked memory, on a thread of the graph
            (default: False). ``pin_memory`` has no effect on a machine without a GPU.

    Returns:
        An ``IterableDataset``. To resume training, set its attribute ``epoch``.

    Raises:
        TypeError: ``stream`` is not a stream of a graph, or another argument has the wrong type.

    The loop raises ``RunError`` if a stage fails.

    Example:
        >>> import torch
        >>> from flowchan import Graph
        >>> from flowchan.pipelines import dataset
        >>> graph = Graph()
        >>> batches = graph.source(range(4)).map(float, on="process").batch(2).map(torch.tensor)
        >>> with dataset(batches, seed=0) as data:
        ...     for epoch in range(2):
        ...         for batch in data:
        ...             print(epoch, batch)
        0 tensor([0., 1.])
        0 tensor([2., 3.])
        1 tensor([0., 1.])
        1 tensor([2., 3.])
    """
    return Dataset(stream, seed=seed, pin_memory=pin_memory)


def _pinned(item: Any) -> Any:
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(item)  # type: ignore[no-untyped-call]
