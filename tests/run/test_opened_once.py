"""Test that a class opens its resource once and closes it, no matter how the run ends.

Each worker has its own instance. With ``share_instance=True``, all coroutines of a stage share one instance.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from runs import Gate, everywhere
from support.waiting import WAIT_LIMIT_S

from flowchan import Channel, Graph, RunError

WORKERS = 3

shared = pytest.mark.parametrize("share", [False, True], ids=["own", "shared"])
"""Parameter for tests of both kinds of instances."""


class Resources:
    """Count the instances of :attr:`Client` in all processes. Item 0 waits at the gate."""

    def __init__(self) -> None:
        self.gate = Gate()
        self._events: Channel[str] = Channel(100, across="processes")
        events, gate = self._events, self.gate

        class Client:
            def __init__(self) -> None:
                self.loop: Any = None
                events.put("opened")

            async def __call__(self, item: int) -> int:
                self.loop = asyncio.get_running_loop()
                if item == 0:
                    async for _ in gate.channel:
                        raise AssertionError
                if item < 0:
                    raise ValueError(item)
                return item

            async def close(self) -> None:
                assert self.loop in (None, asyncio.get_running_loop())
                await asyncio.sleep(0)
                events.put("closed")

        self.Client = Client

    def counts(self) -> tuple[int, int]:
        """Return how many instances were opened and closed."""
        events = Counter(self._events.get_many(100))
        return events["opened"], events["closed"]


def finished(graph: Graph, resources: Resources) -> None:
    graph.run()


def failed(graph: Graph, resources: Resources) -> None:
    with pytest.raises(RunError):
        graph.run()


def aborted(graph: Graph, resources: Resources) -> None:
    with graph.start() as run:
        resources.gate.wait_held(WORKERS)
        run.abort()


def stopped(graph: Graph, resources: Resources) -> None:
    with graph.start() as run:
        resources.gate.wait_held(WORKERS)
        run.stop()
        resources.gate.open()


ENDINGS: list[tuple[Callable[[Graph, Resources], None], list[int]]] = [
    (finished, [1] * 20),
    (failed, [1] * 20 + [-1] + [1] * 20),
    (aborted, [0] * WORKERS),
    (stopped, [0] * WORKERS),
]


@shared
@pytest.mark.parametrize(("end", "items"), ENDINGS, ids=[end.__name__ for end, _ in ENDINGS])
def test_coroutines_close_each_instance_once(share: bool, end: Any, items: list[int]) -> None:
    resources = Resources()
    graph = Graph("opened")
    graph.source(items).map(resources.Client, workers=WORKERS, share_instance=share).sink(hash)
    end(graph, resources)
    instances = 1 if share else WORKERS
    assert resources.counts() == (instances, instances)


@pytest.mark.parametrize(
    ("end", "items"),
    [one for one in ENDINGS if one[0] is not aborted],
    ids=["finished", "failed", "stopped"],
)
def test_each_worker_process_opens_and_closes_one_instance(end: Any, items: list[int]) -> None:
    resources = Resources()
    graph = Graph("opened")
    graph.source(items).map(resources.Client, workers=WORKERS, on="process").sink(hash)
    end(graph, resources)
    assert resources.counts() == (WORKERS, WORKERS)


@everywhere
def test_abort_closes_instances_of_workers_that_wait_for_items(on: Any) -> None:
    resources = Resources()
    graph = Graph("opened")
    items = graph.input()
    items.map(resources.Client, workers=WORKERS, on=on).sink(hash)
    with graph.start() as run:
        run.ready(60)
        run.abort()
    assert resources.counts() == (WORKERS, WORKERS)


def test_coroutines_use_a_shared_instance_at_the_same_time() -> None:
    class Meeting:
        def __init__(self) -> None:
            self.all_here = asyncio.Barrier(WORKERS)

        async def __call__(self, item: int) -> int:
            await self.all_here.wait()
            return item

    graph = Graph("opened")
    met = graph.source(range(6)).map(Meeting, workers=WORKERS, share_instance=True).collect()
    assert graph.run()[met] == list(range(6))


@shared
def test_abort_does_not_cancel_a_close_that_has_begun(share: bool) -> None:
    """The second stage is cancelled after the first stage, while the first stage's instance is being
    closed."""
    gate = Gate()
    closed: list[str] = []

    class Slow:
        async def __call__(self, item: int) -> int:
            return item

        async def close(self) -> None:
            async for _ in gate.channel:
                raise AssertionError
            closed.append("closed")

    started = threading.Event()

    async def cancelled(item: int) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            gate.open()

    graph = Graph("opened")
    graph.source([1]).map(Slow, workers=WORKERS, share_instance=share).sink(cancelled)
    instances = 1 if share else WORKERS
    with graph.start() as run:
        gate.wait_held(instances)
        started.wait(WAIT_LIMIT_S)  # otherwise nothing would open the gate
        run.abort()
    assert closed == ["closed"] * instances


def test_failed_constructor_ends_the_run_and_closes_nothing() -> None:
    closed: list[str] = []

    class Broken:
        def __init__(self) -> None:
            raise OSError("no connection")

        async def __call__(self, item: int) -> int:
            return item

        def close(self) -> None:
            closed.append("closed")

    graph = Graph("opened")
    graph.source([1]).map(Broken, workers=WORKERS, share_instance=True).sink(hash)
    with pytest.raises(RunError) as error:
        graph.run()
    assert "no connection" in str(error.value.exceptions[0])
    assert closed == []


class Sync:
    def __call__(self, item: int) -> int:
        return item


class AsyncClass:
    async def __call__(self, item: int) -> int:
        return item


async def function(item: int) -> int:
    return item


@pytest.mark.parametrize(
    ("called", "on"),
    [(Sync, "thread"), (function, "thread"), (int, "thread"), (AsyncClass, "process")],
    ids=["sync class", "function", "type", "process"],
)
def test_share_instance_requires_an_async_class_on_threads(called: Any, on: Any) -> None:
    with pytest.raises(ValueError, match="map: share_instance=True requires on='thread' and a class with an"):
        Graph("opened").source([1]).map(called, on=on, share_instance=True)


def test_share_instance_rejects_a_value_that_is_not_a_bool() -> None:
    with pytest.raises(TypeError, match="share_instance"):
        Graph("opened").source([1]).map(AsyncClass, share_instance=1)  # type: ignore[arg-type]
