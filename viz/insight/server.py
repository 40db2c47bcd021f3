"""Serve the page and the metrics of a run over HTTP, usually on the loopback interface.

Algorithm. One thread accepts connections. Each connection has its own thread, which answers one request. A
route is a function that returns an :class:`HttpReply` or a :class:`Streaming` reply. The server sends a
streaming reply part by part.

The server answers only GET and HEAD requests. No request can change anything. If the server listens on
127.0.0.1, the ``Host`` header must name this server. The server thereby rejects requests from web sites whose
name resolves to 127.0.0.1 (DNS rebinding). If the server has a token, all paths begin with that token.

Invariants. A client that does not read, or does not send its request, occupies a thread for at most
``CLIENT_TIMEOUT_S`` seconds. When :meth:`LocalServer.close` returns, the port is closed and all threads have
exited. A forked child closes its copies of the sockets.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import secrets
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from time import monotonic, sleep
from typing import Any, Protocol
from urllib.parse import parse_qsl, unquote, urlsplit

log = logging.getLogger("flowchan.viz")

LOOPBACK = "127.0.0.1"
TOKEN_BYTES = 18
"""Number of random bytes in a token (144 bits)."""
CLIENT_TIMEOUT_S = 10.0
"""Seconds that a client may take to send its request, or to receive a part of a reply."""
CLOSE_TIMEOUT_S = 1.0
"""Seconds that replies in progress may take when the server is closed."""
ACCEPT_PAUSE_S = 0.1
"""Seconds to wait after an error before accepting the next connection."""
MOST_CONNECTIONS = 64
"""Maximum number of simultaneous connections; further connections are closed immediately."""

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True, slots=True)
class HttpReply:
    """Complete reply to a request."""

    body: bytes
    kind: str = "application/json"
    status: int = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)


class Streaming(Protocol):
    """Reply that is sent part by part. The server closes the reply even if nothing has been sent."""

    kind: str

    def __iter__(self) -> Iterator[bytes]: ...

    def close(self) -> None: ...


Route = Callable[[Mapping[str, str]], HttpReply | Streaming]
"""Function that receives the query parameters and returns a reply."""


def json_reply(value: Any, status: int = HTTPStatus.OK) -> HttpReply:
    """Return a reply that contains a value as JSON."""
    return HttpReply(json.dumps(value, separators=(",", ":")).encode(), status=status)


def error_reply(text: str, status: int = HTTPStatus.NOT_FOUND) -> HttpReply:
    """Return a reply that reports an error."""
    return json_reply({"error": text}, status)


class LocalServer:
    """Server that answers requests until it is closed.

    Args:
        name: Prefix for the names of the server's threads.
        routes: Function for each path. Paths omit the leading slash and the token; the root is an empty path.
        port: Port to listen on; 0 chooses a free port.
        with_token: True to require a random token as the first part of all paths.
        host: Address to listen on. With an address other than 127.0.0.1, requests may have any ``Host``
            header.
        start: True to start answering requests now. If false, the caller must call :meth:`start`.

    Raises:
        OSError: The port is in use.
    """

    def __init__(
        self,
        name: str,
        routes: Mapping[str, Route],
        *,
        port: int = 0,
        with_token: bool = True,
        host: str = LOOPBACK,
        start: bool = True,
    ) -> None:
        self._token = secrets.token_urlsafe(TOKEN_BYTES) if with_token else ""
        self._http = _Http(name, routes, (host, port), self._token)
        self._thread = threading.Thread(target=self._http.accept_all, name=f"{name} server", daemon=True)
        _open.add(self._http)
        if start:
            self.start()

    def start(self) -> None:
        """Start the thread that accepts connections. If that fails, close the port and raise."""
        try:
            self._thread.start()
        except BaseException:  # for example, because the process has reached its thread limit
            self._http.server_close()
            raise

    @property
    def address(self) -> str:
        """Return the URL of the root, with a slash at the end."""
        token = f"{self._token}/" if self._token else ""
        host = self._http.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self._http.server_port}/{token}"

    def close(self) -> None:
        """Stop listening, and wait until all connections are closed.

        Replies in progress may take up to ``CLOSE_TIMEOUT_S`` seconds. Then their connections are closed.
        """
        self._http.stop_accepting()
        if self._thread.ident is not None:
            self._thread.join()
        self._http.end(monotonic() + CLOSE_TIMEOUT_S)


class _Http(ThreadingHTTPServer):
    """Listening socket of a server, and its open connections."""

    daemon_threads = True
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, name: str, routes: Mapping[str, Route], address: tuple[str, int], token: str) -> None:
        self.name, self.routes, self.token = name, routes, token.encode()
        self.ending = False
        self.connections: dict[socket.socket, threading.Thread] = {}
        self.host = address[0]
        self.address_family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        super().__init__(address, _Handler)
        self.hosts = {f"{LOOPBACK}:{self.server_port}", f"localhost:{self.server_port}"}

    def server_bind(self) -> None:
        # Do not call HTTPServer's method, which can take seconds to look up this machine's name.
        TCPServer.server_bind(self)
        self.server_port = self.socket.getsockname()[1]

    def accept_all(self) -> None:
        while not self.ending:
            self.handle_request()

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:  # for example, because the process has too many open files
            if not self.ending:
                sleep(ACCEPT_PAUSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.ending or len(self.connections) >= MOST_CONNECTIONS:
            self.shutdown_request(request)
            return
        thread = threading.Thread(
            target=self._answer, args=(request, client_address), name=f"{self.name} viewer", daemon=True
        )
        self.connections[request] = thread
        try:
            thread.start()
        except BaseException:
            self._forget(request)
            raise

    def _answer(self, request: socket.socket, client_address: Any) -> None:
        try:
            self.process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def _forget(self, request: socket.socket) -> None:
        self.connections.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error of a connection. Usually, the client has disconnected."""

    def stop_accepting(self) -> None:
        self.ending = True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread

    def end(self, limit: float) -> None:
        threads = list(self.connections.values())
        for thread in threads:
            thread.join(max(0.0, limit - monotonic()))
        for connection in list(self.connections):
            with contextlib.suppress(OSError):  # the connection may already be closed
                connection.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        self.server_close()
        _open.discard(self)

    def close_in_child(self) -> None:
        """Close the sockets that a forked child has inherited, without closing the parent's connections."""
        for inherited in (self.socket, *self.connections):
            with contextlib.suppress(OSError):
                os.close(inherited.detach())


