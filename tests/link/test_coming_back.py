"""Reconnect a link after breaks: Python dials and proves the secret again, and the link continues (R10,
C11)."""

from __future__ import annotations

import contextlib
import secrets
import threading
from typing import Any

import pytest

from benchmarks.far import cut
from flowchan import Channel
from flowchan.transport import link_events
from flowchan.transport.dial import reach
from flowchan.transport.listener import AuthenticatedListener
from flowchan.transport.tcp import listen
from tests.link.linked import FarWorker, Linked, feeding, kill_relays
from tests.support.waiting import WAIT_LIMIT_S, wait_until


class Returning(Linked):
    """Two ends whose owners dial and listen again after each break, as an agent and its driver do."""

    def __init__(self, address: str = "127.0.0.1:0", tls: bool = False) -> None:
        super().__init__()
        self.tls = tls
        self.secret = secrets.token_bytes(32)
        self.door = AuthenticatedListener(listen(address), self.secret, {}, tls=tls)
        self.over = threading.Event()
        self.keepers = [threading.Thread(target=work) for work in (self._let_in, self._keep)]

    def connect(self) -> None:
        sock, _ = reach(
            self.door.address, self.secret, {},
            why="can't reach home", within=WAIT_LIMIT_S, tls=self.tls, wanted=lambda: not self.over.is_set(),
        )  # fmt: skip
        self.away.attach(sock.detach())

    def __enter__(self) -> Returning:
        self.keepers[0].start()
        super().__enter__()
        self.keepers[1].start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.over.set()
        super().__exit__(*exc)
        for keeper in self.keepers:
            keeper.join(WAIT_LIMIT_S)
        self.door.close()

    def _let_in(self) -> None:
        while not self.over.is_set():
            try:
                sock, _ = self.door.accept(0.05)
            except TimeoutError:
                continue
            self.home.attach(sock.detach())

    def _keep(self) -> None:
        for event in link_events.watch(self.away, WAIT_LIMIT_S):
            if isinstance(event, link_events.LinkBroken) and not self.over.is_set():
                with contextlib.suppress(OSError):  # the test ends
                    self.connect()

    def break_(self) -> None:
        """End the connection, in whichever process it is."""
        kill_relays() if self.tls else cut()

    def are_connected(self) -> bool:
        return bool(self.home.state()["connected"] and self.away.state()["connected"])


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_items_arrive_once_and_in_order_over_many_breaks(tls: bool) -> None:
    if tls:
        pytest.importorskip("cryptography")
    often = 4_000 if tls else 200
    with Returning(tls=tls) as linked:
        source, results = Channel[Any](100, across="processes"), Channel[Any](100, across="processes")
        working = FarWorker(linked, 1, source, results, ordered=True).start(lambda item: [(0, item)])
        feeder = feeding(source, range(20_000))
        found = []
        for item in results:
            found.append(item)
            if item % often == often // 2:
                linked.break_()
        assert found == list(range(20_000))
        feeder.join(WAIT_LIMIT_S)
        working.join(WAIT_LIMIT_S)
        assert linked.home.state()["breaks"] > (1 if tls else 20)


def test_link_reconnects_over_ipv6() -> None:
    try:
        linked = Returning("[::1]:0")
    except OSError:
        pytest.skip("IPv6 is not there")
    with linked:
        wait_until(linked.are_connected)
        breaks = linked.away.state()["breaks"]
        linked.break_()
        wait_until(lambda: linked.away.state()["breaks"] > breaks and linked.are_connected())
