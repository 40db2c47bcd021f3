"""Cut a connection in the middle of a large item.

Outputs that the channel already has are skipped once, and repeated frames are put only once (R4, C11).
"""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import threading
from typing import Any

import pytest

from flowchan import Channel, _core
from flowchan.transport.link_events import LinkBroken, LinkClosed, next_event
from tests.link.linked import Linked, RemoteWorker, feeding
from tests.support.waiting import WAIT_LIMIT_S, wait_until

LARGE = bytes(200_000)


class Cut(Linked):
    """Two ends whose connections are cut one after another.

    Args:
        cuts: for each connection, the number of bytes to the owner side before it is cut; the last connection
            is not cut
        both_ways: whether bytes to the worker side are counted and cut in the same way
    """

    def __init__(self, *cuts: int, both_ways: bool = False) -> None:
        super().__init__()
        self.both_ways = both_ways
        self.stuck: list[float] = []
        self._relays: list[threading.Thread] = []
        self._again = threading.Thread(target=self._redial, args=(cuts,))

    def __enter__(self) -> Cut:
        self._again.start()
        return self

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self._again.join(WAIT_LIMIT_S)

    def _redial(self, cuts: tuple[int, ...]) -> None:
        for cut in cuts:
            self._connect_through(cut)
            while not isinstance(event := next_event(self.owner_side, WAIT_LIMIT_S), LinkBroken):
                if isinstance(event, LinkClosed):  # all bytes have arrived without a cut
                    return
            wait_until(lambda: not self.worker_side.state()["connected"])
            self.stuck.append(self.worker_side.state()["stuck_for"])
            for relay in self._relays:
                relay.join(WAIT_LIMIT_S)
        self.connect()

    def _connect_through(self, cut: int) -> None:
        owner_end, proxy_owner_end = socket.socketpair()
        proxy_worker_end, worker_end = socket.socketpair()
        self._relays = [
            threading.Thread(
                target=pass_on, args=(proxy_owner_end, proxy_worker_end, cut if self.both_ways else None)
            ),
            threading.Thread(target=pass_on, args=(proxy_worker_end, proxy_owner_end, cut)),
        ]
        attaching = threading.Thread(target=self.owner_side.attach, args=(owner_end.detach(),))
        attaching.start()
        self.worker_side.attach(worker_end.detach())
        attaching.join()
        for relay in self._relays:
            relay.start()


def pass_on(source: socket.socket, target: socket.socket, most: int | None) -> None:
    """Forward up to ``most`` bytes, and then end both connections."""
    remaining = most
    with contextlib.suppress(OSError):
        while remaining != 0 and (came := source.recv(65536 if remaining is None else min(remaining, 65536))):
            target.sendall(came)
            remaining = None if remaining is None else remaining - len(came)
    for sock in (source, target):
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
    source.close()  # the other thread closes ``target``, which is its own source


def large(item: int) -> list[tuple[int, Any]]:
    return [(0, (item, k, LARGE)) for k in range(4)]


def channel(capacity: int) -> Channel[Any]:
    return Channel(capacity, across="processes", max_bytes=1 << 26)


EVERYTHING = list(itertools.product(range(3), range(4)))
CUTS = [100_000, 150_000, 300_000, 1_000_000]


@pytest.mark.parametrize("times", range(5))
def test_outputs_arrive_once_if_the_connection_breaks_mid_item(times: int) -> None:
    with Cut(*CUTS) as linked:
        source, results = channel(4), channel(1000)
        thread = RemoteWorker(linked, 1, source, results).start(large)
        feeding(source, range(3)).join(WAIT_LIMIT_S)
        assert [output[:2] for output in results] == EVERYTHING
        thread.join(WAIT_LIMIT_S)


@pytest.mark.parametrize("times", range(5))
def test_outputs_already_put_are_skipped_once_after_broken_connections(times: int) -> None:
    source, results = channel(4), channel(1000)
    with Linked() as first:
        remote = RemoteWorker(first, 1, source, results)
        feeder = feeding(source, range(3))
        assert remote.inside.get(timeout=WAIT_LIMIT_S) == 0
        remote.outside[0].put((0, 0, LARGE))
        wait_until(lambda: results.stats().items_in == 1)
        first.owner_side.drop(1)
        first.owner_side.close()
        replacement, writer = source.reader(), results.writer()
        _core._take_up([remote.reader], remote.writers, [replacement])
        with Cut(*CUTS) as second:
            again = RemoteWorker(second, 1, source, results)
            replacement.close()
            writer.close()
            thread = again.start(large)
            outputs = [output[:2] for output in results]
            thread.join(WAIT_LIMIT_S)
            feeder.join(WAIT_LIMIT_S)
    assert sorted(outputs) == EVERYTHING


def test_output_continues_after_the_bytes_that_arrived_before_a_break() -> None:
    size, cut = 1_000_000, 150_000
    with Cut(*[cut] * 20) as linked:
        source, results = channel(4), channel(4)
        thread = RemoteWorker(linked, 1, source, results).start(lambda item: [(0, bytes(size))])
        feeding(source, range(2)).join(WAIT_LIMIT_S)
        assert [len(output) for output in results] == [size, size]
        thread.join(WAIT_LIMIT_S)
        # each connection resends at most 64 KB of an item, and the state frames
        assert linked.owner_side.state()["bytes_in"] < 2 * size + 20 * 64_000
        assert max(linked.stuck) == 0


@pytest.mark.parametrize("seed", range(20))
def test_items_and_outputs_are_exact_over_connections_cut_anywhere(seed: int) -> None:
    draw = random.Random(seed)
    cuts = [int(2 ** draw.uniform(14, 20)) for _ in range(60)]
    items = [(n, draw.randbytes(int(2 ** draw.uniform(4, 20.5)))) for n in range(30)]
    with Cut(*cuts, both_ways=True) as linked:
        source, results = channel(draw.choice([1, 4, 100])), channel(draw.choice([1, 4, 100]))
        worker = RemoteWorker(linked, 1, source, results, ordered=draw.random() < 0.5)
        thread = worker.start(lambda item: [(0, item), (0, item[1][::-1])])
        feeder = feeding(source, items)
        assert [*results] == [output for item in items for output in (item, item[1][::-1])]
        feeder.join(WAIT_LIMIT_S)
        thread.join(WAIT_LIMIT_S)


def test_link_reports_how_long_its_connections_carried_no_data() -> None:
    with Cut(*[20_000] * 6) as linked:
        source, results = channel(4), channel(4)
        thread = RemoteWorker(linked, 1, source, results).start(lambda item: [(0, bytes(60_000))])
        feeding(source, range(1)).join(WAIT_LIMIT_S)
        assert [len(output) for output in results] == [60_000]
        thread.join(WAIT_LIMIT_S)
        assert linked.stuck[-1] > linked.stuck[-2] > 0
        wait_until(lambda: not linked.owner_side.state()["streams"][1]["ahead"])


def test_idle_link_with_breaking_connections_is_not_stuck() -> None:
    with Linked() as linked:
        for _ in range(5):
            linked.connect()
        assert linked.owner_side.state()["stuck_for"] == linked.worker_side.state()["stuck_for"] == 0
