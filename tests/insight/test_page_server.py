"""Test the server of a run's page: which requests it accepts, how it replies, and how it closes."""

from __future__ import annotations

import http.client
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

import pytest

from flowchan.viz.insight import server as serving
from flowchan.viz.insight.server import HttpReply, LocalServer, Streaming, json_reply


class Endless:
    """A reply that sends data until the client disconnects."""

    kind = "text/event-stream"

    def __init__(self) -> None:
        self.closed = threading.Event()

    def __iter__(self) -> Iterator[bytes]:
        while True:
            yield b"x" * 100_000

    def close(self) -> None:
        self.closed.set()


STREAMS: list[Endless] = []


def root(query: Mapping[str, str]) -> HttpReply:
    return json_reply(dict(query))


def endless(query: Mapping[str, str]) -> Streaming:
    STREAMS.append(Endless())
    return STREAMS[-1]


def broken(query: Mapping[str, str]) -> HttpReply:
    raise ValueError("no page")


@pytest.fixture
def server() -> Iterator[LocalServer]:
    STREAMS.clear()
    server = LocalServer("test", {"": root, "endless": endless, "broken": broken})
    yield server
    server.close()


def connect(server: LocalServer, timeout: float = 60) -> socket.socket:
    return socket.create_connection(("127.0.0.1", urlsplit(server.address).port), timeout)


def request(
    server: LocalServer, path: str = "", method: str = "GET", host: str | None = None
) -> http.client.HTTPResponse:
    url = urlsplit(server.address)
    connection = http.client.HTTPConnection("127.0.0.1", url.port or 0, timeout=60)
    connection.putrequest(method, path if path.startswith("/") else url.path + path, skip_host=True)
    connection.putheader("Host", url.netloc if host is None else host)
    connection.endheaders()
    return connection.getresponse()


def test_root_route_receives_query_parameters(server: LocalServer) -> None:
    with request(server, "?stage=s1&text=a%20b") as reply:
        assert (reply.status, reply.read()) == (200, b'{"stage":"s1","text":"a b"}')


def test_address_contains_144_bit_token(server: LocalServer) -> None:
    first, second = urlsplit(server.address).path, serving.TOKEN_BYTES
    assert second * 8 == 144
    assert len(first.strip("/")) == 24


def test_request_with_wrong_token_is_not_found(server: LocalServer) -> None:
    path = urlsplit(server.address).path
    for wrong in ("/", "/wrong/", path[:-2] + "/", path.upper(), path.rstrip("/"), "/%C3%A4/", "//"):
        with request(server, wrong) as reply:
            assert reply.status == 404, wrong


def test_request_with_non_ascii_token_is_not_found(server: LocalServer) -> None:
    with connect(server) as raw:
        raw.sendall(f"GET /ä/ HTTP/1.1\r\nHost: {urlsplit(server.address).netloc}\r\n\r\n".encode())
        assert raw.recv(12) == b"HTTP/1.0 404"


def test_address_that_is_not_a_url_is_refused(server: LocalServer) -> None:
    with connect(server) as raw:
        raw.sendall(f"GET http://[ HTTP/1.1\r\nHost: {urlsplit(server.address).netloc}\r\n\r\n".encode())
        assert raw.recv(12) == b"HTTP/1.0 400"


def test_request_for_unknown_path_is_not_found(server: LocalServer) -> None:
    for path in ("page", "../", "static/../../secret", "static/%2e%2e/x"):
        with request(server, path) as reply:
            assert reply.status == 404


@pytest.mark.parametrize("host", ["example.com", "127.0.0.1", "127.0.0.1:1", "", "[::1]:80"])
def test_request_with_foreign_host_header_is_refused(server: LocalServer, host: str) -> None:
    with request(server, host=host) as reply:
        assert reply.status == 403


def test_request_with_two_host_headers_is_refused(server: LocalServer) -> None:
    url = urlsplit(server.address)
    with connect(server) as raw:
        raw.sendall(f"GET {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\nHost: evil.com\r\n\r\n".encode())
        assert raw.recv(12) == b"HTTP/1.0 403"


def test_request_for_localhost_is_answered(server: LocalServer) -> None:
    with request(server, host=f"localhost:{urlsplit(server.address).port}") as reply:
        assert reply.status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH", "CONNECT"])
def test_methods_other_than_get_and_head_are_not_allowed(server: LocalServer, method: str) -> None:
    with request(server, method=method) as reply:
        assert (reply.status, reply.headers["Allow"]) == (405, "GET, HEAD")


