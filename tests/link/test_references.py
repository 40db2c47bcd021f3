"""Large outputs stay on the worker's side of a link until their reader's link fetches them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from fetching import SIZE, Hosts, make
from linked import RemoteWorker, feeding
from support.waiting import wait_until

from flowchan import Channel, _core


def made(number: int) -> Iterable[tuple[int, bytes]]:
    return [(0, make(number))]


def number_of(item: bytes) -> Iterable[tuple[int, int]]:
    number = len(item) - SIZE
    assert item == make(number)
    return [(0, number)]


def ring() -> Channel[Any]:
    return Channel(8, across="processes", max_bytes=1 << 26)


@contextmanager
def run_chain(
    hosts: Hosts, items: int, ordered: bool, makers: int = 2
) -> Iterator[tuple[Any, list[RemoteWorker]]]:
    """Run ``makers`` workers that make outputs and two that read them; yield the results and the makers."""
    source, between, results = ring(), ring(), ring()
    with ExitStack() as stack:
        making = [
            RemoteWorker(hosts.makers, n, source, between, ordered=ordered, one_output=True, lends=True)
            for n in range(1, makers + 1)
        ]
        reading = [
            RemoteWorker(hosts.readers, n, between, results, ordered=ordered, one_output=True)
            for n in range(1, 3)
        ]
        out = results.reader()
        threads = [one.start(made) for one in making] + [one.start(number_of) for one in reading]
        threads.append(feeding(source, range(items)))
        yield out, making
        for thread in threads:
            stack.callback(thread.join)


@pytest.mark.parametrize("ordered", [True, False])
def test_large_outputs_are_fetched_by_the_link_of_their_reader(ordered: bool) -> None:
    with Hosts() as hosts, run_chain(hosts, 100, ordered) as (out, _):
        results = list(out)
    assert (results if ordered else sorted(results)) == list(range(100))
    assert hosts.fetcher.fetched >= 100  # a recalled item is fetched again
    assert hosts.makers.owner_side.state()["bytes_in"] < 100 * SIZE / 10
    assert _core._references() == 0


@pytest.mark.parametrize("ordered", [True, False])
def test_outputs_that_cannot_be_fetched_are_sent_through_the_owner(ordered: bool) -> None:
    chooser = random.Random(1)
    with Hosts(lambda: chooser.random() < 0.5) as hosts, run_chain(hosts, 100, ordered) as (out, _):
        results = list(out)
    assert (results if ordered else sorted(results)) == list(range(100))
    assert hosts.fetcher.fetched > 0
    assert hosts.fetcher.refused > 0
    assert _core._references() == 0


@pytest.mark.parametrize("seed", range(6))
def test_outputs_survive_broken_connections_and_dead_makers(seed: int) -> None:
    chooser = random.Random(seed)
    ordered = seed % 2 == 0
    with Hosts(lambda: chooser.random() < 0.8) as hosts, run_chain(hosts, 200, ordered) as (out, making):
        results, replaced = [], []
        for number, item in enumerate(out):
            results.append(item)
            if number % 20 == 10:
                chooser.choice((hosts.makers, hosts.readers)).connect()
            if number % 50 == 25:
                dying = making.pop(0)
                replaced.append(dying.die(100 + number))
                making.append(replaced[-1])
                replaced[-1].thread = replaced[-1].start(made)
        for one in replaced:
            one.thread.join()
    assert (results if ordered else sorted(results)) == list(range(200))
    assert _core._references() == 0


def test_replays_are_sent_beyond_the_full_window_of_their_maker() -> None:
    items = 400  # more than the first worker takes
    source, between, results = ring(), ring(), ring()
    with Hosts() as hosts:
        first, second = (
            RemoteWorker(hosts.makers, n, source, between, ordered=False, one_output=True, lends=True)
            for n in (1, 2)
        )
        second.out[0]._share = SIZE  # one unread output then fills the second worker's window
        reading = [RemoteWorker(hosts.readers, n, between, results, one_output=True) for n in (1, 2)]
        out = results.reader()
        threads = [feeding(source, range(items)), first.start(made)]
        # the readers and the channel contain only outputs of the first worker
        wait_until(lambda: between.stats().inside == between.stats().leased == 8 and staged_by(first) > 0)
        threads.append(second.start(made))
        wait_until(lambda: staged_by(second) > 0)
        replacement = first.die(3)
        threads += [one.start(number_of) for one in reading]
        threads.append(replacement.start(made))  # the replacement and the second worker share the replays
        assert sorted(out) == list(range(items))
        for thread in threads:
            thread.join()
    assert _core._references() == 0


def staged_by(worker: RemoteWorker) -> int:
    """Return how many outputs of a worker wait for room in the channel."""
    return worker.linked.owner_side.state()["streams"][worker.number]["staged"]