class _Handler(BaseHTTPRequestHandler):
    """Handler for one request. The connection is closed after the reply (HTTP/1.0)."""

    server: _Http
    timeout = CLIENT_TIMEOUT_S

    def do_GET(self) -> None:
        self._answer(self._reply())

    do_HEAD = do_GET  # noqa: N815

    def __getattr__(self, name: str) -> Any:
        """Return the function that refuses all methods other than GET and HEAD."""
        if name.startswith("do_"):
            return lambda: self._answer(_status(HTTPStatus.METHOD_NOT_ALLOWED, {"Allow": "GET, HEAD"}))
        raise AttributeError(name)

    def _reply(self) -> HttpReply | Streaming:
        hosts = self.headers.get_all("Host") or []
        is_local = self.server.host == LOOPBACK
        if is_local and (len(hosts) != 1 or hosts[0].lower() not in self.server.hosts):
            return _status(HTTPStatus.FORBIDDEN)
        try:
            url = urlsplit(self.path)
        except ValueError:  # for example "http://["
            return _status(HTTPStatus.BAD_REQUEST)
        path = url.path.removeprefix("/")
        if self.server.token:
            token, slash, path = path.partition("/")
            # Encode the token as latin-1, because http.server has decoded it so.
            if not hmac.compare_digest(token.encode("latin-1"), self.server.token) or not slash:
                return _status(HTTPStatus.NOT_FOUND)
        route = self.server.routes.get(unquote(path))
        if route is None:
            return _status(HTTPStatus.NOT_FOUND)
        try:
            return route(dict(parse_qsl(url.query)))
        except Exception:
            log.exception("the request for %r failed", path)
            return _status(HTTPStatus.INTERNAL_SERVER_ERROR)

    def _answer(self, reply: HttpReply | Streaming) -> None:
        if isinstance(reply, HttpReply):
            self._begin(reply.status, reply.kind, {"Content-Length": str(len(reply.body)), **reply.headers})
            if self.command != "HEAD":
                self.wfile.write(reply.body)
            return
        with contextlib.closing(reply):
            self._begin(HTTPStatus.OK, reply.kind, {})
            if self.command != "HEAD":
                for part in reply:
                    self.wfile.write(part)

    def _begin(self, status: int, kind: str, headers: Mapping[str, str]) -> None:
        safe = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Security-Policy": CSP,
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-store",
        }
        self.send_response(status)
        for name, value in (safe | dict(headers)).items():
            self.send_header(name, value)
        self.end_headers()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send the reply to a request that is not valid HTTP."""
        self._answer(_status(HTTPStatus(code)))

    def version_string(self) -> str:
        """Return the name of the server, without any version."""
        return "flowchan"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Do not write a log."""


def _status(status: HTTPStatus, headers: Mapping[str, str] | None = None) -> HttpReply:
    error = error_reply(status.phrase, status)
    return HttpReply(error.body, error.kind, status, headers or {})


_open: weakref.WeakSet[_Http] = weakref.WeakSet()


def _close_in_child() -> None:
    for server in list(_open):
        server.close_in_child()
    _open.clear()


os.register_at_fork(after_in_child=_close_in_child)
