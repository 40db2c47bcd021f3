"""References to outputs go to a reader on the host that made the outputs, or to one that would otherwise
wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from fetching import SIZE, Hosts, make
from linked import RemoteWorker, feeding
from support.waiting import wait_until

from flowchan import Channel, _core

pytestmark = pytest.mark.usefixtures("no_references_stay")


@pytest.fixture
def no_references_stay() -> Iterator[None]:
    yield
    assert _core._references() == 0


def ring(places: int = 8) -> Channel[Any]:
    return Channel(places, across="processes", max_bytes=1 << 26)


def made_on(host: int) -> Callable[[int], Iterable[tuple[int, bytes]]]:
    """Return a function that makes an output whose first byte is the number of its host."""
    return lambda number: [(0, bytes([host]) + make(number))]


def read_on(host: int) -> Callable[[bytes], Iterable[tuple[int, tuple[int, int, int]]]]:
    """Return a function that reports the item's number, the host that made it, and the reader's host."""
    return lambda item: [(0, (len(item) - SIZE - 1, item[0], host))]


class Chain:
    """Two stages with one worker on each host of ``makers`` and ``readers``; the source is empty at first."""

    def __init__(self, hosts: Hosts, ordered: bool, makers: Iterable[int], readers: dict[int, Any]) -> None:
        self.source, between, results = ring(), ring(), ring(64)
        self.writer, self.results = self.source.writer(), results.reader()
        making = {
            host: RemoteWorker(
                hosts.links[host], 1, self.source, between, ordered=ordered, one_output=True, lends=True
            )
            for host in makers
        }
        reading = {
            host: RemoteWorker(hosts.links[host], 2, between, results, ordered=ordered, one_output=True)
            for host in readers
        }
        self.threads = [worker.start(made_on(host)) for host, worker in making.items()]
        self.threads += [worker.start(readers[host]) for host, worker in reading.items()]

    def __enter__(self) -> Chain:
        return self

    def __exit__(self, *exc: object) -> None:
        self.writer.close()
        for thread in self.threads:
            thread.join()


@pytest.mark.parametrize("ordered", [True, False])
def test_reference_goes_to_free_reader_on_its_host(ordered: bool) -> None:
    readers = {0: read_on(0), 1: read_on(1)}
    local = 0
    with Hosts() as hosts, Chain(hosts, ordered, (0, 1), readers) as chain:
        for number in range(60):  # both readers are free whenever an item is made
            chain.writer.put(number)
            found, made, read = chain.results.get()
            assert found == number
            local += made == read
    assert sum(fetcher.fetched for fetcher in hosts.fetchers) == 60 - local
    # On a very busy machine, a reader may be too slow for an item on its host.
    assert local >= 45


@pytest.mark.parametrize("ordered", [True, False])
def test_busy_reader_leaves_items_of_its_host_to_others(ordered: bool) -> None:
    release = threading.Event()

    def blocks(item: bytes) -> Iterable[tuple[int, tuple[int, int, int]]]:
        release.wait()
        return read_on(0)(item)

    with Hosts() as hosts, Chain(hosts, ordered, (0,), {0: blocks, 1: read_on(1)}) as chain:
        feeder = feeding(chain.source, range(40))
        if ordered:  # the blocked item has the first turn
            wait_until(lambda: hosts.fetcher.fetched >= 5)
            release.set()
        found = [chain.results.get() for _ in range(39)]
        release.set()
        found.append(chain.results.get())
        feeder.join()
    assert sorted(number for number, _, _ in found) == list(range(40))
    assert [number for number, _, _ in found] == list(range(40)) or not ordered
    assert sum(read == 1 for _, _, read in found) >= (5 if ordered else 39)


def test_every_item_arrives_if_its_host_has_no_reader() -> None:
    with Hosts() as hosts, Chain(hosts, True, (0, 1), {1: read_on(1)}) as chain:
        feeder = feeding(chain.source, range(100))
        found = [chain.results.get() for _ in range(100)]
        feeder.join()
    assert hosts.fetcher.fetched == sum(made == 0 for _, made, _ in found)
    assert [number for number, _, _ in found] == list(range(100))


@pytest.mark.parametrize("seed", range(4))
def test_items_survive_breaks_while_hosts_read_their_own(seed: int) -> None:
    readers = {0: read_on(0), 1: read_on(1)}
    ordered = seed % 2 == 0
    with Hosts() as hosts, Chain(hosts, ordered, (0, 1), readers) as chain:
        feeder = feeding(chain.source, range(200))
        found = []
        for count in range(200):
            found.append(chain.results.get()[0])
            if count % 20 == 10:
                hosts.links[(count // 20 + seed) % 2].connect()
        feeder.join()
    assert (found if ordered else sorted(found)) == list(range(200))


def test_reader_that_waits_for_fetches_gets_more_references() -> None:
    """Four outputs are fetched ahead at first, and up to twice as many each time the reader has to wait."""
    allowed = threading.Semaphore(0)
    with Hosts(lambda: allowed.acquire()) as hosts, Chain(hosts, False, (0,), {1: read_on(1)}) as chain:
        feeder = feeding(chain.source, range(100))
        side = hosts.readers.worker_side
        try:
            for most in (4, 8, 10):  # each report that the reader does not wait lowers the number by 1
                wait_until(lambda most=most: side.state()["streams"][2]["staged"] >= most, what=side.state)
                allowed.release()
                chain.results.get()
        finally:
            allowed.release(200)
            for _ in range(97):
                chain.results.get()
            feeder.join()


def test_next_output_is_fetched_while_an_item_is_processed() -> None:
    release = threading.Event()

    def blocks(item: bytes) -> Iterable[tuple[int, tuple[int, int, int]]]:
        release.wait()
        return read_on(1)(item)

    with Hosts() as hosts, Chain(hosts, True, (0,), {1: blocks}) as chain:
        feeder = feeding(chain.source, range(10))
        wait_until(lambda: hosts.fetcher.fetched >= 3)
        release.set()
        assert [chain.results.get()[0] for _ in range(10)] == list(range(10))
        feeder.join()