def test_head_returns_same_headers_as_get_without_body(server: LocalServer) -> None:
    with request(server, method="HEAD") as head, request(server) as get:
        assert head.headers["Content-Length"] == get.headers["Content-Length"]
        assert head.read() == b""


def test_head_request_for_stream_sends_no_body_and_closes_stream(server: LocalServer) -> None:
    with request(server, "endless", "HEAD") as head:
        assert head.read() == b""
    assert STREAMS[0].closed.wait(60)


def test_every_reply_has_security_headers(server: LocalServer) -> None:
    for path, method in (("", "GET"), ("unknown", "GET"), ("", "POST"), ("/", "GET"), ("broken", "GET")):
        with request(server, path, method) as reply:
            policy = reply.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "unsafe-inline" not in policy
            assert reply.headers["Referrer-Policy"] == "no-referrer"
            assert reply.headers["X-Content-Type-Options"] == "nosniff"
            assert reply.headers["Cache-Control"] == "no-store"


def test_failing_route_returns_500_and_is_logged(
    server: LocalServer, caplog: pytest.LogCaptureFixture
) -> None:
    with request(server, "broken") as reply:
        assert reply.status == 500
    assert "the request for 'broken' failed" in caplog.text
    with request(server) as reply:
        assert reply.status == 200


def test_request_that_is_not_http_gets_an_error(server: LocalServer) -> None:
    with connect(server) as raw:
        raw.sendall(b"\x16\x03\x01 \x02\x00\r\n\r\n")
        assert b"Bad Request" in raw.recv(1000)


def test_client_that_does_not_read_is_dropped_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving._Handler, "timeout", 0.1)
    STREAMS.clear()
    server = LocalServer("test", {"": endless})
    try:
        with connect(server) as raw:
            url = urlsplit(server.address)
            raw.sendall(f"GET {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\n\r\n".encode())
            assert raw.recv(1) == b"H"
            assert STREAMS[0].closed.wait(60)
    finally:
        server.close()


def test_client_that_sends_nothing_is_dropped_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving._Handler, "timeout", 0.1)
    server = LocalServer("test", {"": root})
    try:
        with connect(server) as raw:
            assert raw.recv(1) == b""
    finally:
        server.close()


def test_close_drops_a_client_that_does_not_read(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "CLOSE_TIMEOUT_S", 0.05)
    url = urlsplit(server.address)
    with connect(server) as raw:
        raw.sendall(f"GET {url.path}endless HTTP/1.1\r\nHost: {url.netloc}\r\n\r\n".encode())
        assert raw.recv(1) == b"H"
        server.close()
        assert STREAMS[0].closed.is_set()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("test ")]


def test_close_frees_the_port(server: LocalServer) -> None:
    server.close()
    with pytest.raises(ConnectionRefusedError):
        connect(server)
    LocalServer("test", {"": root}, port=urlsplit(server.address).port or 0).close()


def test_connections_above_the_limit_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MOST_CONNECTIONS", 2)
    server = LocalServer("test", {"": root})
    try:
        with connect(server), connect(server), connect(server) as third:
            assert third.recv(1) == b""
    finally:
        server.close()


def test_port_in_use_is_refused(server: LocalServer) -> None:
    with pytest.raises(OSError, match="in use"):
        LocalServer("test", {"": root}, port=urlsplit(server.address).port or 0)


def test_server_without_token_answers_at_the_root() -> None:
    server = LocalServer("test", {"metrics": root}, with_token=False)
    try:
        with request(server, "/metrics") as reply:
            assert reply.status == 200
    finally:
        server.close()


def test_forked_children_and_exec_close_server_sockets(server: LocalServer) -> None:
    with connect(server) as raw:
        url = urlsplit(server.address)
        raw.sendall(f"GET {url.path}endless HTTP/1.1\r\nHost: {url.netloc}\r\n\r\n".encode())
        assert raw.recv(1) == b"H"
        sockets = [server._http.socket, *server._http.connections]
        numbers = [one.fileno() for one in sockets]
        assert len(numbers) == 2
        assert not any(os.get_inheritable(number) for number in numbers)
        child = os.fork()
        if not child:
            still_open = 0
            for number in numbers:
                try:
                    os.fstat(number)
                    still_open += 1
                except OSError:
                    pass
            os._exit(still_open)
        assert os.waitpid(child, 0)[1] == 0
        assert raw.recv(1)  # the parent's connection still works
