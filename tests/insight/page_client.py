"""Request a run's page in tests, and read the events that its server sends."""

from __future__ import annotations

import http.client
import json
import socket
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit


def get(address: str, path: str = "") -> tuple[int, bytes]:
    """Request a path of the page, and return the status and the body of the reply."""
    url = urlsplit(address)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=60)
    connection.request("GET", url.path + path)
    with connection.getresponse() as reply:
        return reply.status, reply.read()


def get_json(address: str, path: str) -> Any:
    status, body = get(address, path)
    assert status == 200, body
    return json.loads(body)


class PageViewer:
    """A viewer that reads the events of a page one by one."""

    def __init__(self, address: str) -> None:
        url = urlsplit(address)
        self.socket = socket.create_connection((url.hostname, url.port), timeout=60)
        self.socket.sendall(f"GET {url.path}snapshots HTTP/1.1\r\nHost: {url.netloc}\r\n\r\n".encode())
        self._reader = self.socket.makefile("rb")
        self.status = int(self._reader.readline().split()[1])
        while self._reader.readline().strip():
            pass

    def read(self) -> tuple[str, Any] | None:
        """Return the name and the data of the next event, or ``None`` at the end of the stream."""
        name = self._reader.readline().decode().strip()
        if not name:
            return None
        value = self._reader.readline().decode()
        assert name.startswith("event: ")
        assert value.startswith("data: ")
        assert self._reader.readline() == b"\n"
        return name.removeprefix("event: "), json.loads(value.removeprefix("data: "))

    def read_all(self) -> list[tuple[str, Any]]:
        events = []
        while (event := self.read()) is not None:
            events.append(event)
        return events

    def read_until(self, found: Any) -> Any:
        """Read events, and return the first snapshot for which ``found`` returns a true value."""
        while (event := self.read()) is not None:
            if event[0] == "snapshot" and found(event[1]):
                return event[1]
        raise AssertionError("the stream ended first")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.close()
        self.socket.close()
