"""A graph as the data of a training loop: each epoch is a run of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch.utils.data import IterableDataset, get_worker_info

from flowchan import Graph, Stream, WorkerPool
from flowchan.items.arguments import flag, refuses_misspelt

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Dataset(IterableDataset[T_co]):
    """What :func:`dataset` gives: an iterable, of which each iteration is an epoch. In a ``with`` block of
    it, worker processes last from one epoch to the next, and there is one iteration at a time:
    ``zip(data, data)`` needs a dataset without a block."""

    def __init__(self, stream: Stream[T_co], *, seed: int | None = None, pin_memory: bool = False) -> None:
        if not isinstance(stream, Stream) or not isinstance(stream.graph, Graph):
            raise TypeError(f"dataset: takes a stream of a graph, not {stream!r}")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise TypeError(f"dataset: seed must be an int or None, not {seed!r}")
        self._graph = stream.graph
        if flag("dataset", "pin_memory", pin_memory) and torch.cuda.is_available():
            stream = stream.map(_pinned, name="pin memory")
        self._items = stream.collect(name="dataset")
        self._seed = seed
        self.epoch = 0
        """How many epochs have begun. Set it to go on as from that epoch."""
        self._pool: WorkerPool | None = None  # in a block

    def __enter__(self) -> Self:
        if self._pool is not None:
            raise RuntimeError("dataset: its block is entered already")
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
                "dataset: each worker of a DataLoader would run the whole graph; leave num_workers at 0, for "
                "the graph has workers of its own: map(function, on='process', workers=n)"
            )
        seed, self.epoch = self._seed_of(self.epoch), self.epoch + 1
        with (self._pool or self._graph).start(seed=seed) as run:
            yield from run.iter(self._items)

    def _seed_of(self, epoch: int) -> int:
        """Without a seed of its own it takes one of torch's generator, as DataLoader does."""
        if self._seed is None:
            return int(torch.empty((), dtype=torch.int64).random_())
        return int.from_bytes(hashlib.blake2b(f"{self._seed} {epoch}".encode(), digest_size=6).digest())


@refuses_misspelt("dataset")
def dataset(stream: Stream[T], *, seed: int | None = None, pin_memory: bool = False) -> Dataset[T]:
    """The items of ``stream`` as an iterable for training loops and for ``DataLoader(…, batch_size=None)``,
    which takes it as an ``IterableDataset``. Each iteration is an epoch, a run of the whole graph; leaving
    the loop early ends it. The graph goes on working while the loop computes, as far ahead as its channels
    have room.

    ``seed``: with the same one each epoch's workers draw the same random numbers again, others in each epoch;
    without it ``torch.manual_seed`` decides. ``pin_memory``: tensors in the items, nested as they may be, are
    copied into page-locked memory on a thread of the graph, where there is a GPU.

    Raises ``RunError`` in the loop when a stage fails.
    """
    return Dataset(stream, seed=seed, pin_memory=pin_memory)


def _pinned(item: Any) -> Any:
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(item)  # type: ignore[no-untyped-call]


# Messages, tracebacks and pickles name the place that users import from.
for _public in (Dataset, dataset):
    _public.__module__ = "flowchan.pipelines"
del _public
