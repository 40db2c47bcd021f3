"""Reconnect a link after breaks: Python dials and authenticates again, and the link continues (R10, C11)."""

from __future__ import annotations

import contextlib
import secrets
import threading
from typing import Any

import pytest

from benchmarks.slow_connections import cut
from flowchan import Channel
from flowchan.transport import link_events
from flowchan.transport.dial import reach
from flowchan.transport.listener import AuthenticatedListener
from flowchan.transport.tcp import listen
from tests.link.linked import Linked, RemoteWorker, feeding, kill_tls_proxies
from tests.support.waiting import WAIT_LIMIT_S, wait_until


class Returning(Linked):
    """Two ends that reconnect after each break. One dials and the other listens, like an agent and its
    driver."""

    def __init__(self, address: str = "127.0.0.1:0", tls: bool = False) -> None:
        super().__init__()
        self.tls = tls
        self.secret = secrets.token_bytes(32)
        self.listener = AuthenticatedListener(listen(address), self.secret, {}, tls=tls)
        self.over = threading.Event()
        self.threads = [threading.Thread(target=work) for work in (self._accept, self._reconnect)]

    def connect(self) -> None:
        sock, _, _ = reach(
            self.listener.address, self.secret, {},
            why="can't reach the owner side",
            within=WAIT_LIMIT_S, tls=self.tls, wanted=lambda: not self.over.is_set(),
        )  # fmt: skip
        self.worker_side.attach(sock.detach())

    def __enter__(self) -> Returning:
        self.threads[0].start()
        super().__enter__()
        self.threads[1].start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.over.set()
        super().__exit__(*exc)
        for thread in self.threads:
            thread.join(WAIT_LIMIT_S)
        self.listener.close()

    def _accept(self) -> None:
        while not self.over.is_set():
            try:
                sock, _ = self.listener.accept(0.05)
            except TimeoutError:
                continue
            self.owner_side.attach(sock.detach())

    def _reconnect(self) -> None:
        for event in link_events.watch(self.worker_side, WAIT_LIMIT_S):
            if isinstance(event, link_events.LinkBroken) and not self.over.is_set():
                with contextlib.suppress(OSError):  # the test is ending
                    self.connect()

    def break_(self) -> None:
        """Break the connection, in this process or in its TLS proxy."""
        kill_tls_proxies() if self.tls else cut()

    def are_connected(self) -> bool:
        return bool(self.owner_side.state()["connected"] and self.worker_side.state()["connected"])


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_items_arrive_once_and_in_order_despite_many_reconnections(tls: bool) -> None:
    if tls:
        pytest.importorskip("cryptography")
    often = 4_000 if tls else 200
    with Returning(tls=tls) as linked:
        source, results = Channel[Any](100, across="processes"), Channel[Any](100, across="processes")
        working = RemoteWorker(linked, 1, source, results, ordered=True).start(lambda item: [(0, item)])
        feeder = feeding(source, range(20_000))
        found = []
        for item in results:
            found.append(item)
            if item % often == often // 2:
                linked.break_()
        assert found == list(range(20_000))
        feeder.join(WAIT_LIMIT_S)
        working.join(WAIT_LIMIT_S)
        assert linked.owner_side.state()["breaks"] > (1 if tls else 20)


def test_link_reconnects_over_ipv6() -> None:
    try:
        linked = Returning("[::1]:0")
    except OSError:
        pytest.skip("IPv6 is not available")
    with linked:
        wait_until(linked.are_connected)
        breaks = linked.worker_side.state()["breaks"]
        linked.break_()
        wait_until(lambda: linked.worker_side.state()["breaks"] > breaks and linked.are_connected())
