"""Give the peers' queues and flowchan's channels a common interface.

The same loops drive all queues. An :class:`Ends` object stores two plain callables: ``put(item)`` and
``get()``. Where possible, they are the library's own bound methods, because a wrapper would cost more time
than the peer's queue.
"""

from __future__ import annotations

import multiprocessing
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any

import faster_fifo

from flowchan import Channel

CONTEXT = multiprocessing.get_context("fork")


@dataclass(frozen=True, slots=True)
class Ends:
    """The two ends of a queue. ``owner`` keeps the objects that they use alive."""

    put: Callable[[Any], Any]
    get: Callable[[], Any]
    owner: Any


def threads_channel(capacity: int | None = None) -> Ends:
    channel: Channel[Any] = Channel(capacity)
    return Ends(channel.put, channel.get, channel)


def simple_queue(capacity: int = 0) -> Ends:
    peer: queue.SimpleQueue[Any] = queue.SimpleQueue()
    return Ends(peer.put, peer.get, peer)


def bounded_queue(capacity: int = 4096) -> Ends:
    peer: queue.Queue[Any] = queue.Queue(capacity)
    return Ends(peer.put, peer.get, peer)


def processes_channel(capacity: int = 1024) -> Ends:
    channel: Channel[Any] = Channel(capacity, across="processes")
    return Ends(channel.put, channel.get, channel)


def multiprocessing_queue(capacity: int = 1024) -> Ends:
    peer = CONTEXT.Queue(capacity)
    return Ends(peer.put, peer.get, peer)


def fast_fifo(capacity: int = 1024) -> Ends:
    # The queue has room for items of 64 KB. ``get`` needs a longer timeout than the default, 10 s.
    peer = faster_fifo.Queue(max_size_bytes=64 << 20, maxsize=capacity)
    return Ends(peer.put, partial(peer.get, timeout=1e6), peer)


def os_pipe(capacity: int = 0) -> Ends:
    """Create an OS pipe with the standard library's framing and pickling.

    The kernel limits its size in bytes.
    """
    reader, writer = CONTEXT.Pipe(duplex=False)
    return Ends(writer.send, reader.recv, (reader, writer))


def across_processes(make: Callable[[], Ends], items: Callable[[int], Iterable[Any]], count: int) -> float:
    """Return how many seconds this process takes to get ``count`` items that a child puts one by one.

    The clock starts when the barrier releases both processes.
    """
    ends = make()
    start = CONTEXT.Barrier(2)
    child = CONTEXT.Process(target=_produce, args=(ends.put, items, count, start))
    child.start()
    get = ends.get
    start.wait()
    began = time.perf_counter()
    for _ in repeat(None, count):
        get()
    took = time.perf_counter() - began
    child.join()
    return took


def across_threads(make: Callable[[], Ends], writers: int, readers: int, count: int) -> float:
    """Return how many seconds ``readers`` threads take to get ``count`` items from ``writers`` threads.

    All threads start together, and the clock starts at that moment.
    """
    ends = make()
    start = threading.Barrier(writers + readers + 1)
    thread = threading.Thread
    threads = [
        thread(target=_produce, args=(ends.put, range, count // writers, start)) for _ in range(writers)
    ]
    threads += [thread(target=_consume, args=(ends.get, count // readers, start)) for _ in range(readers)]
    for one in threads:
        one.start()
    start.wait()
    began = time.perf_counter()
    for one in threads:
        one.join()
    return time.perf_counter() - began


def _produce(
    put: Callable[[Any], Any], items: Callable[[int], Iterable[Any]], count: int, start: Any
) -> None:
    start.wait()
    for item in items(count):
        put(item)


def _consume(get: Callable[[], Any], count: int, start: Any) -> None:
    start.wait()
    for _ in repeat(None, count):
        get()
