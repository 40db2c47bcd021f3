"""Cut a connection in the middle of a large item.

Outputs that are already in the channel are skipped once, and repeated frames are put only once (R4, C11).
"""

from __future__ import annotations

import contextlib
import itertools
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
    """

    def __init__(self, *cuts: int) -> None:
        super().__init__()
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
                if isinstance(event, LinkClosed):  # all bytes arrived without a cut
                    return
            for relay in self._relays:
                relay.join(WAIT_LIMIT_S)
        self.connect()

    def _connect_through(self, cut: int) -> None:
        owner_end, proxy_owner_end = socket.socketpair()
        proxy_worker_end, worker_end = socket.socketpair()
        self._relays = [
            threading.Thread(target=pass_on, args=(proxy_owner_end, proxy_worker_end, None)),
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
    source.close()  # the other thread closes ``target``, which is its source


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
