"""Connect two simulated hosts in one process. Their links fetch outputs from each other."""

from __future__ import annotations

import socket
import threading
from typing import Any

from linked import Linked

SIZE = 100_000


def make(number: int) -> bytes:
    return bytes([number % 251]) * (SIZE + number)


class Fetcher:
    """Fetch outputs for a link from the worker sides of other links, as an agent does.

    Args:
        link: The worker side that needs the outputs.
        sources: The worker sides that store the outputs. The position of a link in this list is its fetch
            address.
        reachable: Decides for each location whether it can be reached.
    """

    def __init__(self, link: Any, sources: list[Any], reachable: Any) -> None:
        self.link, self.reachable = link, reachable
        self.fetched = self.refused = 0
        self.ends, self.threads = [], []
        for source in sources:
            ours, theirs = socket.socketpair()
            self.ends.append(ours)
            self.threads.append(threading.Thread(target=self._serve, args=(source, theirs)))
        self.threads.append(threading.Thread(target=self._fetch))
        for thread in self.threads:
            thread.start()

    @staticmethod
    def _serve(source: Any, sock: socket.socket) -> None:
        with sock:
            source.serve_fetches(sock.fileno())

    def _fetch(self) -> None:
        while True:
            kind, *values = self.link.wait() or ("",)
            if kind == "closed":
                return
            if kind != "to fetch":
                continue
            location = values[2]
            end = self.ends[int(location[32:])]
            if self.reachable() and self._get(end.fileno(), location):
                self.fetched += 1
            else:
                self.refused += 1
                self.link.report_unreachable(location)

    def _get(self, fd: int, location: bytes) -> bool:
        self.link.request(fd, location)
        return bool(self.link.fetch(fd, location))

    def close(self) -> None:
        """Wait for the threads; the link must be closed."""
        for end in self.ends:
            end.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join()
        for end in self.ends:
            end.close()


class Hosts:
    """Two links, whose worker sides fetch outputs from each other.

    Args:
        reachable: Decides for each location that the second host fetches whether it can be reached.
    """

    def __init__(self, reachable: Any = lambda: True) -> None:
        self.links = self.makers, self.readers = Linked(), Linked()
        sides = [linked.worker_side for linked in self.links]
        for number, linked in enumerate(self.links):
            for side in (linked.owner_side, linked.worker_side):
                side.set_fetch_address(str(number))
            linked.connect()
        self.fetchers = [Fetcher(sides[0], sides, lambda: True), Fetcher(sides[1], sides, reachable)]
        self.fetcher = self.fetchers[1]

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *exc: object) -> None:
        for linked in self.links:
            linked.__exit__()
        for fetcher in self.fetchers:
            fetcher.close()
